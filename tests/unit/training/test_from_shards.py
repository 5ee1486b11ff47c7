"""`ElasticLoader.from_shards` without lengths: rows that are counted while they are read."""

from __future__ import annotations

import errno
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.errors import CheckpointError
from anyrank.training.streams import workers

pytestmark = [
    # Workers on a machine with one core, and from Python 3.12 on.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

NET = nn.Linear(1, 1)
SIZES = {"a": 7, "b": 0, "c": 30, "d": 3, "e": 12, "f": 5, "g": 60, "h": 1, "i": 1}
ALL = sorted((shard, row) for shard, size in SIZES.items() for row in range(size))


def read(shard: str) -> Iterator[Any]:
    """Rows that say who they are, and draw; which they are depends on a draw before, too."""
    shift = random.random()
    for number in range(SIZES[shard]):
        yield shard, number, shift + random.random() + float(torch.rand(()))


def mark(rows: list[Any]) -> list[Any]:
    """A collate_fn that draws."""
    return [*rows, random.random()]


def make(shards: Any = tuple(SIZES), function: Any = read, **options: Any) -> anyrank.ElasticLoader:
    given: dict[str, Any] = {"global_batch": 12, "microbatch": 3, "seed": 3, "collate_fn": mark}
    return anyrank.ElasticLoader.from_shards(list(shards), function, **given | options)


def planned() -> anyrank.ElasticLoader:
    return anyrank.ElasticLoader(list(range(20)), global_batch=6, microbatch=2)


def run(loader: anyrank.ElasticLoader, stop: int = 10**9) -> list[tuple[int, Any, float]]:
    """(step, batch, number drawn) of each microbatch of a pass, the first `stop` steps of it."""
    seen: list[tuple[int, Any, float]] = []
    for step in loader:
        seen += [(step.number, batch, random.random()) for batch in step.microbatches(NET)]
        loader.commit()
        if loader.step >= stop:
            break
    return seen


def rows_of(seen: list[tuple[int, Any, float]]) -> list[Any]:
    return sorted(row[:2] for _, batch, _ in seen for row in batch[:-1])


def test_an_epoch_has_every_row_once_and_the_next_another_order() -> None:
    loader = make()
    first, second = run(loader), run(loader)
    assert rows_of(first) == rows_of(second) == ALL
    assert [batch for _, batch, _ in first] != [batch for _, batch, _ in second]
    assert [verdict.samples for verdict in loader.receipts] == [len(ALL)] * 2
    assert loader.receipts[0].verdict.startswith(
        "each row read was used once: 119 rows in 9 shards"
    )
    assert rows_of(run(make(shuffle=False)))[:1] == [("a", 0)]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 3, "prefetch_factor": 5},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 5])
def test_workers_change_nothing(options: dict[str, Any], window: int | None) -> None:
    plain, other = make(window=window), make(window=window, **options)
    for _ in range(2):
        assert run(other) == run(plain)
    assert other.state_dict() == plain.state_dict()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_resume_goes_on_with_the_same_rows_and_numbers(
    window: int | None, num_workers: int
) -> None:
    expected = run(make(window=window))
    steps = max(step for step, _, _ in expected) + 1
    for stop in range(1, steps, 1 if num_workers == 0 else 6):
        loader = make(window=window, num_workers=num_workers)
        seen = run(loader, stop)
        state = json.loads(json.dumps(loader.state_dict()))
        assert len(json.dumps(state)) < 1000 + 100 * 4
        resumed = make(window=window)
        resumed.load_state_dict(state)
        seen += run(resumed)
        assert seen == expected
        assert resumed.receipts[0].verdict.startswith(
            "each row read was used once: 119 rows in 9 shards"
        )


class Drawn:
    """Shards that draw when they are opened, and for rows in batches, as a map of batches does."""

    num_shards = 4

    def shard(self, *, num_shards: int, index: int) -> Iterator[Any]:
        shift = random.random()
        rows = range(index, 101, num_shards)
        for start in range(0, len(rows), 7):
            drawn = [random.random() for _ in rows[start : start + 7]]
            if random.random() < 0.9:  # as a filter that draws
                yield from ((n, shift + x) for n, x in zip(rows[start:], drawn, strict=False))


class Skipping(Drawn):
    """As one of Hugging Face: its part can skip, and draws for what it skips."""

    def shard(self, *, num_shards: int, index: int) -> Any:
        return Part([*super().shard(num_shards=num_shards, index=index)])


class Part:
    def __init__(self, rows: list[Any], first: int = 0) -> None:
        self.rows, self.first = rows, first

    def skip(self, count: int) -> Part:
        return Part(self.rows, count)

    def __iter__(self) -> Iterator[Any]:
        return ((*row, random.random()) for row in self.rows)


def read_from(shard: str, start: int = 0) -> Iterator[Any]:
    """As `read`, from a row on."""
    for number in range(start, SIZES[shard]):
        yield shard, number, random.random() + float(torch.rand(()))


def make_drawing(kind: str) -> anyrank.ElasticLoader:
    if kind in ("drawn", "skipping"):
        given: dict[str, Any] = {"global_batch": 12, "microbatch": 3, "collate_fn": mark}
        dataset = Drawn() if kind == "drawn" else Skipping()
        return anyrank.ElasticLoader.from_iterable(dataset, **given)
    function = read_from if "start" in kind else read
    return make(function=function, lengths=[*SIZES.values()] if "lengths" in kind else None)


@pytest.mark.parametrize("kind", ["drawn", "skipping", "start", "lengths", "lengths, start"])
def test_what_is_skipped_changes_no_random_number(kind: str) -> None:
    """Neither by a resume after any step, nor where a step is left and comes again."""
    whole = make_drawing(kind)
    expected = run(whole) + run(whole)
    loader, seen, number = make_drawing(kind), list[Any](), 0
    while loader.epoch < 2:
        number += 1
        for step in loader:
            next(iter(step.microbatches(NET)))
            break
        seen += run(loader, number)
        state = json.loads(json.dumps(loader.state_dict()))
        loader = make_drawing(kind)
        loader.load_state_dict(state)
    assert seen == expected


def test_a_resume_begins_at_a_row_where_read_takes_start() -> None:
    begun: list[tuple[str, int]] = []

    def noted(shard: str, start: int = 0) -> Iterator[Any]:
        begun.append((shard, start))
        return read_from(shard, start)

    expected = run(make(function=noted))
    loader = make(function=noted)
    seen = run(loader, 9)
    begun.clear()
    resumed = make(function=noted)
    resumed.load_state_dict(loader.state_dict())
    assert seen + run(resumed) == expected
    assert max(start for _, start in begun) > 0


def test_a_step_that_is_left_comes_again() -> None:
    loader, expected = make(), run(make())
    for step in loader:
        next(iter(step.microbatches(NET)))
        break
    assert run(loader) == expected


def test_a_second_pass_has_the_same_batches() -> None:
    loader = make()
    for step in loader:
        first, second = [*step.microbatches(NET)], [*step.microbatches(NET)]
        assert first == second


def test_what_is_unknown_is_an_error_that_says_so() -> None:
    loader = make()
    with pytest.raises(TypeError, match=r"number of steps per epoch is unknown.*row_counts"):
        len(loader)
    for step in loader:
        with pytest.raises(ValueError, match="its number of samples is not known before"):
            print(step.samples)
        batches = [*step.microbatches(NET)]
        assert step.samples == sum(len(batch) - 1 for batch in batches)


def test_losses_are_weighted_by_the_rows_of_their_microbatches() -> None:
    torch.manual_seed(0)
    net = nn.Linear(1, 1)

    def rows(shard: str) -> Iterator[Any]:
        for number in range(SIZES[shard]):
            yield torch.tensor([ord(shard) - 100.0 + number / 7])

    for step in make(function=rows, collate_fn=torch.stack):
        batches: list[torch.Tensor] = []
        for batch in step.microbatches(net):
            batches.append(batch)
            step.backward(net(batch).square().mean())
        mean = net(torch.cat(batches)).square().mean()
        expected = torch.autograd.grad(mean, net.weight)[0]
        torch.testing.assert_close(net.weight.grad, expected)
        assert step.loss() == pytest.approx(mean.item())
        net.zero_grad()


@pytest.mark.parametrize("sizes", [[1000], [1, 1000, 1], [0, 0, 5, 0], [1] * 50, [3] * 4])
def test_shards_of_any_number_and_size(sizes: list[int]) -> None:
    def rows(shard: int) -> Iterator[Any]:
        for number in range(sizes[shard]):
            yield shard, number

    loader = make(range(len(sizes)), rows)
    expected = sorted((shard, n) for shard, size in enumerate(sizes) for n in range(size))
    assert rows_of(run(loader)) == expected
    assert (loader.epoch, loader.samples) == (1, sum(sizes))


@pytest.mark.parametrize("open_loader", [make, planned])
def test_a_state_after_an_epochs_last_commit_has_its_receipt(open_loader: Any) -> None:
    """As a script takes it that saves after each step, before the loop has found the end."""
    loader = open_loader()
    for step in loader:
        for _ in step.microbatches(NET):
            pass
        loader.commit()
        if loader.epoch:
            break
    assert loader.receipts == []  # the ranks have not compared it yet
    again = open_loader()
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    run(loader)
    run(again)
    assert [verdict.epoch for verdict in again.receipts] == [0, 1]
    assert again.receipts == loader.receipts


def test_a_receipt_counts_one_row() -> None:
    loader = make("h")
    run(loader)
    assert loader.receipts[0].verdict == "each row read was used once: 1 row in 1 shard"


def test_shards_without_a_row_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"none of the 9 shards has a row.*split_by_node"):
        run(make(function=lambda _: iter(())))
    with pytest.raises(ValueError, match="shards= is empty"):
        make([])


def test_what_read_raises_names_shard_row_and_lane() -> None:
    def failing(shard: str) -> Iterator[Any]:
        for number in range(SIZES[shard]):
            if (shard, number) == ("c", 13):
                raise OSError("no such block")
            yield shard, number

    with pytest.raises(OSError, match="no such block") as caught:
        run(make(function=failing))
    assert "shard 'c' (number 2), rows from 12 on, epoch 0, lane " in caught.value.__notes__[0]


def test_a_shard_with_other_rows_in_a_resume_is_noticed() -> None:
    loader = make()
    run(loader, 6)
    before = dict(SIZES)
    try:
        SIZES["g"] = 5
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        with pytest.raises(CheckpointError, match=r"shard 'g' \(number 6\)"):
            run(resumed)
    finally:
        SIZES.update(before)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, "a"), (2, "a")),
        ({"text": "a" * 99}, {"text": "a" * 50 + "b" + "a" * 48}),
        ([1] * 20 + [2], [1] * 20 + [3]),
        (torch.zeros(3, 4), torch.ones(3, 4)),
        (torch.zeros(3, 4), torch.zeros(4, 3)),
        ({"x": [b"abc"]}, {"x": [b"abd"]}),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shard_with_other_rows_of_the_same_number_is_told_of(
    before: Any, after: Any, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def rows(value: Any) -> Any:
        return lambda shard: iter([value] * SIZES[shard])

    loader = make(function=rows(before), collate_fn=list)
    run(loader, 6)
    resumed = make(function=rows(before), collate_fn=list, num_workers=num_workers)
    resumed.load_state_dict(loader.state_dict())
    run(resumed)
    assert resumed.notes == []
    resumed = make(function=rows(after), collate_fn=list, num_workers=num_workers)
    resumed.load_state_dict(loader.state_dict())
    run(resumed)
    assert any("shard 'g' (number 6): rows " in note for note in resumed.notes)
    assert "differ from those read earlier in this run" in caplog.text


def test_a_resume_with_other_shards_says_which() -> None:
    loader = make()
    run(loader, 3)
    state = loader.state_dict()
    for shards, text in (
        ("abcdefgh", "the saved run has 9 shards, but 8 were passed"),
        (
            "abXdefghi",
            r"shards 2 to 2 differ from those of the saved run: 'X' \(number 2\) were passed",
        ),
    ):
        with pytest.raises(CheckpointError, match=text):
            make(shards).load_state_dict(state)
    for options in ({"window": 3}, {"seed": 4}, {"transform": anyrank.Pack(4)}, {"shuffle": False}):
        with pytest.raises(CheckpointError, match="ElasticLoader: the saved run has"):
            make(**options).load_state_dict(state)
    with pytest.raises(
        CheckpointError, match=r"shards with lengths=, but this loader has a stream\. Pass the"
    ):
        make().load_state_dict(make(lengths=[*SIZES.values()]).state_dict())
    with pytest.raises(CheckpointError, match="ElasticLoader: the saved run has"):
        make(lengths=[*SIZES.values()]).load_state_dict(state)


def test_shards_that_are_appended_come_with_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader, expected = make(), run(make())
    seen = run(loader, 3)
    monkeypatch.setitem(SIZES, "j", 8)
    resumed = make([*SIZES])
    resumed.load_state_dict(loader.state_dict())
    assert resumed.notes == ["1 shard more than the 9 of the saved run: used from epoch 1 on"]
    assert seen + run(resumed) == expected
    assert len(rows_of(run(resumed))) == len(ALL) + 8


def test_pack_gives_every_token_once() -> None:
    def documents(shard: str) -> Iterator[Any]:
        for number in range(SIZES[shard]):
            yield {"input_ids": [ord(shard) * 100 + number] * (number % 11)}

    options: dict[str, Any] = {"function": documents, "collate_fn": None}
    loader = make(transform=anyrank.Pack(16, eos=0), **options)
    expected = Counter(t for s in SIZES for row in documents(s) for t in row["input_ids"])

    def pack(loader: anyrank.ElasticLoader, stop: int = 10**9) -> list[torch.Tensor]:
        return [batch["input_ids"] for _, batch, _ in run(loader, stop)]

    rows = pack(loader)
    tokens = Counter(int(t) for batch in rows for t in batch.flatten() if t)
    assert tokens == expected
    ends = sum(1 for s in SIZES for row in documents(s) if row["input_ids"])
    text = f"119 rows in 9 shards, {sum(expected.values()) + ends:,} tokens"
    assert text in loader.receipts[0].verdict
    for stop in (1, 2, 3):
        begun = make(transform=anyrank.Pack(16, eos=0), num_workers=1, **options)
        seen = pack(begun, stop)
        resumed = make(transform=anyrank.Pack(16, eos=0), **options)
        resumed.load_state_dict(begun.state_dict())
        seen += pack(resumed)
        assert all(map(torch.equal, seen, rows))


def test_buckets_give_microbatches_of_one_bucket() -> None:
    seen = run(make(transform=anyrank.Buckets(lambda row: row[1] % 4, patience=20)))
    assert rows_of(seen) == ALL
    assert all(len({row[1] % 4 for row in batch[:-1]}) == 1 for _, batch, _ in seen)


@pytest.mark.parametrize(
    "bucket",
    [lambda row: row[1] % 4, lambda _: random.randrange(3)],
    ids=["of the row", "drawn"],
)
def test_buckets_are_the_same_after_a_resume(bucket: Any) -> None:
    expected = run(make(transform=anyrank.Buckets(bucket, patience=20)))
    for stop in range(1, expected[-1][0], 3):
        loader = make(transform=anyrank.Buckets(bucket, patience=20))
        seen = run(loader, stop)
        resumed = make(transform=anyrank.Buckets(bucket, patience=20))
        resumed.load_state_dict(loader.state_dict())
        assert seen + run(resumed) == expected


def test_there_may_be_many_buckets() -> None:
    """Each of which waits: what a lane knows of them is no part of its state."""
    options: dict[str, Any] = {
        "function": lambda _: iter([(n * 7 % 600, n) for n in range(900)]),
        "transform": anyrank.Buckets(lambda row: row[0], patience=800),
        "global_batch": 4,
        "microbatch": 2,
    }
    loader = make("a", **options)
    seen = run(loader, 120)
    resumed = make("a", **options)
    resumed.load_state_dict(loader.state_dict())
    seen += run(resumed)
    assert seen == run(make("a", **options))
    assert len(rows_of(seen)) == 900


def test_a_transform_has_to_be_pushed_to() -> None:
    with pytest.raises(TypeError, match="a generator cannot continue"):
        make(transform=lambda rows: rows)
    with pytest.raises(ValueError, match="transform= cannot be combined with lengths="):
        make(transform=anyrank.Pack(4), lengths=[*SIZES.values()])


def test_no_row_is_dropped() -> None:
    with pytest.raises(ValueError, match="tail='drop' is not supported for streams"):
        make(tail="drop")


@pytest.mark.parametrize(
    ("name", "answer", "text"),
    [
        ("feed", None, r"raised by Own.feed, shard .* row \d+, epoch 0, lane "),
        ("end", None, "raised by Own.end, lane "),
        ("held", [99], r"this Own was fed rows, or its held\(\) returns some, before the loader"),
        ("state_dict", {"x": torch.ones(1)}, r"Own.state_dict\(\) does not return JSON"),
        ("state_dict", [{"a": {3: 1}}], r"Own.state_dict\(\) has the key 3, which a resume would"),
    ],
)
def test_what_is_wrong_with_a_transform_names_it(name: str, answer: Any, text: str) -> None:
    class Own:
        def feed(self, row: Any) -> Any:
            return [row]

        def end(self) -> Any:
            return []

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(Own, name, lambda *_: answer, raising=False)
    with pytest.raises((TypeError, ValueError)) as caught:
        run(make(transform=Own()))
    notes = getattr(caught.value, "__notes__", [])
    assert re.search(text, " ".join([str(caught.value), *notes]))


def test_rows_that_are_held_are_numbered_from_0_in_each_object() -> None:
    class Own:
        number = 5  # as one that restores its counter

        def feed(self, row: Any) -> Any:
            self.number += 1
            return [row]

        def end(self) -> Any:
            return []

        def held(self) -> list[int]:
            return [self.number] * (self.number > 5)

    with pytest.raises(ValueError, match=r"Own.held\(\) returned \[\d+\]: .* from 0 in each new"):
        run(make(transform=Own()))


def test_a_transform_that_was_tried_by_hand_is_refused() -> None:
    pack, whole = anyrank.Pack(4), anyrank.Pack(4, split=False, pad=0)
    pack.feed({"input_ids": [1, 2, 3, 4]})  # holds nothing
    whole.feed({"input_ids": [1, 2]})
    buckets = anyrank.Buckets("b")
    buckets.feed({"b": 1})
    for transform in (pack, whole, buckets):
        with pytest.raises(ValueError, match=r"was fed rows, or its held.* Pass a new one"):
            make(transform=transform)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ([1, 2], r"each row must be a dict with 'input_ids', got a list, \[1, 2\]"),
        ({"text": "abc"}, "a row has no 'input_ids', but 'text'. Set key= to its key"),
        ({}, "a row has no 'input_ids', but nothing"),
        ({"input_ids": "abc"}, "'input_ids' of a row must be a list of ints, got a str, 'abc'"),
        ({"input_ids": None}, "'input_ids' of a row must be a list of ints, got a NoneType, None"),
        ({"input_ids": [[1], [2, 3]]}, "must be a list of ints"),
        ({"input_ids": [2**70]}, "must be a list of ints"),
        ({"input_ids": [1.5]}, r"of a row has shape \[1\] and dtype torch.float32"),
        ({"input_ids": [[1, 2]]}, r"of a row has shape \[1, 2\] and dtype torch.int64"),
        ({"input_ids": 7}, r"of a row has shape \[\] and dtype torch.int64"),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 5])
def test_a_row_that_pack_cannot_take_is_named(row: Any, text: str, window: int | None) -> None:
    def documents(shard: str) -> Iterator[Any]:
        for number in range(SIZES[shard]):
            yield row if (shard, number) == ("c", 13) else {"input_ids": [number]}

    loader = make(function=documents, transform=anyrank.Pack(4), window=window, collate_fn=None)
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        run(loader)
    where = "raised by Pack.feed, shard 'c' (number 2), row 13, epoch 0, lane "
    assert caught.value.__notes__[0].startswith(where)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("ratio", "each row must be a dict with 'ratio', got a tuple, "),
        (lambda row: [row], r"Buckets\(key\) returned a list, .*, which cannot identify a bucket"),
        (lambda row: float("nan"), "returned a float, nan, which is not equal to itself"),
        (
            lambda row: torch.ones(2),
            "returned a Tensor, .*, which is not equal to itself .* or is a tensor",
        ),
        (lambda row: 1 / 0, "division by zero"),
    ],
    ids=["row", "list", "nan", "tensor", "raises"],
)
def test_a_row_without_a_bucket_is_named(key: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError, ZeroDivisionError), match=text) as caught:
        run(make(shards=["a"], transform=anyrank.Buckets(key)))
    where = "raised by Buckets.feed, shard 'a' (number 0), row 0, epoch 0, lane "
    assert caught.value.__notes__[0].startswith(where)


def test_rows_that_make_no_batch_are_named() -> None:
    def uneven(shard: str) -> Iterator[Any]:
        for number in range(SIZES[shard]):
            yield torch.ones(1 + number % 2)

    with pytest.raises(RuntimeError, match="equal size") as caught:
        run(make(shards=["a"], function=uneven, collate_fn=None))
    assert "raised by collate_fn, shard 'a' (number 0), rows from 0 on" in caught.value.__notes__[0]


def test_empty_documents_give_nothing() -> None:
    pack = anyrank.Pack(2, eos=0)
    assert [pack.feed({"input_ids": []}), pack.feed({"input_ids": torch.ones(0)}), pack.end()] == [
        []
    ] * 3


class Late:
    """Holds three rows, and draws for each row and at the end."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Any]] = []
        self.fed = 0

    def feed(self, row: Any) -> list[Any]:
        self.rows.append((self.fed, (*row, random.random())))
        self.fed += 1
        return [self.rows.pop(0)[1]] if len(self.rows) > 3 else []

    def end(self) -> list[Any]:
        return [(*row, random.random()) for _, row in self.rows]

    def held(self) -> list[int]:
        return [number for number, _ in self.rows]


class Crops(anyrank.Pack):
    """Tokenizes and crops rows in a feed of its own."""

    def feed(self, row: Any) -> list[Any]:
        return super().feed({"input_ids": [row[1]] * random.randint(0, 5)})


@pytest.mark.parametrize("transform", [Late(), Crops(4)], ids=["late", "crops"])
def test_a_transform_may_draw(transform: Any) -> None:
    options: dict[str, Any] = {"transform": transform, "collate_fn": repr}
    expected = run(make(**options))
    for stop in range(1, expected[-1][0], 3):
        loader = make(**options)
        seen = run(loader, stop)
        resumed = make(**options)
        resumed.load_state_dict(loader.state_dict())
        assert seen + run(resumed) == expected


@pytest.mark.parametrize("lengths", [None, [*SIZES.values()]], ids=["streams", "planned"])
def test_a_read_may_draw_for_the_rows_before_its_start(lengths: list[int] | None) -> None:
    def drawing(shard: str, start: int = 0) -> Iterator[Any]:
        for number in range(SIZES[shard]):
            drawn = random.random()
            if number >= start:
                yield shard, number, drawn

    options: dict[str, Any] = {"function": drawing, "lengths": lengths}
    expected = run(make(**options))
    for stop in (2, 5, 8):
        loader = make(**options)
        seen = run(loader, stop)
        resumed = make(**options)
        resumed.load_state_dict(loader.state_dict())
        assert seen + run(resumed) == expected


def test_a_transform_that_keeps_rows_has_to_say_which() -> None:
    """Else a resume loses them, and says "exactly once"."""

    class Pairs:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def feed(self, row: Any) -> list[Any]:
            self.rows.append(row)
            if len(self.rows) < 12:  # two blocks: it keeps nothing when a microbatch is full
                return []
            pair, self.rows = tuple(self.rows), []
            return [pair]

        def end(self) -> list[Any]:
            return [tuple(self.rows)] if self.rows else []

    with pytest.raises(TypeError, match=r"Pairs changed rows, which.*Implement held\(\)"):
        run(make(transform=Pairs()))


def test_row_counts_name_the_file_and_count_anew_what_is_damaged(tmp_path: Path) -> None:
    lines, kept = tmp_path / "a.jsonl", tmp_path / "kept"
    lines.write_text("1\n2\n")
    for damaged in ('{"a": [1,', "[1]", *(json.dumps({str(lines): row}) for row in (5, [4], "x"))):
        kept.write_text(damaged)
        assert anyrank.row_counts([lines], kept_in=kept) == [2]
        assert anyrank.row_counts([lines], kept_in=kept) == [2]
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(OSError, match="directory") as caught:
        anyrank.row_counts([lines, tmp_path / "b.jsonl"])
    assert caught.value.__notes__ == [f"raised by row_counts, {tmp_path / 'b.jsonl'}"]
    with pytest.raises(TypeError, match=r"paths='a.jsonl': expected a list of paths, got str"):
        anyrank.row_counts("a.jsonl")


def test_a_transform_without_a_sample_is_told_of() -> None:
    class Nothing:
        def feed(self, row: Any) -> list[Any]:
            return []

        def end(self) -> list[Any]:
            return []

    with pytest.raises(CheckpointError, match="Nothing made no samples from 119 rows"):
        run(make(transform=Nothing()))


def test_a_bucket_may_be_a_tensor_of_one_value() -> None:
    def rows(shard: str) -> Iterator[Any]:
        yield from torch.arange(SIZES[shard])

    loader = make(function=rows, transform=anyrank.Buckets(lambda row: row > 3), collate_fn=None)
    sizes = [len(batch) for _, batch, _ in run(loader)]
    assert sum(sizes) == len(ALL)
    assert len(sizes) < 60


def read_with(signature: str) -> Any:
    return eval(f"lambda {signature}: iter(range(3))")  # noqa: S307 - a signature of the test's own


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"function": read_with("s, start")}, "read() has an argument start, but is called"),
        (
            {"function": read_with("s, start=0, /")},
            "read() has an argument start=0, but is called",
        ),
        ({"function": read_with("s, *, start")}, "read() has an argument start, but is called"),
        ({"transform": anyrank.Pack}, "transform=: pass an instance, not the class Pack"),
        ({"on_batch_change": "rescale"}, "on_batch_change='rescale': a stream cannot be resumed"),
        (
            {"on_batch_change": "rescale", "lengths": [*SIZES.values()]},
            "on_batch_change='rescale': a stream cannot be resumed",
        ),
    ],
    ids=str,
)
def test_what_could_only_fail_later_is_refused_at_once(options: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        make(**options)


class Tagged:
    """A transform with settings, which gives samples for more than a microbatch at its end."""

    def __init__(self, tags: Any) -> None:
        self.tags = tags

    def feed(self, row: Any) -> list[Any]:
        return [row]

    def end(self) -> list[Any]:
        return [("end", random.random()) for _ in range(5)]


@pytest.mark.parametrize("setting", [torch.tensor(1), dict, torch.utils.data.IterableDataset])
def test_settings_that_have_no_length_are_no_rows(setting: Any) -> None:
    assert len(rows_of(run(make(transform=Tagged(setting), collate_fn=mark)))) == len(ALL) + 4 * 5


@pytest.mark.parametrize("other", [["a", "c"], [*"abc"], {"a": 1}, 1])
def test_settings_of_a_transform_that_are_lists_are_compared(other: Any) -> None:
    loader = make(transform=Tagged(["a", "b"]))
    run(loader, 2)
    make(transform=Tagged(["a", "b"])).load_state_dict(loader.state_dict())
    with pytest.raises(CheckpointError, match=r"transform|Tagged"):
        make(transform=Tagged(other)).load_state_dict(loader.state_dict())


def test_what_end_draws_is_the_same_through_resumes_of_later_epochs() -> None:
    def make_few() -> anyrank.ElasticLoader:
        return make("ad", transform=Tagged(0))

    whole = make_few()
    expected = run(whole) + run(whole)
    ends = [row for _, batch, _ in expected for row in batch[:-1] if row[0] == "end"]
    assert len({*ends}) == 2 * 2 * 5
    loader, seen = make_few(), list[Any]()
    while loader.epoch < 2:
        seen += run(loader, loader.step + 1)
        state = json.loads(json.dumps(loader.state_dict()))
        loader = make_few()
        loader.load_state_dict(state)
    assert seen == expected


def test_tokens_that_are_no_int64_are_an_error() -> None:
    np = pytest.importorskip("numpy")
    for tokens, kind in (([1.5, 2], ValueError), ([2**63], TypeError)):
        with pytest.raises(kind, match="'input_ids' of a row"):
            anyrank.Pack(4).feed({"input_ids": tokens})
    with pytest.raises(ValueError, match=r"a token of 2\*\*63 or more"):
        anyrank.Pack(4).feed({"input_ids": np.array([1, 2**63], dtype=np.uint64)})


def test_an_endless_stream_has_full_steps_and_no_epochs(tmp_path: Path) -> None:
    def ones(shard: str) -> Iterator[Any]:
        yield from [(shard, number) for number in range(4)]

    loader = make("abcdefgh", ones, global_batch=12, microbatch=2, endless=True, collate_fn=list)
    state = anyrank.TrainState(nn.Linear(1, 1), data=loader)
    with anyrank.Checkpoints(tmp_path, state) as ckpts:
        with pytest.raises(ValueError, match="there are no epochs; pass until="):
            ckpts.steps(epochs=1)
        seen = Counter[str]()
        for step in ckpts.steps(until=16):
            for batch in step.microbatches(NET):
                seen.update(shard for shard, _ in batch)
            assert step.samples == 12
    assert {*seen} == {*"abcdefgh"}
    assert (loader.epoch, loader.receipts) == (0, [])


def test_one_rank_reads_each_row_once() -> None:
    """Also where the lanes end at different steps, so that microbatches have no row."""
    opened, rows = Counter[str](), Counter[Any]()

    def counting(shard: str) -> Iterator[Any]:
        opened[shard] += 1
        for row in read(shard):
            rows[row[:2]] += 1
            yield row

    assert rows_of(run(make(function=counting))) == ALL
    assert {*opened.values(), *rows.values()} == {1}


class Held(list[Any]):
    """Data that is too large to be copied for each lane."""

    def kind_of(self, row: Any) -> int:
        return row % 3

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("copied")


def test_what_a_key_belongs_to_is_not_copied() -> None:
    data = Held(range(30))
    loader = anyrank.ElasticLoader.from_shards(
        [data[:10], data[10:]],
        iter,
        transform=anyrank.Buckets(data.kind_of),
        global_batch=6,
        microbatch=2,
    )
    batches = [batch.tolist() for _, batch, _ in run(loader)]
    assert sorted(row for batch in batches for row in batch) == [*range(30)]
    assert all(len({row % 3 for row in batch}) == 1 for batch in batches)


@pytest.mark.parametrize("lengths", [None, [*SIZES.values()]], ids=["streams", "planned"])
def test_a_read_may_draw_before_its_first_row(lengths: list[int] | None) -> None:
    def drawing(shard: str, start: int = 0) -> Iterator[Any]:
        flip = random.random()
        for number in range(start, SIZES[shard]):
            yield shard, number, flip

    options: dict[str, Any] = {"function": drawing, "lengths": lengths}
    expected = run(make(**options))
    for stop in (2, 5, 8):
        loader = make(**options)
        seen = run(loader, stop)
        resumed = make(**options)
        resumed.load_state_dict(loader.state_dict())
        assert seen + run(resumed) == expected
        assert not resumed.notes


def test_pack_makes_rows_on_the_cpu_under_any_default_device() -> None:
    with torch.device("meta"):
        (row,) = anyrank.Pack(3, eos=0, pad=9).feed({"input_ids": [1, 2]})
    assert row["input_ids"].tolist() == [1, 2, 0]


class Filtered(anyrank.Pack):
    """Leaves out rows that were packed, and a column of the others."""

    def feed(self, row: Any) -> list[Any]:
        rows = super().feed({"input_ids": [row[1]] * 3})
        return [{"input_ids": row["input_ids"]} for row in rows if row["input_ids"][0] % 2]


def test_a_subclass_of_pack_may_leave_out_rows_that_it_made() -> None:
    loader = make(transform=Filtered(4, pad=0), collate_fn=None)
    assert run(loader)
    assert loader.receipts[0].verdict == "each row read was used once: 119 rows in 9 shards"


def test_a_step_that_cannot_count_does_not_count_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make(transform=anyrank.Pack(4), function=tokens_of, collate_fn=None)
    monkeypatch.setattr(anyrank.Pack, "_units_of", lambda *_: 1)
    with pytest.raises(CheckpointError, match="tokens were read"):
        run(loader)
    before = loader.step, loader.samples, loader.consumed
    with pytest.raises(CheckpointError, match="tokens were read"):
        loader.commit()
    assert (loader.step, loader.samples, loader.consumed) == before


def tokens_of(shard: str) -> Iterator[Any]:
    return ({"input_ids": [1] * 5} for _ in range(SIZES[shard]))


def test_a_state_of_many_lanes_takes_no_memory() -> None:
    loader = make("ab", endless=True)
    state = loader.state_dict()
    state["deal"]["sizes"] = [10**18]
    with pytest.raises(CheckpointError, match="the lanes do not match the shards"):
        loader.load_state_dict(state)


class OpenFiles:
    """A `read` that knows how many shards are open, and how often each was opened."""

    def __init__(self) -> None:
        self.now, self.most, self.opened = 0, 0, Counter[int]()

    def read(self, shard: int) -> Iterator[Any]:
        return self.read_from(shard)

    def read_from(self, shard: int, start: int = 0) -> Iterator[Any]:
        self.opened[shard] += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for number in range(start, 50):
                yield shard, number, random.random()
        finally:
            self.now -= 1


def test_an_endless_stream_keeps_few_shards_open_if_read_takes_start() -> None:
    files, start_files = OpenFiles(), OpenFiles()
    options: dict[str, Any] = {"endless": True, "global_batch": 160, "microbatch": 1}
    expected = run(make(range(300), files.read, **options), 6)
    assert run(make(range(300), start_files.read_from, **options), 6) == expected
    assert (files.most, start_files.most) == (300, workers.MOST_OPEN + 1)


def test_too_many_open_shards_say_what_helps() -> None:
    def limited(shard: int) -> Iterator[Any]:
        if shard == 7:
            raise OSError(errno.EMFILE, "Too many open files")
        yield from range(50)

    with pytest.raises(OSError, match="Too many") as caught:
        run(make(range(8), limited, endless=True, shuffle=False, collate_fn=repr), 8)
    assert caught.value.__notes__[-1].startswith("7 shards are open in this process. Accept start=")
