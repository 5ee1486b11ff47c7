"""A rank of twenty, in two levels of the tree, dies in an agreement: all others raise the same
error, which names it, within seconds. So do ranks that come late, leave or do something else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

import anyrank
from anyrank import faults
from anyrank.testing import Died, Fault, RankPool
from anyrank.world.ranks import Ranks, open_ranks

SIZE = 20
ROOT, INNER, LEAF, LOW_LEAF = 0, 1, 9, 19  # 17, 18 and 19 hang on 1
DEADLINE_SEC = 60.0  # on a busy machine


def pause(rank: int) -> int:
    """Work in which a rank may be killed."""
    faults.point("tree.work")
    return rank


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Twenty ranks, where the pool of other tests has eight."""
    with RankPool(SIZE) as made:
        yield made


PRIMITIVES: dict[str, Callable[[Ranks], object]] = {
    "run": lambda ranks: ranks.run("working", lambda: pause(ranks.rank)),
    "run_on_one": lambda ranks: ranks.run_on_one("working", lambda: pause(0), LOW_LEAF),
    "reduce": lambda ranks: ranks.reduce("working", pause(ranks.rank), max),
    "collect": lambda ranks: ranks.collect("working", pause(ranks.rank)),
    "gather": lambda ranks: ranks.gather("working", pause(ranks.rank)),
    "start_reduce": lambda ranks: ranks.start_reduce("working", None, pause(ranks.rank), max)(),
}


def outcome(work: Callable[[], object]) -> tuple[str, str, list[int], float]:
    """Class, text and causes of the error that work ends in, and the seconds."""
    start = time.monotonic()
    try:
        work()
    except anyrank.AnyrankError as error:
        return type(error).__name__, str(error), [*error.causes], time.monotonic() - start
    return "no error", "", [], time.monotonic() - start


def agreed(results: list[Any], without: int | None = None) -> tuple[str, str, list[int]]:
    """The one outcome of all ranks, or of all but one."""
    others = [result for rank, result in enumerate(results) if rank != without]
    assert all(result[:3] == others[0][:3] for result in others), others
    assert all(result[3] < DEADLINE_SEC for result in others), others
    return others[0][:3]


def job_killed(primitive: str) -> Any:
    with open_ranks(call="test()") as ranks:
        for _ in range(3):
            ranks.run("warming up", lambda: None)
        found = outcome(lambda: PRIMITIVES[primitive](ranks))
        # A later call does not wait for the dead one, and says the same.
        assert outcome(lambda: ranks.run("again", lambda: None))[:3] == found[:3]
        return found


@pytest.mark.parametrize("victim", [ROOT, INNER, LEAF, LOW_LEAF])
@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_a_killed_rank_is_named_on_all_others(pool: RankPool, primitive: str, victim: int) -> None:
    if primitive == "run_on_one" and victim != LOW_LEAF:
        pytest.skip("the others do nothing in it")
    fault = Fault(rank=victim, point="tree.work", how="kill")
    results = pool.run(SIZE, job_killed, primitive, faults=[fault], timeout=120)
    assert isinstance(results[victim], Died)
    kind, text, causes = agreed(results, victim)
    assert (kind, causes) == ("RankError", [victim])
    assert text == f"rank {victim} died or stopped responding; see its log for the cause"


def job_wrong(wrong: dict[int, str]) -> Any:
    rank = dist.get_rank()

    def work() -> None:
        if wrong.get(rank) == "raises":
            raise anyrank.LoadError("enough")

    with open_ranks(call="test()") as ranks:
        what = "another thing" if wrong.get(rank) == "calls" else "working"
        found = outcome(lambda: ranks.run(what, work))
        assert (
            ranks.reduce("going on", rank, max) == SIZE - 1
        )  # the ranks connect anew if they must
        return found


@pytest.mark.parametrize("rank", [ROOT, INNER, LOW_LEAF])
def test_a_rank_that_fails_or_does_something_else_is_named(pool: RankPool, rank: int) -> None:
    found = agreed(pool.run(SIZE, job_wrong, {rank: "raises"}, timeout=120))
    text = f"working failed on 1 of 20 ranks, so every rank stops:\n[rank {rank}] enough"
    assert found == ("LoadError", text, [rank])
    kind, text, _ = agreed(pool.run(SIZE, job_wrong, {rank: "calls"}, timeout=120))
    assert kind == "RankError"
    others = [n for n in range(SIZE) if n != rank][:8]
    assert f"another thing on rank {rank}" in text
    assert f"working on ranks {', '.join(map(str, others))} and 11 more" in text


def job_late() -> Any:
    """A leaf comes after the others have given up; then all of them go on."""
    with open_ranks(call="test()") as ranks:
        if ranks.rank == LOW_LEAF:
            time.sleep(6)
        found = outcome(lambda: ranks.run("working", lambda: None))
        os.environ["ANYRANK_TIMEOUT_SEC"] = "60"
        assert ranks.reduce("going on", ranks.rank, max) == SIZE - 1
        return found


def test_a_rank_that_comes_late_raises_what_all_others_raise(pool: RankPool) -> None:
    results = pool.run(SIZE, job_late, env={"ANYRANK_TIMEOUT_SEC": "4"}, timeout=120)
    kind, text, causes = agreed(results)
    assert (kind, causes) == ("RankError", [LOW_LEAF])
    assert text.startswith(f"rank {LOW_LEAF} did not reach 'working' within 4 s")


def job_killed_within(warm: int) -> Any:
    """Agreements of all kinds until a rank is killed between two messages of one."""
    with open_ranks(call="test()") as ranks:
        names = [name for name in PRIMITIVES if name != "run_on_one"]

        def talk() -> None:
            for number in range(10 * warm):
                PRIMITIVES[names[number % len(names)]](ranks)

        return outcome(talk)


@pytest.mark.parametrize("victim", [ROOT, INNER, LEAF, LOW_LEAF])
@pytest.mark.parametrize("nth", [4, 7, 12])
def test_a_rank_that_dies_between_two_messages_is_named(
    pool: RankPool, victim: int, nth: int
) -> None:
    fault = Fault(rank=victim, point="ranks.talk", how="kill", nth=nth)
    results = pool.run(SIZE, job_killed_within, nth, faults=[fault], timeout=120)
    assert isinstance(results[victim], Died)
    kind, text, causes = agreed(results, victim)
    assert (kind, causes) == ("RankError", [victim])
    assert text.startswith(f"rank {victim} died or stopped responding")
