"""Tensors whose bytes are not their values: saved by value, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import resume, save
from torch import nn

import anyrank

VALUES = torch.tensor([1 + 2j, 3 - 4j])


class Holder:
    """A stateful object with one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def module(name: str, tensor: torch.Tensor) -> nn.Module:
    made = nn.Module()
    if name == "buffer":
        made.register_buffer("x", tensor)
    else:
        made.x = nn.Parameter(tensor)
    return made


VIEWS = {"conj": VALUES.conj(), "neg": VALUES.conj().imag}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", VIEWS)
def test_a_stateful_objects_view_returns_by_value(
    tmp_path: Path, kind: str, background: bool
) -> None:
    save(tmp_path, anyrank.TrainState(holder=Holder(VIEWS[kind])), background=background)
    for now in (torch.zeros_like(VIEWS[kind]), VIEWS[kind], None):
        holder = Holder(now)
        report = resume(tmp_path, anyrank.TrainState(holder=holder))
        assert report is not None
        assert report.components["holder"] == "exact"
        assert torch.equal(holder.value, VIEWS[kind].clone())


def test_an_optimizers_view_returns_by_value(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.bias]["momentum_buffer"] = VALUES.conj()
    save(tmp_path, anyrank.TrainState(model, optimizer))
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    resume(tmp_path, anyrank.TrainState(model, fresh))
    assert torch.equal(fresh.state[model.bias]["momentum_buffer"], VALUES.conj())


@pytest.mark.parametrize("place", ["parameter", "buffer"])
@pytest.mark.parametrize("kind", VIEWS)
def test_a_modules_view_is_refused_by_name(tmp_path: Path, kind: str, place: str) -> None:
    view = VIEWS[kind]
    with pytest.raises(anyrank.CheckpointError, match=r"x: is a conj or neg view"):
        save(tmp_path, anyrank.TrainState(module(place, view)))
    assert not list(tmp_path.glob("step-*"))
    save(tmp_path, anyrank.TrainState(module(place, torch.zeros_like(view))))
    before, target = view.clone(), module(place, view)
    with pytest.raises(anyrank.CheckpointError, match=r"x: is a conj or neg view"):
        resume(tmp_path, anyrank.TrainState(target))
    assert torch.equal(target.x, before)  # pyright: ignore[reportArgumentType]


WITHOUT_BYTES: dict[str, Callable[[], torch.Tensor]] = {
    "tensor on meta": lambda: torch.ones(2, device="meta"),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "torch.sparse_coo tensor": lambda: torch.eye(2).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", WITHOUT_BYTES)
def test_a_tensor_without_bytes_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    value = WITHOUT_BYTES[kind]()
    with pytest.raises(anyrank.CheckpointError, match=f"holder.value: a {kind} cannot be saved"):
        save(tmp_path, anyrank.TrainState(holder=Holder(value)))
    model = module("buffer", value)
    with pytest.raises(anyrank.CheckpointError, match="x"):
        save(tmp_path, anyrank.TrainState(model))
