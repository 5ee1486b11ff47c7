"""Ranks that make different calls are told so within seconds; in different groups, both say where
they wait and for whom.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.spies import warnings_of
from tests.ranks.world.test_ranks_meet import impatient, outcome
from torch import nn

import anyrank
from anyrank.testing import RanksFailed, run_ranks
from anyrank.world.ranks import open_ranks

CALLS = {
    "step.loss()": lambda step, net: step.loss(),
    "clip_grad_norm_()": lambda step, net: step.clip_grad_norm_(net.parameters(), 1.0),
    "load()": lambda step, net: anyrank.load(net, net.state_dict()),
}


def job_one_rank_calls(call: str, caller: int, folder: str) -> None:
    net = nn.Linear(1, 1)
    loader = anyrank.ElasticLoader(torch.ones(8, 1), global_batch=4, microbatch=1)
    with impatient(), anyrank.Checkpoints(folder, anyrank.TrainState(net, data=loader)) as ckpts:
        for step in ckpts.steps(until=1):
            for batch in step.microbatches(net):
                step.backward(net(batch).sum())
            if dist.get_rank() == caller:
                CALLS[call](step, net)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("caller", [0, 2])
def test_a_call_of_one_rank_alone_is_an_error_on_all(
    tmp_path: Path, call: str, caller: int
) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, job_one_rank_calls, call, caller, str(tmp_path), timeout=120)
    text = str(caught.value)
    assert all(f"[rank{rank}] anyrank.errors.RankError: " in text for rank in range(3))
    others = ", ".join(str(rank) for rank in range(3) if rank != caller)
    places = [f"{call} on rank {caller}", f"completing the step on ranks {others}"]
    said = ", ".join(places if caller == 0 else reversed(places))
    assert text.count(f"ranks called different operations: {said}. Make the same calls") >= 3


def job_late() -> list[list[int]]:
    """Each rank is late in turn for one of two groups, so that no two wait crosswise."""
    found: list[list[int]] = []
    with impatient(), open_ranks() as one, open_ranks() as other:
        for turn in range(3):
            for ranks in (one, other):
                if ranks.rank == turn:
                    time.sleep(0.9)  # longer than they are patient
                found.append(ranks.gather("exchanging values", turn))
    return found


def test_late_ranks_are_waited_for() -> None:
    assert run_ranks(3, job_late) == [[[n] * 3 for n in (0, 0, 1, 1, 2, 2)]] * 3


def job_two_groups() -> tuple[list[str], str, str]:
    """Rank 0 waits for its pair, and the others for all, until the timeout."""
    pair: Any = dist.new_group([0, 1])
    with impatient(), warnings_of("anyrank.world") as found:
        with open_ranks(pair, "pair()") if dist.get_rank() < 2 else contextlib.nullcontext():
            pass
        with open_ranks(None, "all()") as ranks:
            if ranks.rank:
                kind, text = outcome(lambda: ranks.gather("all()", 1))
            else:
                with open_ranks(pair, "pair()") as two:
                    kind, text = outcome(lambda: two.gather("pair()", 1))
    return found, kind, text


def test_in_different_groups_each_says_where_it_waits_and_for_whom() -> None:
    results = run_ranks(3, job_two_groups, env={"ANYRANK_TIMEOUT_SEC": "4"})
    for rank, (found, kind, text) in enumerate(results):
        call, absent = ("all()", "rank 0") if rank else ("pair()", "rank 1")
        assert all(text.startswith(f"{call}: rank {rank} has waited ") for text in found)
        assert any(f" s for {absent}. " in text for text in found)  # once the others wait too
        assert kind == "RankError"
        assert text.startswith(f"{absent} did not reach '{call}' within 4 s")
