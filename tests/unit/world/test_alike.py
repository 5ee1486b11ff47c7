"""What ranks should have alike: which lines differ, on which ranks, and what that takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from anyrank.world.alike import differing, digest_of, unlike
from anyrank.world.ranks import one_process


def compared(tables: list[dict[str, dict[str, str]]], limit: int | None = None) -> Any:
    """What each rank learns of the differences; all of them run side by side."""
    digests = [{k: digest_of(v.items()) for k, v in table.items()} for table in tables]
    barrier, box = threading.Barrier(len(tables)), dict[int, Any]()

    def gather(_: str, value: Any) -> list[Any]:
        box[int(threading.current_thread().name)] = value
        barrier.wait(60)
        answer = [box[each] for each in range(len(tables))]
        barrier.wait(60)
        return answer

    learnt: list[Any] = [None] * len(tables)

    def learn(number: int) -> None:
        ranks: Any = SimpleNamespace(ranks=tuple(range(len(tables))), rank=number, gather=gather)
        learnt[number] = differing(tables[number], digests, ranks, limit)

    numbers = range(len(tables))
    threads = [threading.Thread(target=learn, args=(n,), name=str(n)) for n in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert learnt[1:] == learnt[:-1]
    return learnt[0]


def test_one_line_of_a_long_table_is_found() -> None:
    table = {f"model.layers.{number}.weight": "same" for number in range(20_000)}
    other = {**table, "model.layers.777.weight": "other"}
    line = {"model.layers.777.weight": {0: "same", 1: "other", 2: "same"}}
    assert compared([{"kinds": table}, {"kinds": other}, {"kinds": table}]) == {"kinds": line}


def test_a_table_that_the_first_rank_lacks_is_compared_among_those_that_have_it() -> None:
    found = compared([{}, {"values b": {"w": "1"}}, {"values b": {"w": "2", "v": "3"}}])
    assert found == {"values b": {"w": {1: "1", 2: "2"}, "v": {1: None, 2: "3"}}}


def test_tables_that_differ_everywhere_are_cut() -> None:
    tables = [
        {f"values {n}": {f"layers.{i}.w": str(rank) for i in range(5000)} for n in range(9)}
        for rank in range(2)
    ]
    assert len(compared(tables, 32)["values 0"]) == 32
    assert len(compared(tables)["values 8"]) == 5000


def test_a_cut_answer_has_every_ranks_own_text() -> None:
    tables = [{"kinds": {"a": a, "b": b}} for a, b in ("11", "12", "22")]
    assert compared(tables, 1) == {"kinds": {"b": {0: "1", 1: "2", 2: "2"}}}


def test_no_difference_takes_no_exchange() -> None:
    assert differing({"kinds": {"w": "a"}}, [{"kinds": "1"}], one_process()) == {}


def test_what_a_rank_lacks_is_unlike_what_another_has() -> None:
    lines = {0: {"a": "1", "b": "2"}, 3: {"b": "2", "c": "4"}}
    assert unlike(lines) == {"a": {0: "1", 3: None}, "c": {0: None, 3: "4"}}
    assert unlike({0: {"a": "1"}}) == unlike({}) == {}
