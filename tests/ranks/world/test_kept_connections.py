"""What connects the ranks is opened once, kept from call to call, and made anew after a failure."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.world.test_ranks_meet import impatient, outcome
from torch import nn

import anyrank
from anyrank.testing import run_ranks
from anyrank.world.group import default_store
from anyrank.world.ranks import open_ranks
from anyrank.world.rendezvous import open_connections

WEIGHTS = {"weight": torch.ones(3, 3), "bias": torch.zeros(3)}


def load() -> None:
    anyrank.load(nn.Linear(3, 3), WEIGHTS)


FileStore: Any = getattr(dist, "FileStore")  # noqa: B009 - not in its list of names
PrefixStore: Any = getattr(dist, "PrefixStore")  # noqa: B009

# -- what a call leaves behind --------------------------------------------------------------------


def fail() -> None:
    raise anyrank.LoadError("enough")


def job_many_calls(folder: str) -> tuple[int, int, list[str]]:
    """Keys in the store after ten calls and after a thousand, and the threads that are left beside
    one for each set of connections.
    """
    counts: list[int] = []
    pair: Any = dist.new_group([0, 1])
    for calls in (10, 990):
        for number in range(calls):
            with open_ranks(None if number % 2 else pair, "test()") as ranks:
                ranks.gather("exchanging values", b"x" * (number % 3000))
                if number % 100 == 0:
                    outcome(lambda ranks=ranks: ranks.run("failing", fail))
        for number in range(2):
            torch.manual_seed(0)
            state = anyrank.TrainState(nn.Linear(1, 1))
            with anyrank.Checkpoints(f"{folder}-{calls}-{number}", state, background=True) as ckpts:
                ckpts.save()
        dist.barrier()
        counts.append(default_store().num_keys())
        dist.barrier()
    end, kept = time.monotonic() + 60, len(open_connections())
    while len(left := own_threads()) > kept and time.monotonic() < end:
        time.sleep(0.05)  # each ends by itself, and nobody waits for it
    return counts[0], counts[1], left[kept:]


def own_threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("anyrank")]


def test_calls_leave_neither_keys_in_the_store_nor_threads(tmp_path: Path) -> None:
    for few, many, threads in run_ranks(2, job_many_calls, str(tmp_path / "run"), timeout=120):
        assert few == many
        assert threads == []


# -- after a failure ------------------------------------------------------------------------------


def job_made_anew(how: str) -> list[tuple[str, str]]:
    """A call that fails on all ranks, and two that do not."""
    if how != "first":
        load()
    rank = dist.get_rank()
    if how == "other call":
        call: Any = anyrank.plan if rank == 1 else anyrank.load
        found = [outcome(lambda: call(nn.Linear(3, 3), WEIGHTS))]
    elif rank == 1:  # stays away
        default_store().wait(["gave up"])
        found = [("", "")]
    else:
        found = [outcome(load)]
        default_store().set("gave up", "1")
    os.environ["ANYRANK_TIMEOUT_SEC"] = "60"
    return [*found, outcome(load), outcome(load)]


@pytest.mark.parametrize("how", ["other call", "away", "first"])
def test_after_a_failure_the_next_call_connects_anew(how: str) -> None:
    results = run_ranks(3, job_made_anew, how, env={"ANYRANK_TIMEOUT_SEC": "4"})
    for rank, (failed, *later) in enumerate(results):
        assert later == [("no error", "")] * 2
        if how == "other call":
            assert "load() on ranks 0, 2, plan() on rank 1" in failed[1]
        elif rank != 1:
            assert failed == results[0][0]
            assert failed[1].startswith("rank 1 did not reach 'load()' within 4 s")
            assert "process_group=" in failed[1]


def job_late_within_a_call() -> tuple[str, str]:
    """Rank 1 comes to an agreement that the others have given up."""
    with open_ranks(call="test()") as ranks:
        if ranks.rank == 1:
            default_store().wait(["gave up"])
        found = outcome(lambda: ranks.run("counting", lambda: 1))
        default_store().set("gave up", "1")
        # An object that is kept for long, as Checkpoints are, goes on with the ranks that live.
        os.environ["ANYRANK_TIMEOUT_SEC"] = "60"
        assert ranks.gather("counting again", ranks.rank) == [0, 1, 2]
    return found


def test_a_rank_that_comes_too_late_raises_the_same_error() -> None:
    results = run_ranks(3, job_late_within_a_call, env={"ANYRANK_TIMEOUT_SEC": "4"})
    assert len(set(results)) == 1
    assert results[0][1].startswith("rank 1 did not reach 'counting' within 4 s")


def job_by_itself(folder: str) -> list[tuple[str, str]]:
    """Rank 1 makes a call by itself, which ends; then all make it, rank 1 the last."""
    net = nn.Linear(3, 3)
    found = [outcome(lambda: anyrank.convert(net, folder)) if dist.get_rank() == 1 else ("", "")]
    dist.barrier()
    os.environ["ANYRANK_TIMEOUT_SEC"] = "60"
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    if dist.get_rank() == 1:
        time.sleep(1)
    return [*found, outcome(lambda: anyrank.convert(net, folder))]


def test_a_call_that_a_rank_made_by_itself_is_no_error_later(tmp_path: Path) -> None:
    out, env = str(tmp_path / "out"), {"ANYRANK_TIMEOUT_SEC": "2"}
    one, other = run_ranks(2, job_by_itself, out, env=env)
    assert "rank 0 did not reach 'convert()'" in other[0][1]
    assert one[1] == other[1] == ("no error", "")


# -- the default group ----------------------------------------------------------------------------


def job_again(folder: str, is_same_store: bool) -> list[list[int]]:
    """Two default groups, one after the other."""
    found: list[list[int]] = []
    rank, size = dist.get_rank(), dist.get_world_size()
    store: Any = None
    for number in range(3):
        with open_ranks() as ranks:
            found.append(ranks.gather("exchanging values", rank + 10 * number))
        load()
        dist.barrier()
        dist.destroy_process_group()
        if store is None or not is_same_store:
            store = FileStore(f"{folder}/{number}", size)
        at = PrefixStore(f"group {number}", store)
        dist.init_process_group("gloo", store=at, rank=rank, world_size=size)
    return found


@pytest.mark.parametrize("is_same_store", [False, True])
def test_a_default_group_that_is_made_again(tmp_path: Path, is_same_store: bool) -> None:
    for found in run_ranks(3, job_again, str(tmp_path), is_same_store):
        assert found == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]


# -- values ---------------------------------------------------------------------------------------


def job_large(sizes: list[int]) -> list[int]:
    """Lengths of what was gathered."""
    with open_ranks() as ranks:
        return [
            len(each) for each in ranks.gather("exchanging values", os.urandom(sizes[ranks.rank]))
        ]


@pytest.mark.parametrize("sizes", [[0, 5, 9], [3000, 4, 5], [3000, 4000, 0], [90_000] * 3])
def test_values_of_any_length_arrive(sizes: list[int]) -> None:
    assert run_ranks(3, job_large, sizes) == [sizes] * 3


def job_from_one() -> list[int]:
    with open_ranks() as ranks:
        every: list[int] = []
        for nbytes in (1, 3000, 200_000):
            value = ranks.run_on_one("sending", lambda n=nbytes: bytes(n), rank=1)
            every.append(len(value))
        return every


def test_a_value_of_one_rank_arrives_at_any_length() -> None:
    assert run_ranks(3, job_from_one) == [[1, 3000, 200_000]] * 3


# -- beside the user's collectives ----------------------------------------------------------------


def job_beside_collectives() -> list[float]:
    """Collectives of the user's are under way while ranks agree, in another order on each."""
    found: list[float] = []
    with impatient(), open_ranks() as ranks:
        for _ in range(20):
            one, other = torch.ones(1000), torch.ones(1000)
            first = dist.all_reduce(one, async_op=True)
            ranks.run("counting", lambda: ranks.rank)
            second = dist.all_reduce(other, async_op=True)
            load()
            for work in (first, second):
                assert work is not None
                work.wait()
            found += [one.sum().item(), other.sum().item()]
    return found


def test_calls_while_the_user_s_collectives_run() -> None:
    assert run_ranks(3, job_beside_collectives) == [[3000.0] * 40] * 3
