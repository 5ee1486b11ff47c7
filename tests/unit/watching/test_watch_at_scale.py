"""What the ranks of a watch say to one another: who judges, orders and answers. No processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyrank.watching import beats as beats_module
from anyrank.watching.beats import ABSENT, Beats
from anyrank.watching.hang import PatientStore
from anyrank.watching.looks import Look
from anyrank.watching.orders import CALLS, LOOK, STACKS, Orders
from anyrank.watching.recorder import OTHER, UNREAD, Call
from anyrank.watching.stacks import Frame
from anyrank.watching.verdict import conclude
from anyrank.world.store import ANSWER_SEC, Store

RANKS = 1000


class CountedStore(Store):
    """A store that counts what this process asks of it."""

    def __init__(self) -> None:
        super().__init__(torch.distributed.HashStore(), "test")  # pyright: ignore
        self.calls = 0

    def call(self, work: Callable[[Any], Any], seconds: float = 10.0) -> Any:
        self.calls += 1
        return super().call(work, seconds)


@pytest.fixture
def store() -> CountedStore:
    return CountedStore()


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sign of life is old after its first reading."""
    monkeypatch.setattr(beats_module, "SILENT_SEC", 0.0)
    monkeypatch.setattr(beats_module, "REPLACED_SEC", 0.0)
    monkeypatch.setattr(beats_module, "READINGS", 2)


def stall(ranks: list[Beats], silent: set[int]) -> list[bool]:
    """A tick of each rank in a stall; which of them judge."""
    living = [beats for rank, beats in enumerate(ranks) if rank not in silent]
    for beats in living:
        beats.give(7, 60.0)
    time.sleep(0.001)
    return [beats.find_judge() for beats in living]


def test_a_rank_in_a_stall_asks_as_much_of_the_store_on_a_thousand_ranks(
    store: CountedStore,
) -> None:
    for rank in range(RANKS):
        Beats(store, rank, RANKS).give(7, 60.0)
    first, other = Beats(store, 0, RANKS), Beats(store, 500, RANKS)
    store.calls = 0
    assert not other.find_judge()
    assert store.calls <= 2
    assert first.find_judge()
    first.listen()
    assert store.calls <= 5
    assert (first.steps(), len(first.last)) == (7 * RANKS, RANKS)
    assert 60 <= first.idle_sec() < 90


def test_a_rank_that_never_watched_is_told_from_one_that_has_left(store: CountedStore) -> None:
    beats = [Beats(store, rank, 4) for rank in range(4)]
    beats[0].give(0, 0.0)
    beats[3].give(0, 0.0)
    beats[3].leave()
    beats[0].listen()
    assert [beat.text for beat in beats[0].last][1:] == [ABSENT, ABSENT, "left"]
    beats[1].give(0, 0.0)
    beats[0].listen()
    assert [beat.watches for beat in beats[0].last] == [True, True, False, False]


def test_the_lowest_rank_that_lives_takes_the_place_of_a_silent_one_and_keeps_it(
    store: CountedStore, quickly: None
) -> None:
    ranks = [Beats(store, rank, 6) for rank in range(6)]
    assert stall(ranks, set())[0]
    beats_module.READINGS = 3
    found = [stall(ranks, {0, 1}) for _ in range(8)]
    assert found[0] == [False] * 4
    assert found[-1] == [True, False, False, False]  # rank 2
    assert sum(judging.count(True) > 1 for judging in found) == 0
    assert stall(ranks, set()) == [False, False, True, False, False, False]


def test_what_many_ranks_see_is_told_once_and_read_by_few_calls(store: CountedStore) -> None:
    orders = [Orders(store, rank) for rank in range(RANKS)]
    order = orders[0].give(LOOK)
    assert orders[0].next() is None
    frame = Frame("/u/train.py", 10, "main")
    for rank, of in enumerate(orders[1:], 1):
        received = of.next()
        assert received is not None
        assert received[:2] == order[:2]
        calls = [Call("0", 7, "all_reduce", members=[*range(RANKS)], time_ns=rank)]
        of.answer(received, Look(rank, stack=(frame,), calls=calls if rank != 500 else []))
        assert of.next() is None
    store.calls = 0
    answers = orders[0].answers(order)
    assert len({*answers.values()}) == 2
    looks = orders[0].take(order, answers)
    assert store.calls <= 5
    assert [*looks] == [*range(1, RANKS)]
    assert (looks[500].calls, looks[999].rank, looks[999].stack) == ([], 999, (frame,))
    assert looks[999].calls[0].members == [*range(RANKS)]


def test_an_order_to_some_ranks_is_left_alone_by_the_others(store: CountedStore) -> None:
    orders = [Orders(store, rank) for rank in range(3)]
    orders[0].give(STACKS, [2], ("0", 5))
    assert orders[1].next() is None
    received = orders[2].next()
    assert received is not None
    assert (received.what, [*received.block]) == (STACKS, ["0", 5])
    orders[1].give(CALLS)
    assert [orders[0].next() is None, orders[1].next() is None] == [False, True]


def test_a_watch_waits_longer_for_a_store_whose_host_was_not_scheduled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On 48 ranks of two cores one answer took more than ten seconds, and a watch ended."""
    waited: list[float] = []
    monkeypatch.setattr(Store, "call", lambda self, work, seconds: waited.append(seconds))
    store = PatientStore(torch.distributed.HashStore(), "test")  # pyright: ignore
    store.set("key", "value")
    store.has(["key"])
    assert min(waited) >= 5 * ANSWER_SEC


def call_at(*lines: int, name: str = "all_reduce", **more: Any) -> Call:
    stack = tuple(Frame("/u/train.py", line, "main") for line in lines)
    return Call("0", 7, name, [[4]], ["Float"], stack=stack, **more)


def test_one_rank_of_each_call_is_asked_for_its_lines(store: CountedStore) -> None:
    """They stand for all that have made it: torch takes a second of a core to tell the first."""
    at = (Frame("/u/train.py", 30, "main"),)
    looks = [Look(rank, stack=at, calls=[call_at()]) for rank in range(48)]
    looks[25].calls = [call_at(name="all_gather")]
    verdict = conclude(looks, 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.line, verdict.unread) == ([25], 30, [0, 25])
    looks[0].calls, looks[25].calls = [call_at(10)], [call_at(12, name="all_gather")]
    verdict = conclude(looks, 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.line, verdict.unread) == ([25], 12, [])
    assert "and 39 more: all_reduce #7\n    /u/train.py:10 main\n    now at" in verdict.screen


def test_ranks_are_asked_how_they_came_to_a_call_where_the_calls_do_not_tell() -> None:
    at = (Frame("/u/train.py", 30, "main"),)
    looks = [Look(rank, stack=at, calls=[call_at(10, arrival=UNREAD)]) for rank in range(4)]
    for look in looks[2:]:
        look.calls = [call_at(12, name="all_gather", arrival=UNREAD)]
    verdict = conclude(looks, 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.unread) == ([], [0, 2])
    looks[0].calls = [call_at(10)]
    looks[2].calls = [call_at(12, name="all_gather", arrival=OTHER)]
    verdict = conclude(looks, 61)
    assert verdict is not None
    assert (verdict.culprits, verdict.line) == ([2, 3], 12)
