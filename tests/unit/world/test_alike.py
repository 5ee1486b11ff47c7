"""What ranks should have alike: which lines differ, on which ranks, and what that takes."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace
from typing import Any

from anyrank.world.alike import differing, digests_of_lines, join_digests
from anyrank.world.first_ranks import FirstRanks, join_ranks, name_ranks
from anyrank.world.ranks import one_process

Texts = dict[str | None, FirstRanks]


def compared(tables: list[dict[str, dict[str, str]]], limit: int | None = None) -> Any:
    """What each rank learns of the differences; all of them run side by side."""
    barrier, box = threading.Barrier(len(tables)), dict[int, Any]()

    def reduce(_: str, value: Any, merge: Any) -> Any:
        box[int(threading.current_thread().name)] = value
        barrier.wait(60)
        answer = functools.reduce(merge, [box[each] for each in range(len(tables))])
        barrier.wait(60)
        return answer

    digests = [digests_of_lines(table, rank) for rank, table in enumerate(tables)]
    merged = functools.reduce(join_digests, digests)
    learned: list[Any] = [None] * len(tables)

    def learn(number: int) -> None:
        ranks: Any = SimpleNamespace(ranks=tuple(range(len(tables))), rank=number, reduce=reduce)
        learned[number] = differing(tables[number], merged, ranks, limit)

    numbers = range(len(tables))
    threads = [threading.Thread(target=learn, args=(n,), name=str(n)) for n in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert learned[1:] == learned[:-1]
    return learned[0]


def on(**ranks_by_text: list[int]) -> Texts:
    """Which ranks have which text; "none" for those that lack the line."""
    return {
        None if text == "none" else text.strip("_"): FirstRanks.first_of(ranks)
        for text, ranks in ranks_by_text.items()
    }


def test_one_line_of_a_long_table_is_found() -> None:
    table = {f"model.layers.{number}.weight": "same" for number in range(20_000)}
    other = {**table, "model.layers.777.weight": "other"}
    line = {"model.layers.777.weight": on(same=[0, 2], other=[1])}
    assert compared([{"kinds": table}, {"kinds": other}, {"kinds": table}]) == {"kinds": line}


def test_a_table_that_the_first_rank_lacks_is_compared_among_those_that_have_it() -> None:
    found = compared([{}, {"values b": {"w": "1"}}, {"values b": {"w": "2", "v": "3"}}])
    assert found == {"values b": {"w": on(_1=[1], _2=[2]), "v": on(none=[1], _3=[2])}}


def test_tables_that_differ_everywhere_are_cut() -> None:
    tables = [
        {f"values {n}": {f"layers.{i}.w": str(rank) for i in range(5000)} for n in range(9)}
        for rank in range(2)
    ]
    assert len(compared(tables, 32)["values 0"]) == 32
    assert len(compared(tables)["values 8"]) == 5000


def test_a_cut_answer_has_every_ranks_own_text() -> None:
    tables = [{"kinds": {"a": a, "b": b}} for a, b in ("11", "12", "22")]
    assert compared(tables, 1) == {"kinds": {"b": on(_1=[0], _2=[1, 2])}}


def test_no_difference_takes_no_exchange() -> None:
    lines = {"kinds": {"w": "a"}}
    assert differing(lines, digests_of_lines(lines, 0), one_process()) == {}


def test_what_a_rank_lacks_is_unlike_what_another_has() -> None:
    found = compared([{"kinds": {"a": "1", "b": "2"}}, {"kinds": {"b": "2", "c": "4"}}])
    assert found == {"kinds": {"a": on(_1=[0], none=[1]), "c": on(none=[0], _4=[1])}}


def test_a_thousand_ranks_with_a_text_each_are_told_in_a_few() -> None:
    tables = [{"kinds": {"w": f"{rank}"}} for rank in range(1000)]
    digests = functools.reduce(
        join_digests, (digests_of_lines(table, rank) for rank, table in enumerate(tables))
    )
    assert digests == {"kinds": ("", 0)}
    every = functools.reduce(
        join_ranks, ({f"{rank}": FirstRanks((rank,), 1)} for rank in range(1000))
    )
    assert list(every) == [f"{rank}" for rank in range(8)]
    some = FirstRanks.first_of(range(1000))
    assert name_ranks(some) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"
