"""Saved in one layout on some ranks, resumed in another on others, as if it had gone on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.nets import whole
from tests.ranks.sharded_nets import LAYOUTS, Net
from tests.runs import resume
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

WITH_INPUT_LAYOUTS = ("tp", "fsdp_tp")  # their forward needs laid-out inputs: gradients are given


def build(layout: str, seed: int, meta: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in float64, and an optimizer with two groups, in a layout."""
    torch.manual_seed(seed)
    net = Net().double()
    if layout == "ddp":
        net = DistributedDataParallel(net) if dist.is_initialized() else net
    elif meta:
        with anyrank.meta():
            net = Net().double()
        net = LAYOUTS[layout](net)
    else:
        net = LAYOUTS[layout](net)
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]
    return net, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Steps whose gradients depend on the parameters and the step alone, on any layout."""
    for step in range(first, last):
        for number, parameter in enumerate(net.parameters()):
            gradient = whole(parameter.detach()).sin() * (step + 1) + number
            if hasattr(parameter, "placements"):
                from torch.distributed.tensor import distribute_tensor

                gradient = distribute_tensor(
                    gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def summary(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that is saved, whole, by name."""
    names = {p: n.removeprefix("module.") for n, p in net.named_parameters()}
    found = {n.removeprefix("module."): whole(t.detach()) for n, t in net.state_dict().items()}
    for parameter, name in names.items():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = whole(value)
    return {name: tensor.clone() for name, tensor in found.items()}


def job_save(path: str, layout: str) -> dict[str, torch.Tensor]:
    net, optimizer = build(layout, seed=1)
    state = anyrank.TrainState(net, optimizer)
    with anyrank.Checkpoints(path, state) as ckpts:
        for step in range(3):
            train(net, optimizer, step, step + 1)
            ckpts.step_done()
        ckpts.save()
    train(net, optimizer, 3, 5)
    return summary(net, optimizer)


def job_resume(
    paths: list[str], layout: str, meta: bool
) -> list[tuple[dict[str, torch.Tensor], Any]]:
    """For each run, what it is two steps after it is resumed, and the report."""
    found: list[tuple[dict[str, torch.Tensor], Any]] = []
    for path in paths:
        net, optimizer = build(layout, seed=2, meta=meta)
        parameters = list(net.parameters())
        state = anyrank.TrainState(net, optimizer)
        report = resume(path, state, "must", verify=True)
        assert state.step == 3
        assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
        train(net, optimizer, 3, 5)
        found.append((summary(net, optimizer), report))
    return found


PLACES = [(1, "plain"), (1, "fsdp"), (2, "ddp"), (2, "fsdp"), (3, "fsdp"), (4, "ddp"), (4, "fsdp")]
PLACES += [(4, "hsdp"), (4, "fsdp_tp"), (2, "tp"), (3, "ddp")]
TARGETS = [(world, layout, False) for world, layout in PLACES]
TARGETS += [(world, layout, True) for world, layout in PLACES if layout == "fsdp"]
SOURCES = (0, 1, 4, 6)  # of each place: the runs of itself and of these places behind it

Saved = dict[tuple[int, str], tuple[str, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """For each place, its run's folder, and what the run is two steps after that."""
    found: Saved = {}
    for world, layout in PLACES:
        path = str(tmp_path_factory.mktemp(f"{layout}-{world}"))
        each = run_ranks(world, job_save, path, layout)
        assert all(one.keys() == each[0].keys() for one in each)
        found[world, layout] = path, each[0]
    return found


@pytest.mark.parametrize(("world", "layout", "meta"), TARGETS)
def test_a_run_of_any_layout_goes_on(saved: Saved, world: int, layout: str, meta: bool) -> None:
    own = PLACES.index((world, layout))
    chosen = [PLACES[(own + behind) % len(PLACES)] for behind in SOURCES]
    results = run_ranks(world, job_resume, [saved[place][0] for place in chosen], layout, meta)
    for number, place in enumerate(chosen):
        expected = saved[place][1]
        reports = [each[number][1] for each in results]
        assert all(report == reports[0] for report in reports), place
        for each in results:
            found = each[number][0]
            assert found.keys() == expected.keys(), place
            for name, tensor in expected.items():
                torch.testing.assert_close(
                    found[name], tensor, rtol=1e-12, atol=1e-14, msg=f"{name} from {place}"
                )
        same = place == (world, layout)
        kinds = {str(reports[0].components[part]) for part in ("model", "optimizer")}
        assert kinds == ({"exact"} if same else kinds & {"exact", "resharded"}), place


def part(frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer, anyrank.TrainState]:
    """Two layers, of which the first is frozen or not, in shards, and what trains them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    for module in (*net, net):
        fully_shard(module)
    net[0].requires_grad_(not frozen)
    optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=0.1)
    return net, optimizer, anyrank.TrainState(net, optimizer)


def job_save_frozen(path: str) -> dict[str, torch.Tensor]:
    net, optimizer, state = part(frozen=True)
    for parameter in net[1].parameters():
        parameter.grad = parameter.detach().sin()
    optimizer.step()
    with anyrank.Checkpoints(path, state) as ckpts:
        ckpts.step_done()
        ckpts.save()
    return summary(net, optimizer)


def job_unfreeze(path: str) -> tuple[str, dict[str, torch.Tensor], Any]:
    net, optimizer, state = part(frozen=False)
    try:
        resume(path, state)
        error = ""
    except anyrank.CheckpointError as raised:
        error = str(raised)
    with anyrank.Checkpoints(path, state) as ckpts:
        report = ckpts.resume(fresh=["0.*"])
    return error, summary(net, optimizer), report


def test_a_layer_that_is_unfrozen_starts_fresh_on_other_ranks(tmp_path: Path) -> None:
    saved = run_ranks(2, job_save_frozen, str(tmp_path))[0]
    for error, found, report in run_ranks(3, job_unfreeze, str(tmp_path)):
        assert (
            "new since the checkpoint: 0.weight, 0.bias. If that is intended, pass fresh=" in error
        )
        assert found.keys() == saved.keys()  # layer 1 has what it had, layer 0 no state yet
        for name, tensor in saved.items():
            assert torch.equal(found[name], tensor), name
        assert report.components["optimizer"] == "derived"
