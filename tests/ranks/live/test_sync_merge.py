"""A PEFT LoRA trainer under FSDP2 gives generators in other layouts its merged weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tests.nets import whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import anyrank
from anyrank.testing import run_ranks

WIDTH, HIDDEN = 7, 300


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


def lora(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=3, target_modules=["0", "2"])
    model: Any = get_peft_model(net().to(dtype), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def sharded(model: Any, mesh: Any) -> Any:
    for layer in (model.base_model.model[0], model.base_model.model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def parallel(mesh: Any) -> Any:
    plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(net(), mesh, plan, src_data_rank=None)


def job_merge() -> None:
    rank = dist.get_rank()
    apart, every = (
        (DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])),
        DeviceMesh("cpu", [0, 1, 2, 3]),
    )
    for dtype in (torch.float32, torch.bfloat16):
        model = lora(dtype)
        expected = copy.deepcopy(model).merge_and_unload().state_dict()
        ends: dict[str, tuple[Any, Any]] = {
            "fsdp to tp on others": (
                sharded(copy.deepcopy(model), apart[0]) if rank < 2 else None,
                parallel(apart[1]).to(dtype) if rank >= 2 else None,
            ),
            "fsdp to tp on the same": (sharded(copy.deepcopy(model), every), parallel(every)),
            "fsdp to plain": (
                sharded(copy.deepcopy(model), every),
                net().to(dtype) if rank == 3 else None,
            ),
            "plain to fsdp": (
                model if rank == 1 else None,
                fully_shard(net().to(dtype), mesh=every),
            ),
        }
        for title, (src, dst) in ends.items():
            weights = anyrank.Sync(dst, src, merge=True, verify=True)
            for is_first in (True, False):
                report = weights()
                assert report.is_planned is is_first, title
                assert sorted(report.merged) == ["0.weight", "2.weight"]
                assert sum(report.bytes_sent) == sum(report.bytes_received)
            for name, tensor in dst.state_dict().items() if dst is not None else ():
                assert torch.equal(whole(tensor), expected[name].to(tensor.dtype)), (title, name)


def test_merged_weights_are_those_of_peft_in_every_layout() -> None:
    run_ranks(4, job_merge)


def change_on_last(kind: str, model: Any) -> None:
    layer = model.base_model.model[0]
    if dist.get_rank() == 1:
        if kind == "scaling":
            layer.scaling["default"] = 3.0
        else:
            layer.merge()


def job_other_adapters(kind: str) -> str:
    model, dst = lora(torch.float32), net()
    anyrank.sync(dst, model, merge=True)
    before = copy.deepcopy(dst.state_dict())
    change_on_last(kind, model)
    try:
        anyrank.sync(dst, model, merge=True)
    except anyrank.LoadError as error:
        assert all(torch.equal(before[name], value) for name, value in dst.state_dict().items())
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"), [("scaling", "default x 3"), ("merged", "its adapter merged into it")]
)
def test_ranks_that_would_merge_otherwise_are_an_error(kind: str, words: str) -> None:
    """Also at a later call, whose plan was made when they were alike."""
    for message in run_ranks(2, job_other_adapters, kind):
        assert "0.weight: ranks hold it in different ways in src (rank 0" in message
        assert "rank 1 as float32[300, 7] whole, " in message
        assert words in message
