"""The rules of `check`, each on facts made by hand: what they say, and when they are silent."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.watching.data_facts import Layer, LoaderFacts
from anyrank.watching.facts import BUCKETS, LINES, Facts, Known, differences
from anyrank.watching.model_facts import Some, some
from anyrank.watching.rules import RULES, run_rules
from anyrank.world.ranks import one_process

NONE = Some()
LOADER = LoaderFacts(4, (Layer("DistributedSampler", 2, 0),), 0, 64, "", 0, "")


def facts(**changes: Any) -> Facts:
    """Those of a rank on which all is well."""
    changes.setdefault("stream", f"stream {changes.pop('number', 0)}")
    well = Facts(
        {}, {}, True, False, 1, NONE, NONE, (), NONE, NONE, "cpu", "", False, NONE, None, NONE,
        NONE, NONE,
    )  # fmt: skip
    return dataclasses.replace(well, **changes)


def known(*every: Facts, differing: Any = None, batch: int | None = None) -> Known:
    return Known(tuple(range(len(every))), every, differing or {}, batch, 1)


def loader(rank: int, **changes: Any) -> LoaderFacts:
    layers = (Layer("DistributedSampler", 2, rank),)
    return dataclasses.replace(LOADER, **{"layers": layers, **changes})


def said(*every: Facts, **options: Any) -> list[tuple[str, str]]:
    return [(finding.rule, finding.where) for finding in run_rules(known(*every, **options))]


def test_there_are_ten_rules_and_they_are_silent_where_all_is_well() -> None:
    assert len(RULES) == 10
    assert said(facts(), facts(number=1)) == []
    assert said(facts()) == []


WEIGHT = {"w": {0: "a", 1: "b"}}
BOTH = "ranks 0, 1"


@pytest.mark.parametrize(
    ("rule", "where", "first", "second", "differing"),
    [
        ("replicas", "w, rank 0 unlike rank 1", {}, {}, {"values whole": WEIGHT}),
        ("ties", f"a, b, {BOTH}", *2 * [{"ties": (("a", "b", "values"),)}], {}),
        ("optimizer", "w, rank 1", {}, {"missing": some(["w"])}, {}),
        ("trainable", "w, rank 0 unlike rank 1", {}, {}, {"kinds": WEIGHT}),
        ("streams", f"drop, {BOTH}", *2 * [{"stream": "s", "dropout": some(["drop"])}], {}),
        (
            "sampler",
            f"loader, {BOTH}",
            *2 * [{"loader": loader(0, layers=2 * LOADER.layers)}],
            {},
        ),
        ("batch", f"loader.batch_size, {BOTH}", {}, {"loader": loader(1, batch=5)}, {}),
        ("device", "w (cuda:0), rank 1", {}, {"off": some(["w (cuda:0)"])}, {}),
        ("frozen", "vae, rank 1", {}, {"training": some(["vae"])}, {}),
        ("reentrant", "layer, rank 1", {}, {"reentrant": some(["layer"])}, {}),
    ],
)
def test_a_rule_speaks_for_the_ranks_that_it_is_about(
    rule: str, where: str, first: dict[str, Any], second: dict[str, Any], differing: Any
) -> None:
    first = {"loader": loader(0)} | first
    second = {"loader": loader(1)} | second
    found = said(facts(**first), facts(**{"number": 1, **second}), differing=differing)
    assert found[0] == (rule, where)


def test_lines_that_a_rank_lacks_are_no_other_values() -> None:
    lacking = {"values whole": {"w": {0: "a", 1: None}}}
    assert said(facts(), facts(number=1), differing=lacking) == []


def test_streams_of_a_tensor_parallel_group_may_be_alike() -> None:
    drops = {"dropout": some(["drop"]), "tensor_parallel": 2}
    alike = [facts(stream=str(rank // 2), **drops) for rank in range(4)]
    assert said(*alike) == []
    assert said(*(facts(stream="s", **drops) for _ in range(4))) == [
        ("streams", "drop, ranks 0, 1, 2, 3")
    ]


def test_a_static_graph_bears_reentrant_checkpoints() -> None:
    assert said(facts(reentrant=some(["layer"]), static_graph=True)) == []


@pytest.mark.parametrize(("batch", "fix"), [(16, "batch_size=8"), (15, "that 2 divides")])
def test_the_batch_that_fits_is_told(batch: int, fix: str) -> None:
    every = [facts(number=rank, loader=loader(rank)) for rank in (0, 1)]
    assert said(*every, batch=8) == []
    (finding,) = run_rules(known(*every, batch=batch))
    assert fix in finding.fix


class Recorded:
    """Ranks that are asked to gather, and answer with what each rank would send."""

    def __init__(self, tables: list[dict[str, dict[str, str]]]) -> None:
        self.ranks = tuple(range(len(tables)))
        self.tables = tables
        self.sizes: list[int] = []

    def run(self) -> list[Any]:
        """What each rank learns; all of them run side by side, a gather at a time."""
        import pickle
        import threading

        barrier, box = threading.Barrier(len(self.tables)), dict[int, Any]()
        learnt: list[Any] = [None] * len(self.tables)
        every = [
            facts(
                digests={k: str(sorted(v.items())) for k, v in table.items()},
                sizes={k: len(v) for k, v in table.items()},
            )
            for table in self.tables
        ]

        def rank(number: int) -> None:
            def gather(value: Any, what: str = "") -> list[Any]:
                self.sizes.append(len(pickle.dumps(value)))
                box[number] = value
                barrier.wait(60)
                answer = [box[each] for each in self.ranks]
                barrier.wait(60)
                return answer

            ranks: Any = type("Ranks", (), {"ranks": self.ranks, "gather": staticmethod(gather)})
            learnt[number] = differences(self.tables[number], every, ranks)

        threads = [threading.Thread(target=rank, args=(number,)) for number in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return learnt


def test_one_line_of_a_long_table_is_found_in_a_few_bytes() -> None:
    table = {f"model.layers.{number}.weight": "same" for number in range(20_000)}
    other = {**table, "model.layers.777.weight": "other"}
    ranks = Recorded([{"kinds": table}, {"kinds": other}, {"kinds": table}])
    line = {"model.layers.777.weight": {0: "same", 1: "other", 2: "same"}}
    assert ranks.run() == [{"kinds": line}] * 3
    assert max(ranks.sizes) < 64 << 10


def test_tables_that_differ_everywhere_are_cut() -> None:
    tables = [
        {f"values {n}": {f"layers.{i}.w": str(rank) for i in range(5000)} for n in range(9)}
        for rank in range(2)
    ]
    ranks = Recorded(tables)
    first, second = ranks.run()
    assert first == second
    assert 0 < len(first["values 0"]) < 2 * LINES
    assert max(ranks.sizes) < 64 << 10
    assert BUCKETS * 8 < 64 << 10


def test_no_difference_takes_no_exchange() -> None:
    assert differences({"kinds": {"w": "a"}}, [facts(digests={"kinds": "1"})], one_process()) == {}


def test_arguments_are_looked_at() -> None:
    with pytest.raises(TypeError, match="model= takes"):
        anyrank.check("model")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="optimizer= takes an optimizer, not str"):
        anyrank.check(nn.Linear(1, 1), "adam")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="accumulation=0: give at least 1"):
        anyrank.check(nn.Linear(1, 1), accumulation=0)


def test_several_optimizers_are_taken_together() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    several = [torch.optim.SGD(layer.parameters()) for layer in model]
    assert anyrank.check(model, several) == []
    assert [found.where for found in anyrank.check(model, several[:1])] == [
        "1.weight, 1.bias, rank 0"
    ]
