"""The law of lanes: rows of (step, lane) are those of one undisturbed rank, and each comes once.

Ranks are simulated in this process: each has a copy of the deal and readers of its lanes, is killed
at any time, and reads ahead as far as it may.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anyrank.errors import CheckpointError
from anyrank.training.streams.deal import Deal
from anyrank.training.streams.lanes import CUT, OUT, Lane, LaneState, Report
from anyrank.training.streams.transforms import Buckets, Pack, resize

EXAMPLES = int(os.environ.get("LANES_EXAMPLES", "60"))
SEEDS = int(os.environ.get("LANES_SEEDS", "80"))


class Rows:
    """A source of rows that know what they are, and draw; with windows it mixes them."""

    flows = False  # whether epochs flow into each other; rows say then of which they are

    def __init__(self, sizes: list[int], block: int, window: bool, tokens: bool) -> None:
        self.sizes, self.block, self.window, self.tokens = sizes, block, window, tokens

    def open(self, epoch: int, shard: int, row: int) -> Iterator[Any]:
        for number in range(row, self.sizes[shard]):
            size = 0
            if self.tokens:
                size = random.Random(f"{shard}.{number}").choice([0, 1, 2, 3, 5, 9, 40])
            ids = [(shard * 1000 + number) * 100 + token for token in range(size)]
            name = (shard, number, epoch) if self.flows else (shard, number)
            kind = hash((shard, number)) % 5
            yield {"id": name, "input_ids": ids, "class": kind, "drawn": random.random()}

    def read(self, rows: Iterator[Any], epoch: int, shard: int, row: int) -> list[Any]:
        random.seed(repr((epoch, shard, row, "rows")))
        block = list(islice(rows, self.block))
        if self.window:
            random.Random(f"{epoch}/{shard}/{row}").shuffle(block)
        return block

    def seed_transform(self, transform: Any, *numbers: int) -> None:
        random.seed(repr(numbers))

    def numbers(self, epoch: int, shard: int, row: int, count: int) -> range:
        return range(row, row + count)

    def name(self, shard: int) -> str:
        return str(shard)


class Tail:
    """A transform of a user's own, which holds the last three rows, draws for each and at the end,
    and cuts now and then.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, Any]] = []
        self.fed = 0
        self.count = 0

    def feed(self, row: Any) -> list[Any]:
        self.rows.append((self.fed, row | {"fed": random.random()}))
        self.fed += 1
        if len(self.rows) <= 3:
            return []
        self.count += 1
        _, first = self.rows.pop(0)
        return [first, CUT] if self.count % 7 == 0 else [first]

    def end(self) -> list[Any]:
        return [row | {"ended": random.random()} for _, row in self.rows]

    def held(self) -> list[int]:
        return [number for number, _ in self.rows]

    def state_dict(self) -> int:
        return self.count

    def load_state_dict(self, state: int) -> None:
        self.count = state


class Noise:
    """A transform that keeps nothing, and draws for each row."""

    def feed(self, row: Any) -> list[Any]:
        return [row | {"fed": random.random()}]

    def end(self) -> list[Any]:
        return []


class Picky(Buckets):
    """A subclass that leaves rows out."""

    def feed(self, row: Any) -> list[Any]:
        return super().feed(row) if row["class"] else []


class Crop(Pack):
    """A subclass that leaves rows out, and draws."""

    def feed(self, row: Any) -> list[Any]:
        ids = row["input_ids"][: random.randint(0, 30)]
        return super().feed({"input_ids": ids}) if ids else []


def transform_of(name: str, microbatch: int) -> Any:
    if "buckets" in name:
        kind = Picky if "picky" in name else Buckets
        key, patience = ("id", 11) if "alone" in name else ("class", 25)
        return resize(kind(key, patience=patience), microbatch)
    kinds = {
        "pack": Pack(8, eos=7),
        "pack whole": Pack(8, split=False, pad=-5),
        "pack crop": Crop(8, eos=7),
        "own": Tail(),
        "noise": Noise(),
    }
    return kinds.get(name)


PACKS = ["pack", "pack whole", "pack crop"]
NAMES = ["none", *PACKS, "own", "noise", "buckets", "buckets alone", "buckets picky"]


class Rank:
    """Its copy of the deal, readers of its lanes, and what its workers have ahead."""

    def __init__(self, run: Run, index: int) -> None:
        self.run, self.index = run, index
        self.deal = Deal.from_json(json.loads(run.saved)["deal"], run.k)
        self.lanes: dict[int, Lane] = {}
        self.ahead: dict[int, list[Any]] = {}
        self.open_own()

    def open_own(self) -> None:
        live, size = self.deal.live, self.run.size
        own = live[self.index * len(live) // size : (self.index + 1) * len(live) // size]
        self.lanes = {k: lane for k, lane in self.lanes.items() if k in own}
        for k in own:
            if k not in self.lanes:
                shards = self.run.ids(self.deal.shards[k])
                make, state = copy.deepcopy(self.run.transform), self.deal.states[k]
                first, epoch = self.deal.first[k], self.run.epoch
                self.lanes[k] = Lane(self.run.source, k, make, first, shards, state, epoch)
                self.ahead[k] = []

    def read_ahead(self, k: int) -> None:
        read = self.lanes[k].take(self.run.microbatch, False, self.deal.is_last)
        if read is not None:
            self.ahead[k].append(read)

    def microbatches(self, size: int) -> dict[int, tuple[list[Any], Report]]:
        batches: dict[int, tuple[list[Any], Report]] = {}
        for k, lane in self.lanes.items():
            ahead = self.ahead[k].pop(0) if size and self.ahead[k] else None
            read = ahead or lane.take(size, True, self.deal.is_last)
            assert read is not None
            batches[k] = read
        return batches

    def learn(self, reports: list[Report]) -> None:
        before = [
            first + len(n) for first, n in zip(self.deal.first, self.deal.shards, strict=True)
        ]
        self.deal.take(reports)
        for k, lane in self.lanes.items():
            new = before[k] - self.deal.first[k]
            lane.shards += self.run.ids(self.deal.shards[k][max(new, 0) :])
        self.open_own()


class Run:
    """N ranks in one process, from a save to a kill."""

    def __init__(
        self,
        source: Rows,
        k: int,
        microbatch: int,
        transform: Any,
        size: int,
        saved: str | None = None,
        depth: int = 0,
        seed: int = 0,
    ) -> None:
        self.source, self.k, self.microbatch, self.transform = source, k, microbatch, transform
        self.size, self.depth, self.random = size, depth, random.Random(seed)
        self.saved = saved or self.begin(0, 0)
        self.start()

    def begin(self, epoch: int, step: int) -> str:
        deal = Deal(len(self.source.sizes), self.k, self.source.flows)
        return json.dumps({"epoch": epoch, "step": step, "deal": deal.to_json()})

    def start(self) -> None:
        state = json.loads(self.saved)
        self.epoch, self.number = state["epoch"], state["step"]
        self.ranks = [Rank(self, index) for index in range(self.size)]
        self.seen: list[Report] = []
        self.settle()

    def ids(self, numbers: list[int]) -> list[tuple[int, int]]:
        count, found = len(self.source.sizes), list[tuple[int, int]]()
        for number in numbers:
            later, place = divmod(number, count)
            epoch = later + (0 if self.source.flows else self.epoch)
            found.append((epoch, random.Random(epoch).sample(range(count), count)[place]))
        return found

    def round(self, size: int) -> dict[int, list[Any]]:
        batches: dict[int, tuple[list[Any], Report]] = {}
        for rank in self.ranks:
            for _ in range(self.random.randint(0, self.depth) if size else 0):
                for k in rank.lanes:
                    if len(rank.ahead[k]) < self.depth:
                        rank.read_ahead(k)
            batches |= rank.microbatches(size)
        reports = [report for _, report in batches.values()]
        self.random.shuffle(reports)  # they arrive in any order
        self.seen += reports
        for rank in self.ranks:
            rank.learn(reports)
        for rank in self.ranks[1:]:
            assert rank.deal.to_json() == self.ranks[0].deal.to_json()
        return {k: rows for k, (rows, _) in batches.items()}

    def settle(self) -> None:
        while not self.ranks[0].deal.is_ready:
            self.round(0)
        if self.source.flows:
            self.epoch = self.ranks[0].deal.oldest // len(self.source.sizes)

    def step(self) -> dict[int, list[Any]] | None:
        """The rows of each lane; None at the end of an epoch."""
        if self.ranks[0].deal.is_over:
            self.saved = self.begin(self.epoch + 1, self.number)
            self.start()
            return None
        rows = self.round(self.microbatch)
        self.number += 1
        self.settle()
        assert any(rows.values())
        return {k: [content(row) for row in own] for k, own in rows.items() if own}

    def save(self) -> str:
        deal = self.ranks[0].deal.to_json()
        return json.dumps({"epoch": self.epoch, "step": self.number, "deal": deal})


def content(row: Any) -> Any:
    if "id" in row:
        return row["id"], row["drawn"], row.get("fed"), row.get("ended")
    return tuple(tuple(value.tolist()) for value in row.values())


def undisturbed(source: Rows, k: int, microbatch: int, transform: Any, epochs: int) -> list[Any]:
    """The steps of one rank; and that its reports tell of each row once."""
    run, steps = Run(source, k, microbatch, transform, 1), list[Any]()
    while run.epoch < epochs:
        epoch, seen = run.epoch, run.seen
        step = run.step()
        if step is not None:
            steps.append(step)
        if run.epoch != epoch:
            rows = [row for report in seen for row in report.rows]
            known = sorted((shard, n) for _, shard, a, b in rows for n in range(a, b))
            assert known == [(s, n) for s, size in enumerate(source.sizes) for n in range(size)]
            ends = sorted(end[1:] for report in seen for end in report.ends)
            assert ends == list(enumerate(source.sizes))
            units = [report.units for report in seen]
            assert sum(read for read, _ in units) == sum(given for _, given in units)
    return steps


def check_once(steps: list[Any], source: Rows, name: str) -> None:
    """Each row, or with Pack each token, once."""
    rows = [row for step in steps for lane in step.values() for row in lane]
    if "pack" not in name:
        assert Counter(row[0] for row in rows) == Counter(
            (s, n) for s, z in enumerate(source.sizes) for n in range(z)
        )
        return
    shards = range(len(source.sizes))
    tokens = Counter(t for s in shards for row in source.open(0, s, 0) for t in row["input_ids"])
    assert Counter(t for row in rows for t in row[0] if t not in (7, -5)) == tokens
    if name == "pack":
        short = Counter(
            k for step in steps for k, own in step.items() for row in own if len(row[0]) < 8
        )
        assert all(count == 1 for count in short.values())  # the last of its lane
    else:
        assert all(len(row[0]) == 8 for row in rows)


def check_flow(sizes: list[int], k: int, microbatch: int, name: str, seed: int) -> int:
    """Three epochs that flow into each other, with kills; returns how many there were."""
    source = Rows(sizes, 1 + seed % 7, seed % 2 == 0, False)
    source.flows = True
    transform, run, steps = transform_of(name, microbatch), None, list[Any]()
    run = Run(source, k, microbatch, transform, 1)
    while run.epoch < 3:
        first, step = run.epoch, run.step()
        assert step is not None
        if name == "none":  # others hold rows back, and their epochs end later
            assert {row[0][2] - first for own in step.values() for row in own} <= {0, 1, 2}
        steps.append(step)
    rows = [row[0] for step in steps for own in step.values() for row in own]
    given = Counter(row for row in rows if row[2] < 3)
    assert given == Counter(
        (shard, n, epoch) for epoch in range(3) for shard, z in enumerate(sizes) for n in range(z)
    )
    seen = Counter(row for report in run.seen for row in report.rows)
    assert set(seen.values()) == {1}  # each block of rows is read for the first time once
    return check_run(source, k, microbatch, transform, steps, seed, 3)


@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=14).filter(any),
    k=st.integers(1, 6),
    microbatch=st.integers(1, 7),
    name=st.sampled_from(["none", "buckets", "own"]),
    seed=st.integers(0, 1000),
)
def test_epochs_flow_into_each_other(
    sizes: list[int], k: int, microbatch: int, name: str, seed: int
) -> None:
    check_flow(sizes, k, microbatch, name, seed)


def test_many_kills_while_epochs_flow() -> None:
    kills = 0
    for seed in range(SEEDS // 2):
        chance = random.Random(seed)
        sizes = [chance.choice([0, 1, 1, 3, 40, 200]) for _ in range(chance.randint(1, 14))] + [2]
        name = ["none", "buckets", "own"][seed % 3]
        kills += check_flow(sizes, chance.randint(1, 6), chance.randint(1, 6), name, seed)
    assert kills > SEEDS


few = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 500)), min_size=1, max_size=14
)
one_large = st.integers(0, 40).map(lambda n: [1] * n + [3000] + [1] * n)
tiny = st.lists(st.integers(0, 2), min_size=1, max_size=200)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_ranks_and_kills_give_the_rows_of_one_rank(data: Any) -> None:
    draw = data.draw
    sizes = draw(st.one_of(few, few, tiny, tiny, one_large), "sizes")
    k, microbatch = draw(st.integers(1, 8), "K"), draw(st.integers(1, 9), "microbatch")
    block = draw(st.sampled_from([1, 2, 16, 100]), "block")
    name = draw(st.sampled_from(NAMES), "transform")
    source = Rows(sizes, block, draw(st.booleans(), "window"), "pack" in name)
    transform, epochs = transform_of(name, microbatch), 1 if sum(sizes) > 1000 else 2
    steps = undisturbed(source, k, microbatch, transform, epochs)
    check_run(source, k, microbatch, transform, steps, draw(st.integers(0, 1000), "chance"), epochs)


def check_run(
    source: Rows, k: int, microbatch: int, transform: Any, steps: list[Any], seed: int, epochs: int
) -> int:
    """Run with kills; returns how many there were."""
    chance, kills = random.Random(seed), 0
    left, every = chance.randint(0, 12), max(1, len(steps) // 6)
    run = Run(source, k, microbatch, transform, chance.randint(1, 5), None, chance.randint(0, 3))
    saved = run.save()
    while run.epoch < epochs:
        if left and chance.random() < max(0.2, 1.5 / every):
            left, kills = left - 1, kills + 1
            size, depth = chance.randint(1, 5), chance.randint(0, 4)
            run = Run(source, k, microbatch, transform, size, saved, depth, left)
        number, step = run.number, run.step()
        assert step is None or step == steps[number], f"step {number}"
        if chance.random() < max(0.3, 1 / every):
            saved = run.save()
            assert len(saved) < 400 * k + 300, saved
    return kills


def test_many_kills() -> None:
    """Without hypothesis, which likes small cases."""
    kills = 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        sizes = [chance.choice([0, 1, 1, 3, 40, 200]) for _ in range(chance.randint(1, 14))]
        k, microbatch, name = chance.randint(1, 6), chance.randint(1, 6), NAMES[seed % len(NAMES)]
        source = Rows(sizes, chance.choice([1, 7, 16]), seed % 2 == 0, "pack" in name)
        transform = transform_of(name, microbatch)
        steps = undisturbed(source, k, microbatch, transform, 1)
        if name not in ("pack crop", "buckets picky"):  # which leave some out
            check_once(steps, source, name)
        if name == "buckets":
            classes = [{hash(row[0]) % 5 for row in own} for step in steps for own in step.values()]
            assert all(len(kinds) == 1 for kinds in classes)
        kills += check_run(source, k, microbatch, transform, steps, seed, 1)
    assert kills > SEEDS


def test_reading_ahead_waits_for_shards() -> None:
    """What is not due may not be cut short: the law would notice it."""
    source = Rows([1] * 60, 1, False, False)
    lane = Lane(source, 0, None, 0, [(0, 0), (0, 1)], LaneState(), 0)
    assert lane.take(4, False, False) is None
    lane.shards += [(0, 2), (0, 3), (0, 4)]
    read = lane.take(4, False, False)
    assert read is not None
    assert len(read[0]) == 4
    assert lane.take(4, False, False) is None
    read = lane.take(4, True, False)
    assert read is not None
    assert (len(read[0]), read[1].status) == (1, OUT)


@pytest.mark.parametrize("sizes", [[8, 7], [8, 5], [9, 6]])
def test_a_shard_with_other_rows_is_noticed(sizes: list[int]) -> None:
    source = Rows([8, 6], 4, False, False)
    lane = Lane(source, 0, None, 0, [(0, 0), (0, 1)], LaneState(), 0)
    reports = [lane.take(4, True, False) for _ in range(3)]
    assert reports[-1] is not None
    state = reports[-1][1].state
    source.sizes = sizes
    again = Lane(source, 0, None, 0, [(0, 0), (0, 1)], state, 0)
    if sizes[0] == 9:  # behind the place where it goes on: nothing is read there again
        assert again.take(4, True, False) is not None
        return
    with pytest.raises(CheckpointError, match="shard 1, lane 0: its rows have changed"):
        again.take(4, True, False)


def test_a_subclass_that_feeds_twice_for_a_row_is_refused() -> None:
    class Halves(Pack):
        def feed(self, row: Any) -> list[Any]:
            ids = row["input_ids"]
            return super().feed({"input_ids": ids[:2]}) + super().feed({"input_ids": ids[2:]})

    lane = Lane(Rows([8], 4, False, True), 0, Halves(50), 0, [(0, 0)], LaneState(), 0)
    with pytest.raises(ValueError, match="Halves has called the feed of its base class more than"):
        lane.take(4, True, True)


def test_a_transform_with_a_large_state_is_told_of_held() -> None:
    class Hoarder:
        def feed(self, row: Any) -> list[Any]:
            return [row]

        def end(self) -> list[Any]:
            return []

        def state_dict(self) -> list[int]:
            return [0] * 1000

    lane = Lane(Rows([8], 4, False, False), 0, Hoarder(), 0, [(0, 0)], LaneState(), 0)
    with pytest.raises(TypeError, match=r"Hoarder.state_dict\(\): 3000 bytes.*by held\(\)"):
        lane.take(4, True, True)


def test_pack_cuts_labels_alike_and_tells_documents_apart() -> None:
    pack = Pack(4, key="tokens", labels="targets", pad=9)
    rows = [*pack.feed({"tokens": [1, 2, 3], "targets": [-100, 5, 6]})]
    rows += pack.feed({"tokens": torch.tensor([4, 5, 6]), "targets": [7, 8, 9]})
    rows += pack.end()
    assert [row["tokens"].tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 9, 9]]
    assert [row["labels"].tolist() for row in rows] == [[-100, 5, 6, 7], [8, 9, -100, -100]]
    assert [row["position_ids"].tolist() for row in rows] == [[0, 1, 2, 0], [0, 1, 0, 0]]
    assert [row["document_ids"].tolist() for row in rows] == [[0, 0, 0, 1], [0, 0, -1, -1]]
    with pytest.raises(ValueError, match=r"2 tokens in 'tokens', and 1 labels in 'targets'"):
        pack.feed({"tokens": [1, 2], "targets": [1]})


def test_whole_documents_leave_little_padding() -> None:
    chance, pack = random.Random(0), Pack(512, split=False, pad=0)
    documents = [[1] * chance.randint(1, 600) for _ in range(2000)]
    rows = [row for tokens in documents for row in pack.feed({"input_ids": tokens})] + pack.end()
    assert sum(map(len, documents)) == sum(int((row["document_ids"] >= 0).sum()) for row in rows)
    assert len(rows) * 512 < 1.05 * sum(map(len, documents))
    with pytest.raises(ValueError, match="give pad="):
        Pack(512, split=False)
