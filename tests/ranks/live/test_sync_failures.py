"""A sync that goes wrong on one rank goes wrong on all, soon, with one error and its cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.test_promise_4_one_ranks_error import SECONDS, agreed, outcome
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.testing import Died, Fault, run_ranks


def models() -> tuple[Any, Any]:
    """A trainer on ranks 0 and 1, and a whole copy on the others."""
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        return None, fully_shard(nn.Linear(64, 64), mesh=mesh)
    return nn.Linear(64, 64), None


def job_sync(change: str) -> Any:
    dst, src = models()
    last = dist.get_rank() == dist.get_world_size() - 1
    options: dict[str, Any] = {}
    if change == "shape" and last:
        dst = nn.Linear(65, 64)
    elif change == "name" and last:
        dst = nn.Sequential(nn.Linear(64, 64))
    elif change == "option":
        options = {"missing": "keep" if last else "error"}
    elif change == "type" and last:
        dst = "model.pt"
    elif change == "no src":
        src = None
    elif change == "no dst":
        dst = None
    elif change == "meta" and src is not None:
        with anyrank.meta():
            src = nn.Linear(64, 64)
    elif change == "layouts" and last:
        src = nn.Linear(64, 64)
    before = [] if not isinstance(dst, nn.Module) else [p.clone() for p in dst.parameters()]
    kind, text, causes, seconds = outcome(lambda: anyrank.sync(dst, src, **options))
    unchanged = all(map(torch.equal, before, dst.parameters() if before else []))
    return kind, text, causes, seconds, unchanged


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape", "weight: the model has shape [64, 65], the source [64, 64] (weight)"),
        ("name", "missing from the source (2):"),
        ("option", "missing= differs between ranks: 'error' on ranks 0, 1, 'keep' on rank 2"),
        ("no src", "src= is None, or has no tensors, on every rank"),
        ("no dst", "dst= is None, or has no tensors, on every rank"),
        ("meta", "src has no values yet: 2 of 2 tensors on the meta device (weight, bias)"),
        ("layouts", "weight: ranks hold it in different ways in src (rank 0 as float32[64, 64]"),
    ],
)
def test_what_does_not_fit_is_one_error_and_changes_nothing(change: str, words: str) -> None:
    results = run_ranks(3, job_sync, change)
    kind, text, _ = agreed(results)
    assert kind == ("WrongValue" if change in ("no src", "no dst") else "LoadError")
    assert words in text, text
    assert all(unchanged for *_, unchanged in results)


def job_type() -> str:
    dst: Any = "model.pt" if dist.get_rank() else nn.Linear(2, 2)
    with pytest.raises(TypeError) as caught:
        anyrank.sync(dst, nn.Linear(2, 2))
    return str(caught.value)


def test_a_wrong_type_is_told_to_all() -> None:
    texts = run_ranks(2, job_type)
    assert (
        texts
        == [
            "sync() failed on 1 of 2 ranks, so every rank stops:\n"
            "[rank 1] dst=: expected a torch.nn.Module, a dict of tensors or None, got str"
        ]
        * 2
    )


@pytest.mark.parametrize("point", ["sync.send", "sync.receive"])
def test_an_error_in_the_middle_is_told_to_all(point: str) -> None:
    rank = 1 if point == "sync.send" else 2
    results = run_ranks(3, job_sync, "", faults=[Fault(rank=rank, point=point, how="raise")])
    kind, text, causes = agreed(results)
    assert kind == "RankError"
    assert list(causes) == [rank], text
    assert "dst that were not on the meta device are partly overwritten; sync again" in text


def test_a_rank_that_dies_in_the_middle_is_named() -> None:
    results = run_ranks(3, job_sync, "", faults=[Fault(rank=2, point="sync.receive", how="kill")])
    assert isinstance(results[2], Died)
    for kind, text, causes, seconds, _ in results[:2]:
        assert kind == "RankError"
        assert list(causes) == [2]
        assert "rank 2" in text
        assert "partly overwritten" in text
        assert seconds < SECONDS + 3
