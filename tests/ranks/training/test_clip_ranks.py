"""`step.clip_grad_norm_` on ranks: one norm of all gradients, however they are laid out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.nets import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

KINDS = ("plain", "ddp", "fsdp", "hsdp", "partly", "tp", "fsdp_tp")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x * self.scale.sum())))


def build(kind: str) -> tuple[nn.Module, Any]:
    """A model, and the group of its data."""
    torch.manual_seed(0)
    net = Mlp().double()
    if kind == "ddp":
        return DistributedDataParallel(net), None
    if kind == "partly":
        fully_shard(net.up)
    elif kind in ("fsdp", "hsdp"):
        mesh = None
        if kind == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
        fully_shard(net.up, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif kind in ("tp", "fsdp_tp"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan, src_data_rank=None)
        if kind == "fsdp_tp":
            fully_shard(net, mesh=mesh["dp"])
        return net, mesh["dp"].get_group()
    return net, None


def job_clip(kind: str, norm_type: float) -> tuple[float, list[torch.Tensor]]:
    """The norm, and the clipped gradients."""
    net, group = build(kind)
    data = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)).double()
    loader = anyrank.ElasticLoader(data, global_batch=16, microbatch=4, process_group=group)
    for step in loader:
        for x in step.microbatches(net):
            step.backward(net(x).square().mean() * 10)
        norm = step.clip_grad_norm_(0.25, norm_type)
        assert norm.dtype == torch.float64
        return norm.item(), [whole(p.grad).clone() for p in net.parameters() if p.requires_grad]
    raise AssertionError


def job_clips(norm_type: float) -> dict[str, tuple[float, list[torch.Tensor]]]:
    return {kind: job_clip(kind, norm_type) for kind in KINDS}


@pytest.mark.parametrize("norm_type", [2.0, 1.0, torch.inf])
def test_promise_9_one_norm_for_every_layout(norm_type: float) -> None:
    (expected,) = run_ranks(1, job_clip, "plain", norm_type)
    every = run_ranks(4, job_clips, norm_type)
    flat = torch.cat([grad.reshape(-1) for grad in expected[1]])
    assert torch.linalg.vector_norm(flat, norm_type).item() == pytest.approx(0.25, rel=1e-4)
    for kind in KINDS:
        found = [one[kind] for one in every]
        assert len({norm for norm, _ in found}) == 1, kind
        assert found[0][0] == pytest.approx(expected[0], rel=1e-9), kind
        for _, grads in found:
            for grad, other in zip(grads, expected[1], strict=True):
                torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-15)


def job_misuse(what: str) -> str:
    rank = torch.distributed.get_rank()
    net, _ = build("plain")
    data = torch.randn(16, 6).double()
    loader = anyrank.ElasticLoader(data, global_batch=16, microbatch=4)
    for step in loader:
        for x in step.microbatches(net):
            step.backward(net(x).square().mean() * (torch.inf if what == "inf" else 1))
        try:
            if what == "inf":
                step.clip_grad_norm_(1.0, error_if_nonfinite=True)
            elif what == "differs":
                step.clip_grad_norm_(1.0 + rank)
            else:
                step.clip_grad_norm_(-1.0 if rank else 1.0)
        except (RuntimeError, ValueError, anyrank.AnyrankError) as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError


def job_misuses() -> list[str]:
    return [job_misuse(what) for what in ("inf", "differs", "wrong")]


def test_promise_4_wrong_calls_of_clipping_raise_on_all_ranks() -> None:
    for found in run_ranks(2, job_misuses):
        assert "the gradient norm (order 2.0) is" in found[0]
        assert "max_norm= differs between ranks" in found[1]
        assert found[2].startswith("WrongValue")
        assert "max_norm=-1.0: must be" in found[2]
