"""The rules of `check`, each on facts made by hand: what they say, and when they are silent."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.watching.data_facts import LoaderFacts
from anyrank.watching.facts import LINES, Facts, Known, differences
from anyrank.watching.rules import run_rules
from anyrank.watching.slow import find_model
from anyrank.world.ranks import one_process

LOADER = LoaderFacts(4, (2, 0), 0, 64, "", 0)


def facts(**changes: Any) -> Facts:
    """Those of a rank on which all is well."""
    changes.setdefault("seed", changes.pop("number", 0))
    well = Facts({}, 1, 0, False, "", None, ())
    return dataclasses.replace(well, **changes)


def known(*every: Facts, differing: Any = None, batch: int | None = None) -> Known:
    return Known(tuple(range(len(every))), every, differing or {}, batch, 1)


def loader(rank: int, **changes: Any) -> LoaderFacts:
    return dataclasses.replace(LOADER, **{"share": (2, rank), **changes})


def said(*every: Facts, **options: Any) -> list[tuple[str, str]]:
    return [(finding.rule, finding.where) for finding in run_rules(known(*every, **options))]


def test_lines_that_a_rank_lacks_are_no_other_values() -> None:
    lacking = {"values whole": {"w": {0: "a", 1: None}}}
    assert said(facts(), facts(number=1), differing=lacking) == []


def test_frozen_parts_are_told_from_trained_ones() -> None:
    values = {0: "a", 1: "b"}
    differing = {"values whole": {"w": values}, "values frozen whole": {"vae.w": values}}
    trained, frozen = run_rules(known(facts(), facts(number=1), differing=differing))
    assert (trained.where[:2], frozen.where[:6]) == ("w,", "vae.w,")
    assert "they are not broadcast" in frozen.fix


@pytest.mark.parametrize(("batch", "fix"), [(16, "batch_size=8"), (15, "that 2 divides")])
def test_the_batch_that_fits_is_told(batch: int, fix: str) -> None:
    every = [facts(number=rank, loader=loader(rank)) for rank in (0, 1)]
    assert said(*every, batch=8) == []
    (finding,) = run_rules(known(*every, batch=batch))
    assert fix in finding.fix


def compared(tables: list[dict[str, dict[str, str]]]) -> Any:
    """What each rank learns of the differences; all of them run side by side."""
    every = [facts(digests={k: str(v) for k, v in table.items()}) for table in tables]
    barrier, box = threading.Barrier(len(tables)), dict[int, Any]()

    def gather(value: Any) -> list[Any]:
        box[int(threading.current_thread().name)] = value
        barrier.wait(60)
        answer = [box[each] for each in range(len(tables))]
        barrier.wait(60)
        return answer

    ranks: Any = SimpleNamespace(
        ranks=tuple(range(len(tables))),
        gather=gather,
        run_on_one=lambda what, work, rank: gather(work())[rank],
    )
    learnt: list[Any] = [None] * len(tables)

    def learn(number: int) -> None:
        learnt[number] = differences(tables[number], every, ranks)

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
    assert len(compared(tables)["values 0"]) == LINES


def test_no_difference_takes_no_exchange() -> None:
    assert differences({"kinds": {"w": "a"}}, [facts(digests={"kinds": "1"})], one_process()) == {}


def test_several_optimizers_are_taken_together() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    several = [torch.optim.SGD(layer.parameters()) for layer in model]
    assert anyrank.check(model, several) == []
    assert [found.where for found in anyrank.check(model, several[:1])] == [
        "1.weight, 1.bias, rank 0"
    ]


def test_the_model_is_the_outermost_module_with_the_optimizers_parameters() -> None:
    inner, loss = nn.Linear(2, 2), nn.CrossEntropyLoss()
    outer = nn.Sequential(inner, nn.Linear(2, 2))
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(outer.parameters())
    assert find_model([loss, other, outer, inner], [optimizer]) is outer
    assert find_model([inner, loss], [optimizer]) is inner
    assert find_model([loss, other], [optimizer]) is None
    other(torch.zeros(1, 2)).sum().backward()
    assert find_model([loss, other], [optimizer]) is other  # the optimizer is stale
