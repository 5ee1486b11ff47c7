"""What `sync` is given wrongly, or differently from the call before: named, and nothing changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import anyrank


def test_a_renaming_function_may_change_its_mind() -> None:
    src, dst = {"p": torch.ones(2), "q": torch.full((2,), 2.0)}, {"w": torch.zeros(2)}
    chosen = "p"

    def rename(name: str) -> str:
        return "w" if name == chosen else name

    weights = anyrank.Sync(dst, src, rename=rename, unexpected="ignore")
    for name, value, is_planned in (
        ("p", 1, True),
        ("q", 2, True),
        ("q", 2, False),
        ("p", 1, True),
    ):
        chosen = name
        report = weights()
        assert dst["w"].tolist() == [value, value]
        assert report.is_planned is is_planned


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize")
@pytest.mark.parametrize("end", ["src", "dst"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda t: t.to_sparse(), "w: is a torch.sparse_coo tensor"),
        (lambda t: t.reshape(1, -1).to_sparse_csr(), "w: is a torch.sparse_csr tensor"),
        (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "w: is a quantized tensor"),
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


def test_a_kept_plan_does_not_excuse_a_tensor_that_cannot_be_written_or_read() -> None:
    src = {"a": torch.ones(2), "w": torch.ones(2)}
    dst = {"a": torch.zeros(2), "w": torch.zeros(2)}
    weights = anyrank.Sync(dst, src)
    weights()
    dst.update(a=torch.zeros(2), w=torch.zeros(1).expand(2))
    with pytest.raises(anyrank.LoadError, match="w: is an expanded tensor"):
        weights()
    with torch.inference_mode():
        dst["w"] = torch.zeros(2)
    with pytest.raises(anyrank.LoadError, match="w: is an inference tensor"):
        weights()
    assert not dst["a"].any()
    assert weights.version == 1
    z = {"z": torch.full((2,), 1j)}
    weights = anyrank.Sync({"z": torch.zeros(2, dtype=torch.complex64)}, z)
    weights()
    z["z"] = z["z"].conj()
    with pytest.raises(anyrank.LoadError, match="z: is a conj or neg view"):
        weights()


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


def test_a_layout_that_says_something_else_is_read_again() -> None:
    swapped = {"w": ([0], [Shard(0)], [[(2, 2), (0, 2)]])}
    plain = {"w": ([0], [Shard(0)])}
    given: dict[str, Any] = {}
    src, dst = {"w": torch.arange(4.0)}, {"w": torch.zeros(4)}
    weights = anyrank.Sync(dst, src, layout=(plain, given), verify=True)
    planned: list[bool] = []
    for layout, expected in ((swapped, [2, 3, 0, 1]), (plain, [0, 1, 2, 3])):
        given.update(layout)
        for _ in range(2):
            dst["w"].zero_()
            planned.append(weights().is_planned)
            assert dst["w"].tolist() == expected
    assert planned == [True, False, True, False]


def test_a_layout_for_each_end_is_a_pair() -> None:
    plain = {"w": ([0], [Shard(0)])}
    with pytest.raises(TypeError, match=r"layout=: .* a pair for dst and src, got a tuple of 3"):
        anyrank.sync({"w": torch.zeros(4)}, {"w": torch.zeros(4)}, layout=(plain, None, None))  # type: ignore[arg-type]
