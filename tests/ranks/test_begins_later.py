"""Parts that are empty when a run is resumed, as an average that begins later: their tensors lie as
those of the parameters do, on any number of ranks, or the report says that they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

Parameters = Mapping[str, torch.Tensor]


def by_name(parameters: Parameters) -> Any:
    return {name: p.detach().clone() for name, p in parameters.items()}


def in_float64(parameters: Parameters) -> Any:
    return {name: p.detach().double() for name, p in parameters.items()}


def in_a_list(parameters: Parameters) -> Any:
    return [p.detach().clone() for p in parameters.values()]


def nested(parameters: Parameters) -> Any:
    return {
        "updates": 3,
        "of": {f"module.{name}": p.detach() * 1 for name, p in parameters.items()},
    }


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    rows: Any = value.values() if isinstance(value, dict) else value
    return [t for row in rows if not isinstance(row, int) for t in tensors_in(row)]


BEGUN: dict[str, Callable[[Parameters], Any]] = {
    "by name": by_name,
    "in float64": in_float64,
    "in a list": in_a_list,
    "nested": nested,
}


class Average:
    """Of parameters, from the third step on."""

    def __init__(self, model: nn.Module, begin: Callable[[Parameters], Any]) -> None:
        self.model, self.begin = model, begin
        self.average: Any = None

    @torch.no_grad()
    def update(self, step: int) -> None:
        parameters = dict(self.model.named_parameters())
        if self.average is None:
            self.average = self.begin(parameters) if step >= 2 else None
        else:
            pairs = zip(tensors_in(self.average), parameters.values(), strict=True)
            for average, parameter in pairs:
                average.lerp_(parameter.to(average.dtype), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


def job(path: str, layout: str, kind: str, until: int) -> tuple[Any, list[bool], list[Any]]:
    """The outcome of the part, which of its tensors are DTensors then, and all at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4))
    wrapped: Any = fully_shard(model) if layout == "fsdp" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = Average(model, BEGUN[kind])
    loader = anyrank.ElasticLoader(torch.eye(24, 4), global_batch=12, microbatch=2)
    state = anyrank.TrainState(wrapped, optimizer, data=loader, average=average)
    with anyrank.Checkpoints(path, state) as ckpts:
        report = ckpts.resume()
        begun = [] if average.average is None else tensors_in(average.average)
        kinds = [isinstance(t, DTensor) for t in begun]
        for step in ckpts.steps(until=until):
            for batch in step.microbatches(wrapped):
                step.backward(wrapped(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            average.update(step.number)
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors_in(average.average)]
    return report and report.components["average"], kinds, [t.tolist() for t in whole]


@pytest.mark.parametrize(
    ("kind", "ranks", "layout", "outcome"),
    [
        *((kind, 2, "fsdp", "exact") for kind in BEGUN),
        ("by name", 3, "fsdp", "resharded"),
        ("in a list", 1, "fsdp", "resharded"),
        ("nested", 2, "ddp", "resharded"),
    ],
)
def test_an_average_that_begins_later_comes_back_as_it_lay(
    kind: str, ranks: int, layout: str, outcome: str, tmp_path: Path
) -> None:
    whole = run_ranks(2, job, str(tmp_path / "whole"), "fsdp", kind, 6)[0][2]
    run_ranks(2, job, str(tmp_path / "run"), "fsdp", kind, 4)
    for said, kinds, values in run_ranks(ranks, job, str(tmp_path / "run"), layout, kind, 6):
        assert said == outcome
        assert kinds == [layout == "fsdp"] * 4
        for one, other in zip(values, whole, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))


class Table:
    """A DTensor that is of no parameter, and made when it is needed."""

    def __init__(self) -> None:
        self.table: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.table = state["table"]


def job_table(path: str, is_first: bool) -> tuple[str, str, str, list[int]]:
    model: Any = fully_shard(nn.Linear(4, 6))
    table = Table()
    if is_first:
        mesh = model.weight.device_mesh
        table.table = distribute_tensor(torch.ones(5, 3), mesh, [Replicate()])
    state = anyrank.TrainState(model, table=table)
    with anyrank.Checkpoints(path, state) as ckpts:
        report = ckpts.resume()
        ckpts.step_done()
    outcome: Any = "" if report is None else report.components["table"]
    reason = getattr(outcome, "reason", "")
    return str(outcome), reason, type(table.table).__name__, [*table.table.shape]


def test_what_is_like_no_parameter_comes_back_whole_and_the_report_says_so(tmp_path: Path) -> None:
    run_ranks(2, job_table, str(tmp_path), True)
    for outcome, reason, kind, shape in run_ranks(2, job_table, str(tmp_path), False):
        assert (outcome, kind, shape) == ("derived", "Tensor", [5, 3])
        assert reason.endswith("so these are whole on each rank: table.table")
