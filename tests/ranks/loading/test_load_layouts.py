"""`load` into every layout, compared with torch's own sharding of the same values."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from tests.ranks.sharded_nets import LAYOUTS, Net, assert_same, reference
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import RanksFailed, run_ranks

SIZES = {"even": {"width": 8, "hidden": 12}, "uneven": {"width": 7, "hidden": 9}}
WAYS = {
    "even": [("meta", "stripe"), ("real", "auto")],
    "uneven": [("meta", "auto"), ("real", "scatter")],
}


def job_layout(path: str, layout: str, sizes: dict[str, int], start: str, strategy: str) -> Any:
    expected = LAYOUTS[layout](reference(**sizes))
    if start == "meta":
        with anyrank.meta():
            net = Net(**sizes)
    else:
        torch.manual_seed(torch.distributed.get_rank() + 5)
        net = Net(**sizes)
    net = LAYOUTS[layout](net)
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    report = anyrank.load(net, path, strategy=strategy, verify=True)
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert net.head.weight is net.embed.weight
    assert_same(net, expected)
    tokens = torch.arange(6).reshape(2, 3)
    if layout not in (
        "tp",
        "fsdp_tp",
    ):  # their activations need input layouts that do not matter here
        torch.testing.assert_close(net(tokens), expected(tokens), rtol=0, atol=0)
        net(tokens).sum().backward()
        optimizer.step()
    return report


def save(path: Any, **sizes: int) -> str:
    tensors = {k: v.contiguous() for k, v in reference(**sizes).state_dict().items()}
    del tensors["head.weight"]  # tied: only one end is in the file
    save_file(tensors, path / "model.safetensors")
    return str(path)


CASES = [
    (1, "plain"), (1, "fsdp"), (2, "plain"), (2, "fsdp"), (2, "fsdp_offload"), (2, "fsdp_mixed"),
    (2, "fsdp_ignored"), (2, "tp"), (2, "hsdp"), (3, "fsdp"), (3, "tp"), (4, "fsdp"), (4, "hsdp"),
    (4, "fsdp_tp"), (4, "tp"),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("world", "layout"), CASES)
def test_load_equals_torchs_own_sharding(
    tmp_path: Any, world: int, layout: str, sizes: str
) -> None:
    path = save(tmp_path, **SIZES[sizes])
    for start, strategy in WAYS[sizes]:
        reports = run_ranks(world, job_layout, path, layout, SIZES[sizes], start, strategy)
        assert all(report == reports[0] for report in reports)
        assert reports[0].missing == reports[0].unexpected == []
        assert reports[0].tied == {"embed.weight": ["head.weight"]}


def test_eight_ranks_of_uneven_fsdp_over_tensor_parallel(tmp_path: Any) -> None:
    path = save(tmp_path, **SIZES["uneven"])
    run_ranks(8, job_layout, path, "fsdp_tp", SIZES["uneven"], "meta", "auto")


def job_ddp(path: str, order: str) -> tuple[dict[str, torch.Tensor], Any]:
    torch.manual_seed(torch.distributed.get_rank())
    net: nn.Module = Net()
    report = anyrank.load(net, path) if order == "before" else None
    ddp = DistributedDataParallel(net)
    if order == "after":
        report = anyrank.load(ddp, path)
    elif order == "inside":
        report = anyrank.load(ddp.module, path)
    elif order == "compiled":
        report = anyrank.load(torch.compile(ddp, backend="eager"), path)
    assert report is not None
    assert_same(ddp.module, reference())
    return {k: v.clone() for k, v in net.state_dict().items()}, report


@pytest.mark.parametrize("order", ["before", "after", "inside", "compiled"])
def test_load_before_and_after_wrapping_in_ddp(tmp_path: Any, order: str) -> None:
    path = save(tmp_path)
    for weights, report in run_ranks(2, job_ddp, path, order):
        for name, value in reference().state_dict().items():
            assert torch.equal(weights[name], value), name
        assert report.tensors == len(reference().state_dict()) - 1


class Halved(nn.Linear):
    """Its checkpoints hold half of the weight, which a hook of its own sees to."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_load_state_dict_pre_hook(self.convert)

    @staticmethod
    def convert(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2


def job_own_code(wrap: str) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(Halved(4, 4), nn.Linear(4, 4))
    state = {key: value.clone() for key, value in net.state_dict().items()}
    net = fully_shard(net) if wrap == "fsdp" else DistributedDataParallel(net)
    report = anyrank.load(net, state)
    weight: Any = dict(net.named_parameters())["0.weight" if wrap == "fsdp" else "module.0.weight"]
    weight = weight.full_tensor() if wrap == "fsdp" else weight
    return (
        report.own_code,
        list(report.own_code_not_run),
        (weight / state["0.weight"]).mean().item(),
    )


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_modules_own_load_hook_is_named_and_not_run(wrap: str) -> None:
    assert run_ranks(2, job_own_code, wrap) == [([], ["0"], 1.0)] * 2


def job_own_copy(folder: str, verify: bool) -> Any:
    here, rank = os.getcwd(), torch.distributed.get_rank()
    os.chdir(f"{folder}/{rank}")  # as on disks of its own
    try:
        model = nn.Linear(40, 40)
        with mock.patch("socket.gethostname", return_value=f"machine-{rank}"):
            anyrank.load(model, "w.pt", verify=verify)
        return model.weight.detach().clone()
    finally:
        os.chdir(here)


def test_each_machine_may_have_a_copy_of_the_file_of_its_own(tmp_path: Any) -> None:
    state = nn.Linear(40, 40).state_dict()
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
        torch.save(state, tmp_path / f"{rank}" / "w.pt")
        os.utime(tmp_path / f"{rank}" / "w.pt", (rank, rank))
    for weight in run_ranks(2, job_own_copy, str(tmp_path), True):
        assert torch.equal(weight, state["weight"])
    torch.save(nn.Linear(40, 40).state_dict(), tmp_path / "1" / "w.pt")
    with pytest.raises(RanksFailed, match="differs from the file whose header was read on another"):
        run_ranks(2, job_own_copy, str(tmp_path), False)


def twice(fill: float) -> Any:
    """One module under two names."""
    shared = nn.Linear(3, 3)
    nn.init.constant_(shared.weight, fill)
    return nn.Sequential(shared, nn.ReLU(), shared)


def job_registered_twice(folder: str) -> None:
    whole = twice(1.0)
    if torch.distributed.get_rank() == 0:
        torch.save(whole.state_dict(), f"{folder}/w.pt")
    torch.distributed.barrier()
    with anyrank.meta():
        sharded = twice(0.0)
    fully_shard(sharded[0])
    fully_shard(sharded)
    report = anyrank.load(sharded, f"{folder}/w.pt")
    assert report.tied == {"0.weight": ["2.weight"], "0.bias": ["2.bias"]}
    assert (sharded[2].weight.full_tensor() == 1).all()
    other: Any = fully_shard(twice(0.0))
    anyrank.load(other, sharded.state_dict())  # of which no rank has all bytes
    assert (other[2].weight.full_tensor() == 1).all()
    plain = DistributedDataParallel(twice(0.0))
    anyrank.sync(plain, other)
    assert (plain.module[2].weight == 1).all()
    anyrank.convert(other, f"{folder}/out.pt", to="torch")
    twice(0.0).load_state_dict(torch.load(f"{folder}/out.pt"))


def test_a_module_that_is_registered_twice_is_a_tie_in_every_layout(tmp_path: Any) -> None:
    run_ranks(2, job_registered_twice, str(tmp_path))
