"""Promise 7: over any saves, kills and resumes on any rank counts, each sample exactly once; a
microbatch sees the same data and random numbers on whichever rank it runs.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks
from anyrank.training.data.fetch import MicrobatchDataset
from anyrank.training.data.order import Order
from anyrank.training.data.schedule import Schedule, StepPlan, Tail
from anyrank.training.steps.position import Position, RankAccounts
from anyrank.world.ranks import Ranks, one_process, open_ranks

# -- by arithmetic: any script of runs ------------------------------------------------------------


class At(Position):
    """The position on one of several ranks that are not there."""

    def __init__(self, schedule: Schedule, rank: int, size: int) -> None:
        self.at = rank, size
        dataset = MicrobatchDataset(range(schedule.order.n), 0, None)
        super().__init__(schedule, None, None, "rescale", dataset, 0, None)

    def data_rank(self) -> tuple[int, int]:
        self.schedule.check_size(self.at[1])
        return self.at

    def take(self, plan: StepPlan, losing: int = 0) -> Iterator[tuple[int, list[int]]]:
        """Run this rank's part of a step and count it; as if `losing` samples had been lost."""
        seen: list[int] = []
        for slot in plan.slots(*self.at):
            if not slot.is_copy:
                ids = self.schedule.ids(plan, slot.k)
                yield slot.k, ids
                seen += ids[losing:]
        self.advance(plan, seen)


class Together(Ranks):
    """All of them at once: merges what each would say."""

    def __init__(self, ranks: list[At]) -> None:
        alone = one_process()
        super().__init__(alone.ranks, alone.rank)
        self.all_of_them = ranks
        self.accounts = [rank.rank_accounts(self) for rank in ranks]

    def reduce(self, what: str, value: Any, merge: Any) -> Any:
        if isinstance(value, RankAccounts):
            return functools.reduce(merge, self.accounts)
        rows = zip(self.all_of_them, self.accounts, strict=True)
        return functools.reduce(merge, [{rank.at[0]: known.seen} for rank, known in rows])

    def gather(self, what: str, value: Any) -> list[Any]:
        return [rank.step for rank in self.all_of_them]


RUNS = st.lists(
    # ranks, steps that are saved, steps behind the last save that a kill takes back
    st.tuples(st.integers(1, 9), st.integers(0, 7), st.integers(0, 3)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60),
    microbatch=st.integers(1, 4),
    num=st.integers(1, 9),
    tail=st.sampled_from(["short", "drop"]),
    shuffle=st.booleans(),
    runs=RUNS,
)
def test_any_script_of_runs_gives_the_uninterrupted_order(
    n: int, microbatch: int, num: int, tail: Tail, shuffle: bool, runs: list[tuple[int, int, int]]
) -> None:
    if tail == "drop":
        n = max(n, num * microbatch)
    schedule = Schedule(Order(n, 5, shuffle), num * microbatch, microbatch, tail)
    state: Any = None
    found: dict[tuple[int, int], list[int]] = {}  # step, microbatch -> ids, of saved steps
    for size, saved, killed in runs:
        ranks = [At(schedule, rank, min(size, num)) for rank in range(min(size, num))]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(json.loads(state))
        for number in range(saved + killed):
            plan = ranks[0].next_step()
            assert all(rank.next_step() == plan for rank in ranks)
            for rank in ranks:
                for k, ids in rank.take(plan):
                    if number < saved:
                        assert (plan.number, k) not in found
                        found[plan.number, k] = ids
            if number == saved - 1:
                state = json.dumps(ranks[0].state_dict())
                assert all(json.dumps(rank.state_dict()) == state for rank in ranks)
                together = Together(ranks)
                for rank in ranks:
                    rank.check_receipt(together)
                    assert all(one.verdict.startswith("exactly once") for one in rank.receipts)
    assert_uninterrupted(schedule, found)


def assert_uninterrupted(schedule: Schedule, found: dict[tuple[int, int], list[int]]) -> None:
    """What was found is what one rank without any interruption takes."""
    alone = At(schedule, 0, 1)
    for step in range(max((step for step, _ in found), default=-1) + 1):
        plan = alone.next_step()
        assert dict(alone.take(plan)) == {k: ids for (s, k), ids in found.items() if s == step}
    epochs: dict[int, list[int]] = {}
    alone = At(schedule, 0, 1)
    for _ in range(alone.step, max((step for step, _ in found), default=-1) + 1):
        plan = alone.next_step()
        epochs.setdefault(plan.epoch, []).extend(i for _, ids in alone.take(plan) for i in ids)
    for epoch, ids in epochs.items():
        assert len(set(ids)) == len(ids)
        if epoch < alone.epoch and schedule.tail != "drop":
            assert set(ids) == set(range(schedule.order.n))


@pytest.mark.parametrize("wrong", ["lost", "behind", "double"])
def test_what_is_not_exactly_once_is_an_error(wrong: str) -> None:
    schedule = Schedule(Order(20, 5, True), 8, 2, "short")
    ranks = [At(schedule, rank, 2) for rank in range(2)]
    for _ in range(2):
        plan = ranks[0].next_step()
        for rank in ranks:
            list(rank.take(plan, losing=rank.at[0] if wrong == "lost" else 0))
    message = "in epoch 0 samples were lost or repeated"
    if wrong == "behind":
        list(ranks[1].take(ranks[1].next_step()))
        message = r"ranks have run different samples; they are at steps \[2, 3\]"
    elif wrong == "double":  # two ranks with the same data that did not do the same
        other = At(schedule, 1, 2)
        for _ in range(2):
            list(other.take(other.next_step(), losing=1))
        ranks.append(other)
        message = "ranks have run different samples"
    for rank in ranks:
        with pytest.raises(anyrank.CheckpointError, match=message):
            rank.check_receipt(Together(ranks))


def job_missing(folder: str) -> str:
    """What a run of this rank alone says of a loader for all ranks."""
    loader = anyrank.ElasticLoader(torch.zeros(8, 1), global_batch=4, microbatch=1)
    state = anyrank.TrainState(torch.nn.Linear(1, 1), data=loader)
    path = f"{folder}/{dist.get_rank()}"
    with anyrank.Checkpoints(path, state, process_group=anyrank.ALONE) as ckpts:
        try:
            ckpts.resume()
        except ValueError as error:
            return str(error)
    return "no error"


def test_a_run_that_lacks_data_parallel_ranks_is_refused_at_its_opening(tmp_path: Path) -> None:
    for text in run_ranks(2, job_missing, str(tmp_path)):
        assert re.search(r"only rank [01] called; rank [01] must call too, .* has 2 data", text)


# -- on ranks -------------------------------------------------------------------------------------


class Noisy(torch.utils.data.Dataset[Any]):
    """Sample i, and what three generators say."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> Any:
        return i, [random.random(), np.random.rand(), torch.rand(()).item()]


def as_lists(samples: list[Any]) -> Any:
    return [i for i, _ in samples], [noise for _, noise in samples], torch.rand(()).item()


def run_to(
    steps: int,
    loader: anyrank.ElasticLoader,
    state: Any,
    net: nn.Module,
    draw: Callable[[Any], Any],
) -> tuple[Any, Any, Any]:
    """{(step, k): what a microbatch saw and drew} of this rank, the state then, and the receipts.

    A killed run is one whose later steps nobody hears of.
    """
    if state is not None:
        loader.load_state_dict(state)
    seen: dict[tuple[int, int], Any] = {}
    while loader.step < steps:
        for step in loader:
            for batch in step.microbatches(net):
                drawn = draw(step)
                if not step.is_copy:
                    seen[step.number, step.k] = (batch, drawn)
            loader.commit()
            if loader.step == steps:
                break
    with open_ranks() as ranks:
        loader.position.check_receipt(ranks)
    return seen, loader.state_dict(), loader.receipts


def job_run(state: Any, steps: int, num_workers: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(100 + dist.get_rank())
    net = DistributedDataParallel(nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5)))
    loader = anyrank.ElasticLoader(
        Noisy(), global_batch=8, microbatch=2, seed=4, num_workers=num_workers, collate_fn=as_lists
    )

    def draw(step: Any) -> Any:
        mask = (net(torch.ones(1, 1)) != 0).flatten().tolist()
        drawn = [mask, random.random(), np.random.rand(), torch.rand(()).item()]
        step.backward(net(torch.ones(1, 1)).mean())
        return drawn

    return run_to(steps, loader, state, net, draw)


def merged(results: list[Any]) -> dict[tuple[int, int], Any]:
    """What all ranks saw; no two may have run the same microbatch."""
    whole: dict[tuple[int, int], Any] = {}
    for seen, state, receipts in results:
        assert not whole.keys() & seen.keys()
        whole |= seen
        assert (state, receipts) == results[0][1:]
    return whole


@pytest.fixture(scope="module")
def alone() -> dict[tuple[int, int], Any]:
    """Nine steps, three epochs, on one rank."""
    whole = merged(run_ranks(1, job_run, None, 9, 0))
    assert sorted(whole) == [(s, k) for s in range(9) for k in range(4)]
    return whole


@pytest.mark.parametrize(
    ("num_workers", "script"),
    [
        (0, [(2, 9)]),
        (0, [(3, 9)]),
        (0, [(4, 9)]),
        (0, [(4, 2), (3, 4), (2, 9)]),
        (2, [(2, 9)]),
        (2, [(1, 1), (4, 5), (3, 6), (4, 9)]),
    ],
    ids=str,
)
def test_any_number_of_ranks_sees_the_same_data_and_numbers(
    num_workers: int, script: list[tuple[int, int]], alone: dict[tuple[int, int], Any]
) -> None:
    state: Any = None
    whole: dict[tuple[int, int], Any] = {}
    for world, steps in script:
        results = run_ranks(world, job_run, state, steps, num_workers)
        # These steps are lost with their process, and come again.
        part = merged(results)
        assert not whole.keys() & part.keys()
        whole |= part
        state = json.loads(json.dumps(results[0][1]))
    assert whole == alone
    assert {one.verdict for one in results[0][2]} == {"exactly once"}


LENGTHS = [9, 0, 3, 14, 5]


def read_shard(shard: int) -> Iterator[Any]:
    for number in range(LENGTHS[shard]):
        yield shard, number, random.random()


def job_shards(state: Any, steps: int) -> tuple[Any, Any, Any]:
    """As `job_run`, of samples that are read in sequence."""
    loader = anyrank.ElasticLoader.from_shards(
        range(5), read_shard, lengths=LENGTHS, global_batch=8, microbatch=2, collate_fn=list
    )
    return run_to(steps, loader, state, nn.Linear(1, 1), lambda _: torch.rand(()).item())


def test_shards_are_read_once_on_any_number_of_ranks() -> None:
    expected = merged(run_ranks(1, job_shards, None, 8))
    assert len({sample for batch, _ in expected.values() for sample in batch}) == 2 * 31
    state: Any = None
    whole: dict[tuple[int, int], Any] = {}
    for world, steps in ((4, 2), (3, 4), (2, 7), (1, 8)):
        results = run_ranks(world, job_shards, state, steps)
        whole |= merged(results)
        state = json.loads(json.dumps(results[0][1]))
    assert whole == expected
