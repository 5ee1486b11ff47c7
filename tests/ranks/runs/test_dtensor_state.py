"""DTensors in the state of optimizers: of plain parameters, and around classes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runs import resume, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import anyrank
from anyrank.testing import run_ranks

ROWS = 7  # uneven


class Zero(torch.optim.SGD):
    """A sharded optimizer of a plain model: its moments are DTensors over all ranks."""

    def make_state(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                whole = torch.arange(float(parameter.numel())).view(parameter.shape) + number
                self.state[parameter] = {
                    "moment": distribute_tensor(whole, mesh, [Shard(0)]),
                    "scale": distribute_tensor(whole.sum(), mesh, [Replicate()]),
                }


def zero(has_state: bool) -> tuple[nn.Module, Zero]:
    torch.manual_seed(0)
    net = nn.Linear(4, ROWS)
    optimizer = Zero(net.parameters(), lr=0.1)
    if has_state:
        optimizer.make_state()
    return net, optimizer


def job_save(path: str) -> None:
    net, optimizer = zero(has_state=True)
    save(path, anyrank.TrainState(net, optimizer))


def job_resume(path: str, has_state: bool) -> list[tuple[int, list[float]]]:
    """What this rank holds of each moment, and the whole."""
    net, optimizer = zero(has_state)
    for state in optimizer.state.values():
        state["moment"].to_local().zero_()
    resume(path, anyrank.TrainState(net, optimizer))
    found: list[tuple[int, list[float]]] = []
    for state in optimizer.state.values():
        moment: Any = state["moment"]
        assert isinstance(moment, DTensor)
        assert moment.placements == (Shard(0),)
        assert state["scale"].placements == (Replicate(),)
        found.append((moment.to_local().numel(), moment.full_tensor().flatten().tolist()))
    return found


@pytest.mark.parametrize("has_state", [False, True], ids=["saved layout", "own layout"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_dtensor_of_a_plain_parameter_comes_back_as_each_ranks_share(
    tmp_path: Path, has_state: bool, world: int
) -> None:
    run_ranks(2, job_save, str(tmp_path))
    answers = run_ranks(world, job_resume, str(tmp_path), has_state)
    wholes = [[float(n) for n in range(ROWS * 4)], [float(n) + 1 for n in range(ROWS)]]
    for found in answers:
        assert [whole for _, whole in found] == wholes
    assert sum(found[0][0] for found in answers) == ROWS * 4
    assert max(found[0][0] for found in answers) < ROWS * 4


def job_other_mesh(path: str, world: int) -> str:
    net = nn.Linear(4, 4)
    optimizer = Zero(net.parameters(), lr=0.1)
    if world == 2:
        mesh = init_device_mesh("cpu", (2, 1))
        moment = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])
        optimizer.state[net.weight]["moment"] = moment
    state = anyrank.TrainState(nn.ModuleDict({"net": net}), optimizer)
    try:
        if world == 2:
            save(path, state)
        else:
            resume(path, state)
    except anyrank.CheckpointError as error:
        return str(error)
    return ""


def test_a_mesh_that_only_the_optimizer_knows_is_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert run_ranks(2, job_other_mesh, str(tmp_path), 2) == ["", ""]
    (said, *_) = run_ranks(3, job_other_mesh, str(tmp_path), 3)
    assert "optimizer.state.net.weight.moment: was saved as a DTensor (S0,R on 2x1)" in said
    assert "Create the optimizer's state first" in said


class Codes(torch.Tensor):
    """A wrapper class by torch's protocol, as 8-bit optimizers keep their state in."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Codes:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Codes:
        return Codes(inner["codes"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return Codes(args[0].codes)
        raise NotImplementedError(f"{func} of Codes")


def job_codes(path: str) -> str:
    net = nn.Linear(4, 4)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    weight: Any = net.weight
    part = Codes(torch.zeros(weight.to_local().shape, dtype=torch.uint8))
    codes = DTensor.from_local(part, weight.device_mesh, weight.placements, run_check=False)
    optimizer.state[net.weight]["exp_avg"] = codes
    try:
        save(path, anyrank.TrainState(net, optimizer))
    except anyrank.CheckpointError as error:
        return str(error)
    return ""


def test_sharded_state_of_a_class_that_hides_its_bytes_is_refused_by_name(tmp_path: Path) -> None:
    for said in run_ranks(2, job_codes, str(tmp_path)):
        assert "optimizer.state.weight.exp_avg: a DTensor of Codes cannot be saved" in said
