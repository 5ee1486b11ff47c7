"""A sync whose two ends share memory: every tensor gets what `src` held before, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyrank

ROTATION = {"1": "0", "2": "1", "0": "2"}


def layers() -> nn.ModuleList:
    """Three layers whose values are their numbers."""
    model = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    with torch.no_grad():
        for number, layer in enumerate(model):
            for parameter in layer.parameters():
                parameter.fill_(number)
    return model


def values(model: nn.ModuleList) -> list[set[float]]:
    return [{x for p in layer.parameters() for x in p.flatten().tolist()} for layer in model]


def give(call: Any, model: Any, source: Any, **options: Any) -> Any:
    return call(model, source, rename=ROTATION, verify=True, **options)


def test_layers_of_one_model_change_places_where_all_is_read_before() -> None:
    model = layers()
    memory = [p.data_ptr() for p in model.parameters()]
    give(anyrank.sync, model, model, atomic=True)
    assert values(model) == [{1.0}, {2.0}, {0.0}]
    assert [p.data_ptr() for p in model.parameters()] == memory


@pytest.mark.parametrize(
    "rotate",
    [
        lambda m: give(anyrank.sync, m, m),
        lambda m: give(anyrank.sync, m, m.state_dict()),
        lambda m: give(anyrank.load, m, m.state_dict()),
    ],
)
def test_memory_of_a_source_that_is_written_before_it_is_read_is_refused(
    rotate: Callable[[nn.ModuleList], Any],
) -> None:
    model = layers()
    with pytest.raises(
        anyrank.LoadError, match=r"shares memory with .* of the source.*\.clone\(\)"
    ):
        rotate(model)
    assert values(model) == [{0.0}, {1.0}, {2.0}]


def test_a_tensor_is_not_filled_from_a_view_of_its_own_memory() -> None:
    base = torch.arange(8.0)
    for call in (anyrank.sync, lambda dst, src: anyrank.load(holder(dst), src)):
        with pytest.raises(anyrank.LoadError, match="w: shares memory with w of the source"):
            call({"k": torch.zeros(2), "w": base[1:7]}, {"k": torch.ones(2), "w": base[:6]})
        assert base.tolist() == list(range(8))


def holder(tensors: dict[str, torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def test_a_model_gives_itself_what_it_has_without_memory() -> None:
    model = nn.Linear(512, 512)
    before = model.weight.clone()
    report = anyrank.sync(model, model, verify=True)
    assert torch.equal(model.weight, before)
    assert report.peak_host_bytes[0] < before.nbytes


@pytest.mark.parametrize(
    "split",
    [
        lambda base: (base[:4], base[2:]),
        lambda base: (base.view(2, 3), base.view(3, 2)),
        lambda base: (base[::2], base[4:]),
        lambda base: (base[::2], base[1::2]),
    ],
)
@pytest.mark.parametrize("atomic", [False, True])
def test_tensors_of_dst_that_overlap_are_refused(split: Any, atomic: bool) -> None:
    base = torch.zeros(6)
    a, b = split(base)
    call = partial(anyrank.sync, {"a": a, "b": b}, atomic=atomic)
    with pytest.raises(anyrank.LoadError, match="a and b overlap in memory"):
        call({"a": torch.ones(a.shape), "b": torch.full(b.shape, 2.0)})
    assert not base.any()


@pytest.mark.parametrize("in_file", [False, True])
def test_tensors_of_a_model_that_overlap_are_refused(in_file: bool, tmp_path: Path) -> None:
    base = torch.zeros(4)
    source = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    save_file(source, tmp_path / "weights.safetensors")
    model = holder({"a": base[:3], "b": base[1:]})
    with pytest.raises(anyrank.LoadError, match="a and b overlap in memory"):
        anyrank.load(model, tmp_path if in_file else source)
    assert not base.any()


@pytest.mark.parametrize(
    "split",
    [
        lambda base: (base[:2], base[2:]),
        lambda base: (base, base.detach()),
    ],
)
def test_tensors_of_dst_side_by_side_or_the_same_are_filled(split: Any) -> None:
    base = torch.zeros(4, 4)
    a, b = split(base)
    value = 1.0 if a.shape == base.shape else 2.0
    src = {"a": torch.ones(a.shape), "b": torch.full(b.shape, value)}
    anyrank.sync({"a": a, "b": b}, src, verify=True)
    assert torch.equal(a, src["a"])
    assert torch.equal(b, src["b"])
