"""What `sync` is given wrongly, or differently from the call before: named, and nothing changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import anyrank


def test_a_renaming_function_may_change_its_mind() -> None:
    src, dst = {"p": torch.ones(2), "q": torch.full((2,), 2.0)}, {"w": torch.zeros(2)}
    chosen = "p"

    def rename(name: str) -> str:
        return "w" if name == chosen else name

    for name, value, is_planned in (
        ("p", 1, True),
        ("q", 2, True),
        ("q", 2, False),
        ("p", 1, True),
    ):
        chosen = name
        report = anyrank.sync(dst, src, rename=rename, unexpected="ignore")
        assert dst["w"].tolist() == [value, value]
        assert report.is_planned is is_planned
    for _ in range(2):  # another function that says the same
        report = anyrank.sync(dst, src, rename=lambda name: rename(name), unexpected="ignore")
        assert not report.is_planned


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize")
@pytest.mark.parametrize("end", ["src", "dst"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: t.to_sparse(), "w: is a torch.sparse_coo tensor"),
        (lambda t: t.reshape(1, -1).to_sparse_csr(), "w: is a torch.sparse_csr tensor"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "w: is a quantised tensor"),
    ],
)
def test_tensors_that_are_not_dense_are_named(end: str, make: Any, words: str) -> None:
    first = torch.zeros(3)
    dst, src = {"a": first, "w": torch.zeros(3)}, {"a": torch.ones(3), "w": torch.ones(3)}
    given = src if end == "src" else dst
    given["w"] = make(given["w"])
    for options in ({}, {"layout": {}}):
        with pytest.raises(anyrank.LoadError, match=re.escape(words)):
            anyrank.sync(dst, src, **options)
    assert not first.any()


def test_keys_that_are_no_names_and_negative_versions_are_refused() -> None:
    good: Any = {"a": torch.ones(2)}
    bad: Any = {1: torch.zeros(2)}
    with pytest.raises(TypeError, match=r"dst= has the key 1, a int: give a dict from names"):
        anyrank.sync(bad, good)
    with pytest.raises(TypeError, match="src= has the key 1, a int"):
        anyrank.sync(good, bad)
    with pytest.raises(ValueError, match="version=-1: give at least 0"):
        anyrank.sync(good, good, version=-1)
    wrong: Any
    for wrong in (np.int64(3), True, 3.0):
        with pytest.raises(TypeError, match=re.escape(f"version={wrong!r}: give an int")):
            anyrank.sync(good, good, version=wrong)


def test_a_version_may_go_back() -> None:
    dst, src = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    assert [anyrank.sync(dst, src, version=v).version for v in (7, 3, None)] == [7, 3, 4]


def test_a_kept_plan_does_not_excuse_a_tensor_that_cannot_be_written_or_read() -> None:
    src = {"a": torch.ones(2), "w": torch.ones(2)}
    anyrank.sync({"a": torch.zeros(2), "w": torch.zeros(2)}, src)
    dst = {"a": torch.zeros(2), "w": torch.zeros(1).expand(2)}
    with pytest.raises(anyrank.LoadError, match="w: is expanded"):
        anyrank.sync(dst, src)
    with torch.inference_mode():
        dst["w"] = torch.zeros(2)
    with pytest.raises(anyrank.LoadError, match="w: is an inference tensor"):
        anyrank.sync(dst, src)
    assert not dst["a"].any()
    z = {"z": torch.full((2,), 1j)}
    anyrank.sync({"z": torch.zeros(2, dtype=torch.complex64)}, z)
    with pytest.raises(anyrank.LoadError, match="z: is a conj or neg view"):
        anyrank.sync({"z": torch.zeros(2, dtype=torch.complex64)}, {"z": z["z"].conj()})


def test_only_a_model_is_told_what_it_holds() -> None:
    given: Any
    for given in ({"w": torch.zeros(1)}, None):
        with pytest.raises(TypeError, match=r"model= takes a torch.nn.Module, not"):
            anyrank.SyncReport.last(given)


def test_a_renaming_function_that_fails_is_named() -> None:
    names: dict[str, str] = {}
    with pytest.raises(anyrank.LoadError, match=r"rename= failed for w: KeyError: 'w'"):
        anyrank.sync({"w": torch.zeros(1)}, {"w": torch.ones(1)}, rename=names.__getitem__)


def test_dicts_of_a_compiled_model_fill_one_another() -> None:
    dst, src = {"_orig_mod.w": torch.zeros(1)}, {"_orig_mod.w": torch.ones(1)}
    assert anyrank.sync(dst, src).renamed == {}
    assert dst["_orig_mod.w"] == 1
    plain = {"w": torch.zeros(1)}
    anyrank.sync(plain, src)
    assert plain["w"] == 1


@pytest.mark.parametrize("writer", ["load", "resume", "load of a part's whole"])
def test_a_model_that_was_given_other_weights_forgets_the_version(
    writer: str, tmp_path: Path
) -> None:
    src, dst = nn.Linear(2, 2), nn.Linear(2, 2)
    held = nn.Sequential(dst) if "part" in writer else dst
    state = anyrank.TrainState(dst)
    if writer == "resume":
        with anyrank.Checkpoints(tmp_path, state) as run:
            run.save()
    assert anyrank.sync(dst, src, version=41).version == 41
    assert anyrank.SyncReport.last(dst) is not None
    if writer == "resume":
        with anyrank.Checkpoints(tmp_path, state) as run:
            assert run.resume() is not None
    else:
        old = {key: torch.zeros_like(value) for key, value in held.state_dict().items()}
        anyrank.load(held, old)
    assert anyrank.SyncReport.last(dst) is None
    assert anyrank.sync(dst, src).version == 1


def test_a_load_that_is_refused_leaves_the_version() -> None:
    src, dst = nn.Linear(2, 2), nn.Linear(2, 2)
    report = anyrank.sync(dst, src, version=41)
    with pytest.raises(anyrank.LoadError):
        anyrank.load(dst, {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)})
    assert anyrank.SyncReport.last(dst) == report


def test_a_wrapper_and_what_is_inside_know_one_version() -> None:
    src, dst = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled: Any = torch.compile(dst, backend="eager")
    anyrank.sync(compiled, src, version=41)
    assert anyrank.SyncReport.last(dst) == anyrank.SyncReport.last(compiled)
    anyrank.load(dst, src.state_dict())
    assert anyrank.SyncReport.last(compiled) is None


def test_ends_that_look_alike_keep_layouts_of_their_own() -> None:
    swapped = {"w": ([0], [Shard(0)], [[(2, 2), (0, 2)]])}
    plain = {"w": ([0], [Shard(0)])}
    for pair, expected in (((plain, swapped), [2, 3, 0, 1]), ((plain, plain), [0, 1, 2, 3])):
        for _ in range(3):
            src, dst = {"w": torch.arange(4.0)}, {"w": torch.zeros(4)}
            anyrank.sync(dst, src, layout=pair, verify=True)
            assert dst["w"].tolist() == expected


def test_a_layout_for_each_end_is_a_pair() -> None:
    plain = {"w": ([0], [Shard(0)])}
    with pytest.raises(TypeError, match="layout= is a tuple of 3: give one for each of dst, src"):
        anyrank.sync({"w": torch.zeros(4)}, {"w": torch.zeros(4)}, layout=(plain, None, None))  # type: ignore[arg-type]
