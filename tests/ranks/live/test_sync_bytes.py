"""The bytes of a `sync`: compared at both ends, several messages at once, in a bounded window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.loading.sharing import move
from anyrank.testing import PeakMemory, run_ranks

MIB = 1 << 20


def layers(count: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def job_corrupted(where: str, verify: bool) -> Any:
    """One element of `dst` is written to behind the sync's back, once all have arrived."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    src = layers(3, 4) if rank == 0 or where == "copied" else None
    dst = layers(3, 4) if rank == 1 or where == "copied" else None
    usual = move.Mover.run

    def run(self: move.Mover) -> None:
        usual(self)
        if rank == 1 and dst is not None:
            dst[1].weight.detach()[2, 3] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move.Mover, "run", run)
        try:
            report = anyrank.sync(dst, src, verify=verify)
        except anyrank.LoadError as error:
            return str(error)
    return report.verified


@pytest.mark.parametrize("where", ["received", "copied"])
def test_verify_finds_one_wrong_element(where: str) -> None:
    answers = run_ranks(2, job_corrupted, where, True)
    text, other = answers
    assert text == other
    assert "1 tensor differs between dst and src after the sync: 1.weight" in text
    assert "partly overwritten; sync again before you use dst" in text


def test_without_verify_nothing_is_compared() -> None:
    assert run_ranks(2, job_corrupted, "received", False) == ["", ""]


def job_memory() -> float:
    """The peak of this rank beside its share, in MiB; the second call's, which plans nothing."""
    is_source = dist.get_rank() == 0
    model = layers(6, 1448).requires_grad_(False)  # 48 MiB
    wide = model.double() if is_source else model  # so that nothing is sent as it lies
    ends = (None, wide) if is_source else (model, None)
    anyrank.sync(*ends)
    dist.barrier()
    with PeakMemory() as peak:
        anyrank.sync(*ends)
    return peak.peak_bytes / MIB


def test_a_sync_takes_a_window_beside_the_shares() -> None:
    assert max(run_ranks(2, job_memory, timeout=60)) <= 16
