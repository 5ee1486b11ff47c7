"""Non-persistent buffers on meta: the values of the normal build, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.models.dialects.dialect import match_of_rules
from anyrank.models.first_values.initialize import Initializer
from anyrank.models.memory_meter import Meter
from anyrank.models.share import ModelShare
from anyrank.models.tensors import find_tensors


class Positions(nn.Module):
    """Its rule writes every kind of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        for name, dtype in (("ids", torch.int64), ("mask", torch.bool), ("table", torch.float32)):
            self.register_buffer(name, torch.empty(16, 16, dtype=dtype), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.ids.copy_(torch.arange(256).reshape(16, 16))
        self.mask = torch.ones(16, 16, dtype=torch.bool).tril()
        self.table.copy_(torch.linspace(0, 1, 256).reshape(16, 16))


class Unwritten(nn.Module):
    """Its rule knows the parameters alone, or one row of the buffer."""

    def __init__(self, buffer: torch.Tensor, rows: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.rows = rows
        self.register_buffer("mask", buffer, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.inner.weight)
        if self.rows:
            self.mask[: self.rows] = 1


def test_a_rule_writes_any_value_and_any_dtype() -> None:
    normal = Positions()
    for fill in ("load", "materialize"):
        with torch.device("meta"):
            model = Positions()
        if fill == "load":
            report = anyrank.load(model, normal.state_dict())
        else:
            report = anyrank.materialize(model, device="cpu")
        assert set(report.rebuilt) == {"ids", "mask", "table"}
        for name, value in normal.named_buffers():
            assert torch.equal(model.get_buffer(name), value), name


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_what_no_rule_writes_is_refused(dtype: torch.dtype, rows: int) -> None:
    values = torch.ones(8, 8).tril().to(dtype)
    state: dict[str, Any] = Unwritten(values, rows).state_dict()
    with torch.device("meta"):
        model = Unwritten(torch.empty(8, 8, dtype=dtype), rows)
    with pytest.raises(anyrank.LoadError, match=r"no rule of their module fills: mask"):
        anyrank.load(model, state)
    with pytest.raises(anyrank.LoadError, match=r"no rule of their module fills: mask"):
        anyrank.materialize(model, device="cpu")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_real_buffer_that_moves_to_the_device_of_the_parameters_is_followed() -> None:
    model = nn.Module()
    model.register_buffer("count", torch.ones(2))
    targets = find_tensors(model)
    share = ModelShare(
        match_of_rules(targets, []),
        Meter(),
        Initializer(model, 0),
        device=torch.device("meta"),  # in place of an accelerator
    )
    share.has_moved = True
    share.move_buffers()
    assert model.get_buffer("count").is_meta
    assert targets[0].tensor is model.get_buffer("count")
