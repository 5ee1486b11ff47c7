"""Ranks that wait for each other in different calls are told so within seconds."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.test_ranks_meet import impatient
from torch import nn

import anyrank
from anyrank.testing import RanksFailed, run_ranks
from anyrank.world.crossed import Board
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
def test_a_call_of_one_rank_alone_is_an_error_on_all(tmp_path, call: str, caller: int) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, job_one_rank_calls, call, caller, str(tmp_path), timeout=120)
    assert time.monotonic() - start < 60
    text = str(caught.value)
    assert all(f"[rank{rank}] anyrank.errors.RankError: " in text for rank in range(3))
    told = re.findall(r"rank \d is at '(.*)' and rank \d at '(.*)', and each waits", text)
    assert len(told) > 1
    assert {frozenset(places) for places in told} == {frozenset({call, "completing the step"})}


def job_late() -> list[list[int]]:
    """Each rank is late in turn for one of two groups, so that no two wait crosswise."""
    found: list[list[int]] = []
    with impatient(), open_ranks() as one, open_ranks() as other:
        for turn in range(3):
            for ranks in (one, other):
                if ranks.rank == turn:
                    time.sleep(1.5)
                found.append(ranks.gather(turn))
    return found


def test_late_ranks_are_waited_for() -> None:
    assert run_ranks(3, job_late) == [[[n] * 3 for n in (0, 0, 1, 1, 2, 2)]] * 3


class Table(dict[str, Any]):
    """A store in memory."""

    set = dict.__setitem__


@pytest.mark.parametrize(("passed", "is_crossed"), [(4, True), (5, False)])
def test_a_rank_that_has_passed_the_wait_is_not_crossed(passed: int, is_crossed: bool) -> None:
    store: Any = Table()
    theirs = {"where": "b", "what": "y", "number": 1, "ranks": [0], "reached": {"a": passed}}
    store["stuck/1"] = json.dumps(theirs)
    board = Board(store, 0, "a", "x", 5)
    found = [board.look([1]) for _ in range(2)]
    assert found[0] == ""
    assert bool(found[1]) == is_crossed
