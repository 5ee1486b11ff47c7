"""What exact=True keeps beside the gradients, under DDP: counted wherever an exchange begins."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks
from anyrank.training.exact import groups as exact_groups

DEPTH, WIDTH = 32, 16  # a tensor of 1 KiB in each layer: a group


def held(net: nn.Module) -> int:
    """Bytes of all float32 tensors of this process, with gradients that only autograd knows."""
    known = [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]
    known += [param.grad for param in net.parameters() if param.grad is not None]
    storages = [found.untyped_storage() for found in known if found.dtype == torch.float32]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def job_peaks(rounds: int) -> list[float]:
    """Of each step, in units of all gradients."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    net = DistributedDataParallel(nn.Sequential(*layers))
    whole = sum(parameter.nbytes for parameter in net.parameters())
    count = rounds * torch.distributed.get_world_size()
    rows = torch.randn(4 * count, WIDTH)
    loader = anyrank.ElasticLoader(rows, global_batch=count, microbatch=1, exact=True)
    peak = before = 0
    start, size = exact_groups.start_reduce_scatter, exact_groups.BUCKET_BYTES

    def counted(*arguments: Any) -> Any:
        nonlocal peak
        finish = start(*arguments)
        peak = max(peak, held(net))
        return finish

    exact_groups.start_reduce_scatter, exact_groups.BUCKET_BYTES = counted, WIDTH * WIDTH * 4
    peaks: list[float] = []
    try:
        for step in loader:
            peak, before = 0, held(net)
            for batch in step.microbatches(net):
                step.backward(net(batch).square().mean())
            peaks.append((max(peak, held(net)) - before) / whole)
            net.zero_grad()
    finally:
        exact_groups.start_reduce_scatter, exact_groups.BUCKET_BYTES = start, size
    return peaks


@pytest.mark.parametrize(("rounds", "most"), [(1, 1.0), (4, 2.0)])  # log2(4) sums of all gradients
def test_promise_9_few_gradients_are_kept(rounds: int, most: float) -> None:
    in_flight = 0.25  # buckets: 3 of 32, each in two copies
    for peaks in run_ranks(2, job_peaks, rounds):
        assert max(peaks) <= most + in_flight, peaks
