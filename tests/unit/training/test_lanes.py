"""The law of streams: the rows of (step, k) are those of one undisturbed rank, and each comes once.

Ranks are simulated in this process: each has a copy of the deal, readers of its lanes in workers
that read ahead, and is killed at any time.
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anyrank.errors import CheckpointError
from anyrank.training.data.schedule import slots_of_rank
from anyrank.training.streams.deal import Deal
from anyrank.training.streams.entry import OpenStreams
from anyrank.training.streams.lane import Lane, LaneState
from anyrank.training.streams.lane_transform import CUT
from anyrank.training.streams.sources import Stream
from anyrank.training.streams.transforms import Buckets, Pack, resize
from anyrank.training.streams.workers import BlockAnswer, BlockReader, BlockRequest, BlockRequests

EXAMPLES = int(os.environ.get("LANES_EXAMPLES", "60"))
SEEDS = int(os.environ.get("LANES_SEEDS", "80"))


def rows_of(size: int, name: str, has_tokens: bool) -> Any:
    """A `read` of shards that are (number, size), whose rows know what they are, and draw."""

    def read(shard: tuple[int, int], start: int = 0) -> Iterator[Any]:
        number, size = shard
        for row in range(start, size):
            ids: list[int] = []
            if has_tokens:
                length = random.Random(f"{number}.{row}").choice([0, 1, 2, 3, 5, 9, 40])
                ids = [(number * 1000 + row) * 100 + token for token in range(length)]
            kind = (7 * number + row) % 5
            yield {
                "id": (name, number, row),
                "input_ids": ids,
                "class": kind,
                "drawn": random.random(),
            }

    def whole(shard: tuple[int, int]) -> Iterator[Any]:
        return read(shard)

    return read if size % 2 else whole


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


class Some:
    """A filter that draws."""

    def feed(self, row: Any) -> list[Any]:
        return [row] if random.random() < 0.6 else []

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


def transform_of(name: str) -> Any:
    kinds = {
        "buckets": Buckets("class", patience=25),
        "buckets alone": Buckets("id", patience=11),
        "buckets picky": Picky("class", patience=25),
        "buckets full": Buckets("class", patience=40, drop_last=True),
        "pack": Pack(8, eos=7),
        "pack whole": Pack(8, split=False, pad=-5),
        "pack crop": Crop(8, eos=7),
        "own": Tail(),
        "noise": Noise(),
        "some": Some(),
    }
    return kinds.get(name)


BUCKETS = ["buckets", "buckets alone", "buckets picky", "buckets full"]
NAMES = ["none", "none", "pack", "pack whole", "pack crop", "own", "noise", "some", *BUCKETS]
LEAVING = ("pack crop", "buckets picky", "buckets full", "some")  # they leave rows out


class Data:
    """The sources of a run, and what its deals depend on."""

    def __init__(
        self,
        sizes: list[list[int]],
        k: int,
        microbatch: int,
        name: str = "none",
        window: int | None = None,
        until: Any = "first",
        endless: bool = False,
    ) -> None:
        names = [chr(97 + n) for n in range(len(sizes))]
        sources = {
            one: Stream(
                list(enumerate(own)),
                rows_of(len(own), one, "pack" in name),
                transform_of(name),
                window,
            )
            for one, own in zip(names, sizes, strict=True)
        }
        mix = {one: 1.0 + n for n, one in enumerate(names)} if len(sizes) > 1 else None
        self.streams = OpenStreams(sources, endless=endless, mix=mix, until=until)
        self.streams.order(3, True, k * microbatch, microbatch)
        self.constants = self.streams.constants(3, k)
        self.k, self.sizes, self.name = k, sizes, name

    def begin(self, epoch: int) -> Deal:
        return Deal(self.constants, epoch, [len(own) for own in self.sizes])


def workers_of(reader: BlockReader, requests: BlockRequests, num: int, depth: int) -> Iterator[Any]:
    """The answers of a DataLoader's workers, each of which has a reader of its own."""
    readers = [copy.copy(reader) for _ in range(max(1, num))]
    for one in readers:
        one._lanes = {}  # pyright: ignore[reportPrivateUsage] - of a process of its own
    answers: deque[Any] = deque()
    asked = requests.requests()
    for turn in range(10**9):
        while len(answers) < (depth * num or 1):
            answers.append(readers[(turn + len(answers)) % max(1, num)][next(asked)])
        yield answers.popleft()


class Rank:
    """A rank of a run: its requests and workers, and what it has reported of its blocks."""

    def __init__(self, data: Data, index: int, size: int, num_workers: int, depth: int) -> None:
        self.requests = BlockRequests(0, num_workers)
        reader = BlockReader(data.streams, 3, list)
        self.batches = workers_of(reader, self.requests, num_workers, depth)
        self.own = [slot.k for slot in slots_of_rank(data.k, index, size) if not slot.is_copy]

    def step(self, deal: Deal, number: int, keys: list[Any]) -> dict[int, Any]:
        self.requests.begin_step(deal, number, self.own)
        return {k: self.requests.fetch(self.batches, keys[k]) for k in self.own}


class Run:
    """N ranks in one process, from a save to a kill."""

    def __init__(self, data: Data, size: int, saved: str | None = None, workers: Any = (0, 1)):
        self.data, self.size, self.workers = data, size, workers
        state = json.loads(saved or json.dumps({"epoch": 0, "step": 0, "deal": None}))
        self.epoch, self.number = state["epoch"], state["step"]
        self.deal = data.begin(self.epoch)
        if state["deal"]:
            self.deal = Deal.from_json(state["deal"], data.constants, self.epoch)
        self.changes: list[Any] = []
        self.missing = Counter[Any]()  # microbatches without a row, by the pass over a source
        self.start()

    def start(self) -> None:
        self.ranks = [Rank(self.data, n, self.size, *self.workers) for n in range(self.size)]

    def step(self) -> list[list[Any]]:
        """The rows of each microbatch."""
        deal, blocks, keys = self.deal, self.deal.blocks, list[Any]()
        lanes = deal.lanes_of(self.number, blocks)
        for lane in lanes:
            keys.append((*deal.lane_pass(lane), blocks[lane]))
            blocks[lane] += 1
        is_unsure = deal.is_unsure(lanes)
        fetched: dict[int, Any] = {}
        for rank in self.ranks:
            fetched |= rank.step(deal, self.number, keys)
        last = {lane: k for k, lane in enumerate(lanes)}
        answers: dict[int, BlockAnswer] = {k: one.request for k, one in fetched.items()}
        states = {n: (answers[k].state, answers[k].blocks_left) for n, k in last.items()}
        self.changes += [change for answer in answers.values() for change in answer.changes]
        self.deal = deal.after(states)  # type: ignore[arg-type]
        if is_unsure and not any(answer.num_samples for answer in answers.values()):
            return self.step()
        self.number += 1
        had_ended = deal.has_ended
        rows = [[content(row) for row in fetched[k].batch or ()] for k in range(self.data.k)]
        for (lane, pass_id, _), own in zip(keys, rows, strict=True):
            source = deal.source_of(lane)
            is_last_step = self.deal.has_ended[source] and not had_ended[source]
            self.missing[source, pass_id] += not own and not is_last_step
        if self.deal.is_over:
            self.totals = self.deal.totals
            self.epoch += 1
            self.deal = self.data.begin(self.epoch)
            self.start()
        return rows

    def save(self) -> str:
        deal = self.deal.to_json()
        return json.dumps({"epoch": self.epoch, "step": self.number, "deal": deal})


def content(row: Any) -> Any:
    if "id" in row:
        return row["id"], row["drawn"], row.get("fed"), row.get("ended")
    return tuple(tuple(value.tolist()) for value in row.values())


def undisturbed(data: Data, epochs: int) -> list[list[list[list[Any]]]]:
    """The steps of one rank, by epoch."""
    run = Run(data, 1)
    steps: list[list[list[list[Any]]]] = [[] for _ in range(epochs)]
    while run.epoch < epochs:
        epoch = run.epoch
        steps[epoch].append(run.step())
        if run.epoch > epoch and len(data.sizes) == 1:
            (total,) = run.totals
            assert total.rows == sum(data.sizes[0])
            assert total.units_fed == total.units_given
            if data.name == "buckets full":
                given = sum(len(rows) for step in steps[epoch] for rows in step)
                assert given + total.dropped == total.rows
    # Before the last step of a pass at most K of its microbatches have no row.
    assert max(run.missing.values(), default=0) <= data.k, run.missing
    return steps


def check_once(steps: list[list[list[Any]]], data: Data) -> None:
    """Each row, or with Pack each token, once."""
    name, sizes = data.name, data.sizes[0]
    rows = [row for step in steps for own in step for row in own]
    ids = [("a", s, n) for s, size in enumerate(sizes) for n in range(size)]
    if "pack" not in name:
        found = Counter(row[0] for row in rows)
        assert found == Counter(ids) or (name in LEAVING and max(found.values(), default=1) == 1)
        return
    if name in LEAVING:
        return
    read = data.streams.sources[0].read
    shards = enumerate(sizes)
    tokens = Counter(t for shard in shards for row in read(shard) for t in row["input_ids"])
    assert Counter(t for row in rows for t in row[0] if t not in (7, -5)) == tokens


def check_full(steps: list[list[list[Any]]], data: Data) -> None:
    """No step is without a row, if the epoch has one. A lane's last microbatch is short once, where
    rows are given as they are. See also `undisturbed`.
    """
    assert all(map(any, steps)) or len(steps) == 1
    if data.name == "none" and len(data.sizes) == 1:
        before = [own for step in steps[:-1] for own in step]
        full = max(map(len, before), default=0)
        short = sum(0 < len(own) < full for own in before)
        assert short <= min(data.k, len(data.sizes[0]))


def check_run(data: Data, steps: list[Any], seed: int, epochs: int) -> int:
    """Run with kills; returns how many there were."""
    chance, kills = random.Random(seed), 0
    left, every = chance.randint(0, 12), max(1, len(steps) // 6)

    def workers() -> tuple[int, int]:
        return chance.randint(0, 3), chance.randint(1, 4)

    run = Run(data, chance.randint(1, min(5, data.k)), None, workers())
    saved = run.save()
    while run.epoch < epochs:
        if left and chance.random() < max(0.2, 1.5 / every):
            left, kills = left - 1, kills + 1
            run = Run(data, chance.randint(1, min(5, data.k)), saved, workers())
        number, rows = run.number, run.step()
        assert rows == steps[number], f"step {number}"
        assert not run.changes
        if chance.random() < max(0.3, 1 / every):
            saved = run.save()
            lanes = len(run.deal.states) + len(data.sizes)
            assert len(saved) < 400 * lanes + 20 * data.k + 300, saved
    return kills


few = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 500)), min_size=1, max_size=14
).filter(any)
one_large = st.integers(0, 40).map(lambda n: [1] * n + [1500] + [1] * n)
tiny = st.lists(st.integers(0, 2), min_size=1, max_size=200).filter(any)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_ranks_and_kills_give_the_rows_of_one_rank(data: Any) -> None:
    draw = data.draw
    sizes = draw(st.one_of(few, few, tiny, tiny, one_large), "sizes")
    k, microbatch = draw(st.integers(1, 8), "K"), draw(st.integers(1, 9), "microbatch")
    name = draw(st.sampled_from(NAMES), "transform")
    window = draw(st.sampled_from([None, None, 1, 16, 100]), "window")
    check(Data([sizes], k, microbatch, name, window), draw(st.integers(0, 1000), "chance"))


def check(data: Data, seed: int) -> int:
    epochs = 1 if sum(map(sum, data.sizes)) > 1000 else 2
    by_epoch = undisturbed(data, epochs)
    for steps in by_epoch:
        check_full(steps, data)
        if len(data.sizes) == 1:
            check_once(steps, data)
    return check_run(data, [step for steps in by_epoch for step in steps], seed, epochs)


@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(few, min_size=2, max_size=3),
    k=st.integers(1, 6),
    microbatch=st.integers(1, 7),
    name=st.sampled_from(["none", "buckets", "own"]),
    until=st.sampled_from(["first", "all"]),
    seed=st.integers(0, 1000),
)
def test_mixtures_are_the_same_on_any_ranks(
    sizes: list[list[int]], k: int, microbatch: int, name: str, until: str, seed: int
) -> None:
    check(Data(sizes, k, microbatch, name, None, until), seed)


@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=14),
    k=st.integers(1, 6),
    microbatch=st.integers(1, 7),
    name=st.sampled_from(["none", "own", "noise"]),
    seed=st.integers(0, 1000),
)
def test_endless_streams_are_the_same_on_any_ranks_and_always_full(
    sizes: list[int], k: int, microbatch: int, name: str, seed: int
) -> None:
    data, chance = Data([sizes], k, microbatch, name, endless=True), random.Random(seed)
    one = Run(data, 1)
    steps = [one.step() for _ in range(25)]
    if name != "own":
        assert all(len(own) == microbatch for step in steps for own in step)
    run = Run(data, chance.randint(1, min(5, k)), None, (2, 2))
    for number, step in enumerate(steps):
        if chance.random() < 0.3:
            workers = chance.randint(0, 2), chance.randint(1, 3)
            run = Run(data, chance.randint(1, min(5, k)), run.save(), workers)
        assert run.step() == step, number
    assert not run.changes
    rounds = max(1, 25 // max(1, -(-len(sizes) // k)))
    assert min(run.deal.blocks) >= rounds - 1


def test_many_kills() -> None:
    """Without hypothesis, which likes small cases."""
    kills = 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        sizes = [chance.choice([0, 1, 1, 3, 40, 200]) for _ in range(chance.randint(1, 14))] + [2]
        k, microbatch, name = chance.randint(1, 6), chance.randint(1, 6), NAMES[seed % len(NAMES)]
        window = chance.choice([None, 7, 16])
        parts = [sizes] if seed % 3 else [sizes, [chance.randint(1, 60) for _ in range(3)]]
        until = chance.choice(["first", "all"])
        kills += check(Data(parts, k, microbatch, name, window, until), seed)
    assert kills > SEEDS


class Rows:
    """A source of rows, read in pieces."""

    def __init__(self, sizes: list[int], piece: int, tokens: bool = False) -> None:
        self.sizes, self.piece, self.read_from = sizes, piece, rows_of(1, "a", tokens)
        self.has_start = True

    def open(self, pass_id: int, shard: int, row: int) -> Iterator[Any]:
        return self.read_from((shard, self.sizes[shard]), row)

    def read_piece(self, rows: Iterator[Any], pass_id: int, shard: int, row: int) -> list[Any]:
        return list(islice(rows, self.piece))

    def seed_transform(self, *numbers: int) -> None:
        random.seed(repr(numbers))

    def numbers(self, pass_id: int, shard: int, row: int, count: int) -> range:
        return range(row, row + count)

    def name(self, shard: int) -> str:
        return str(shard)


def open_lane(
    source: Rows, transform: Any = None, state: LaneState | None = None, size: int = 4
) -> Lane:
    """A lane of all shards of a source."""

    def shard_at(index: int) -> tuple[int, int] | None:
        return (0, index) if index < len(source.sizes) else None

    return Lane(source, 0, 0, transform, shard_at, state or LaneState(), size)


def test_a_lane_says_how_many_blocks_are_left_once_it_sees_its_end() -> None:
    lane = open_lane(Rows([7, 6], 4))
    found = [(len(lane.take(look=2)), lane.blocks_left) for _ in range(5)]
    assert found == [(4, None), (4, None), (4, 1), (1, 0), (0, 0)]
    assert (lane.state.blocks, lane.state.rows, lane.state.passed) == (4, 13, 2)


def test_what_was_looked_for_is_no_part_of_the_state() -> None:
    for look in (0, 1, 5):
        lane = open_lane(Rows([7, 6], 4), size=2)
        lane.take(look)
        assert lane.state == LaneState(0, 0, 4, 2, 0, 0, "", "", lane.state.digest, 1, 4)


@pytest.mark.parametrize("sizes", [[8, 3], [8], [9, 6]])
def test_a_shard_with_other_rows_is_noticed(sizes: list[int]) -> None:
    source = Rows([8, 6], 4)
    lane = open_lane(source, size=5)
    for _ in range(2):
        lane.take()
    source.sizes = sizes
    again = open_lane(source, state=lane.state, size=5)
    if sizes[0] == 9:  # before the place where it goes on: nothing is read there again
        assert len(again.take()) == 4
        return
    with pytest.raises(
        CheckpointError, match=r"shard ., lane 0: the rows, or what .* differ from the first read"
    ):
        again.take()


def test_a_subclass_that_feeds_twice_for_a_row_is_refused() -> None:
    class Halves(Pack):
        def feed(self, row: Any) -> list[Any]:
            ids = row["input_ids"]
            return super().feed({"input_ids": ids[:2]}) + super().feed({"input_ids": ids[2:]})

    with pytest.raises(ValueError, match=r"Halves called feed\(\) of its base class more than"):
        open_lane(Rows([8], 4, True), Halves(50)).take()


def test_a_transform_with_a_large_state_is_told_of_held() -> None:
    class Hoarder:
        def feed(self, row: Any) -> list[Any]:
            return [row]

        def end(self) -> list[Any]:
            return []

        def state_dict(self) -> list[int]:
            return [0] * 1000

    with pytest.raises(TypeError, match=r"Hoarder.state_dict\(\) has 3000 bytes.*from held\(\)"):
        open_lane(Rows([8], 4), Hoarder()).take()


class InSlots:
    """Pairs of rows, the first of which waits in a slot of fixed size."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[Any] = [None]

    def feed(self, row: Any) -> list[Any]:
        if self.waiting[0] is None:
            self.waiting[0] = row
            return []
        pair, self.waiting[0] = (self.waiting[0], row), None
        return [pair]

    def end(self) -> list[Any]:
        return []


class InArray(InSlots):
    """In an array, with a number that says how many there are."""

    def __init__(self) -> None:
        self.values, self.count = torch.zeros(3), 0

    def feed(self, row: Any) -> list[Any]:
        self.values[self.count] = row["class"] + 1
        self.count += 1
        if self.count < 3:
            return []
        self.count = 0
        return [self.values.clone()]


@pytest.mark.parametrize(("kind", "name"), [(InSlots, "waiting"), (InArray, "values, count")])
def test_a_transform_that_keeps_rows_in_fixed_slots_has_to_say_which(kind: Any, name: str) -> None:
    """Else a resume loses them."""
    with pytest.raises(TypeError, match=rf"{kind.__name__} changed {name}, which a"):
        open_lane(Rows([9, 9], 5), kind()).take()


def test_buckets_may_leave_out_what_fills_no_microbatch() -> None:
    buckets = resize(Buckets("class", drop_last=True), 3)
    rows = [{"class": n % 2, "n": n} for n in range(11)]
    given = [out for row in rows for out in buckets.feed(row)] + buckets.end()
    assert [row["n"] for row in given if row is not CUT] == [0, 2, 4, 1, 3, 5, 6, 8, 10]
    assert vars(buckets)["_num_dropped"] == 2


def test_pack_cuts_labels_alike_and_tells_documents_apart() -> None:
    pack = Pack(4, key="tokens", labels="targets", pad=9)
    rows = [*pack.feed({"tokens": [1, 2, 3], "targets": [-100, 5, 6]})]
    rows += pack.feed({"tokens": torch.tensor([4, 5, 6]), "targets": [7, 8, 9]})
    rows += pack.end()
    assert [row["tokens"].tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 9, 9]]
    assert [row["labels"].tolist() for row in rows] == [[-100, 5, 6, 7], [8, 9, -100, -100]]
    assert [row["position_ids"].tolist() for row in rows] == [[0, 1, 2, 0], [0, 1, 0, 0]]
    assert [row["document_ids"].tolist() for row in rows] == [[0, 0, 0, 1], [0, 0, -1, -1]]
    with pytest.raises(ValueError, match=r"2 tokens in 'tokens', but 1 label in 'targets'"):
        pack.feed({"tokens": [1, 2], "targets": [1]})


def test_whole_documents_leave_little_padding() -> None:
    chance, pack = random.Random(0), Pack(512, split=False, pad=0)
    documents = [[1] * chance.randint(1, 600) for _ in range(2000)]
    rows = [row for tokens in documents for row in pack.feed({"input_ids": tokens})] + pack.end()
    assert sum(map(len, documents)) == sum(int((row["document_ids"] >= 0).sum()) for row in rows)
    assert len(rows) * 512 < 1.05 * sum(map(len, documents))
    with pytest.raises(ValueError, match="Set pad="):
        Pack(512, split=False)


def test_a_rank_that_has_not_seen_a_lanes_end_does_not_take_it_for_a_change() -> None:
    """In a mixture a microbatch may come back to a lane that has ended in another rank's hands."""
    data = Data([[8]], 1, 2)
    opening = data.begin(0).opening(0)
    first, other = (BlockReader(data.streams, 3, list) for _ in range(2))
    assert first[BlockRequest(0, opening, 0)].request.num_samples == 2
    answers = [other[BlockRequest(0, opening, block, look=1)].request for block in range(4)]
    assert (answers[-1].num_samples, answers[-1].blocks_left) == (2, 0)
    ended = opening._replace(state=answers[-1].state)
    answer = first[BlockRequest(0, ended, 4, look=1)].request
    assert (answer.num_samples, answer.state, answer.changes) == (0, ended.state, ())
