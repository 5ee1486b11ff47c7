"""Beside exact=True: what it leaves alone, what is compiled, and more ranks than elsewhere."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.exact_runs import KINDS, digests_on, run, sha256, wrap
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks


def build(kind: str) -> Any:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 17), nn.GELU(), nn.Linear(17, 3))
    return wrap(net, kind, net[0])


def rows() -> torch.Tensor:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


def by_loader(net: Any, microbatch: int = 4, **options: Any) -> str:
    """Two steps of four microbatches, or more."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = anyrank.ElasticLoader(
        rows(), global_batch=16, microbatch=microbatch, shuffle=False, **options
    )
    return run(net, optimizer, loader)


def by_torch(net: Any) -> str:
    """The same on two ranks, without anyrank."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for samples in rows().split(16):
        first, last = samples.split(4)[2 * dist.get_rank() :][:2]
        if isinstance(net, DistributedDataParallel):
            unsynced: Any = net.no_sync()
        else:
            net.set_requires_gradient_sync(False)
            unsynced = contextlib.nullcontext()
        with unsynced:
            (net(first).square().mean() / 2).backward()
        if not isinstance(net, DistributedDataParallel):
            net.set_requires_gradient_sync(True)
        (net(last).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sha256(net, optimizer)


def job_stock(kind: str) -> tuple[str, str]:
    return by_loader(build(kind)), by_torch(build(kind))


def test_without_exact_the_bits_are_those_of_torch_alone() -> None:
    for kind in ("ddp", "fsdp"):
        for mine, other in run_ranks(2, job_stock, kind):
            assert mine == other, kind


def job_exact() -> dict[str, str]:
    return {kind: by_loader(build(kind), 2, exact=True) for kind in KINDS}


@pytest.mark.exact_fsdp
def test_promise_9_the_same_bits_on_five_ranks() -> None:
    """Of K = 8, three ranks have two microbatches, two have one and a copy, which is in no sum."""
    assert len({*digests_on((5,), job_exact).values()}) == 1


def job_compiled() -> dict[str, str]:
    net: Any = torch.compile(build("plain"), backend="aot_eager")
    return {"ddp": by_loader(DistributedDataParallel(net), exact=True)}


def test_promise_9_a_compiled_model_has_the_same_bits() -> None:
    digests_on((2,), job_compiled)
