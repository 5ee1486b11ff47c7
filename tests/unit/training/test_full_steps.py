"""Promise 7, of streams: no step is without a row, whatever ends, and nothing waits for ever for
samples that a shard does not give.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.errors import CheckpointError
from anyrank.training.streams.deal import Deal

NET = nn.Linear(1, 1)


class Rows:
    """Shards of so many rows, each a dict that knows its shard."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.num_shards = sizes, len(sizes)

    def shard(self, *, num_shards: int, index: int) -> Iterator[Any]:
        for number in range(index, len(self.sizes), num_shards):
            for row in range(self.sizes[number]):
                yield {"id": (number, row), "b": row % 3, "input_ids": [1] * (row % 4)}


class Never:
    """A transform without samples."""

    def feed(self, row: Any) -> list[Any]:
        return []

    def end(self) -> list[Any]:
        return []


class Cuts(Never):
    def feed(self, row: Any) -> list[Any]:
        return [anyrank.CUT]


def make(data: Any, **options: Any) -> anyrank.ElasticLoader:
    given: dict[str, Any] = {"global_batch": 8, "microbatch": 2, "collate_fn": list}
    return anyrank.ElasticLoader.from_iterable(data, **given | options)


def run(loader: anyrank.ElasticLoader, steps: int = 10**9) -> list[int]:
    """The number of samples of each step, up to the epoch's end or a number of steps."""
    samples: list[int] = []
    for step in loader:
        found = 0
        for batch in step.microbatches(NET):
            found += 0 if step.is_copy else len(batch)
            step.backward(NET(torch.ones(1, 1)).mean())
        assert (found, step.loss() != 0) == (step.samples, True)
        samples.append(found)
        loader.commit()
        if len(samples) == steps:
            break
    return samples


@pytest.mark.parametrize("until", ["first", "all"])
def test_no_step_of_a_mixture_is_without_a_row(until: str) -> None:
    for seed in range(60):
        data = {"a": Rows(30, *[0] * (seed % 5)), "b": Rows(6, *[0] * (seed % 3), 2)}
        options: dict[str, Any] = {"mix": {"a": 1, "b": 1}, "until": until, "seed": seed}
        for sizes in ({"global_batch": 4, "microbatch": 2}, {"global_batch": 3, "microbatch": 1}):
            loader = make(data, **options, **sizes)
            assert 0 not in run(loader), (seed, sizes)


def test_a_dataset_of_a_mixture_without_a_row_is_named() -> None:
    for name, shards in (("a", Rows(0, 0)), ("b", Rows(0))):
        loader = make({name: shards, "full": Rows(30)}, mix={name: 1, "full": 1})
        text = f"none of the {'2 shards' if name == 'a' else '1 shard'} of {name} has a row"
        with pytest.raises(CheckpointError, match=text):
            run(loader)


def test_a_step_that_may_have_no_row_is_looked_at_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is the same after a resume; a step without a row would do no harm."""
    data = {"a": Rows(*[0] * 9, 30), "b": Rows(*[0] * 9, 30)}
    loaders = {seed: make(data, mix={"a": 1, "b": 1}, seed=seed) for seed in range(9)}
    expected = {seed: run(loader) for seed, loader in loaders.items()}
    for seed, samples in expected.items():
        loader = make(data, mix={"a": 1, "b": 1}, seed=seed)
        seen = run(loader, 1)
        again = make(data, mix={"a": 1, "b": 1}, seed=seed)
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert seen + run(again) == samples

    def is_unsure(*_: Any) -> bool:
        return False

    monkeypatch.setattr(Deal, "is_unsure", is_unsure)
    found = 0
    for seed in range(9):
        for step in make(data, mix={"a": 1, "b": 1}, seed=seed):
            for _ in step.microbatches(NET):
                step.backward(NET(torch.ones(1, 1)).mean())
            found += step.samples == 0
            assert step.samples or (step.loss(), step.rank_loss().item()) == (0.0, 0.0)
    assert found


def test_a_dataset_that_starts_over_gives_full_steps() -> None:
    """Even one with fewer blocks than a step has microbatches."""
    data = {"a": Rows(200), "b": Rows(2, 2, 2)}
    loader = make(data, mix={"a": 1, "b": 1}, until="all")
    samples = run(loader)
    assert sum(number < 8 for number in samples) <= 2  # the end of b, and that of a
    verdict = loader.receipts[0].verdict
    assert verdict.startswith("mixed: each row of a read was used once: 200 rows in 1 shard")
    assert "rows of b, each of them once or more" in verdict


ENDLESS: dict[str, tuple[Any, Any, str]] = {
    "rows without tokens": (Rows(9, 1), anyrank.Pack(4), r"shard '1 of 2' .*Pack made no sample"),
    "buckets that never fill": (
        Rows(50, 50),
        anyrank.Buckets("id", patience=10, drop_last=True),
        "Buckets made no sample",
    ),
    "a filter": (Rows(9), Never(), r"shard '0 of 1' .*Never made no sample"),
    "cuts alone": (Rows(9), Cuts(), "Cuts made no sample"),
    "no rows": (Rows(9, 0), None, r"shard '1 of 2' \(number 1\) has no rows.*Remove the shard"),
    "a mixture": (
        {"a": Rows(9), "b": Rows(9, 1)},
        anyrank.Pack(4),
        r"shard '1 of 2' \(number 1\) of 'b' .*Pack made no sample",
    ),
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_endless_stream_does_not_wait_for_a_shard_without_samples(
    name: str, num_workers: int
) -> None:
    data, transform, text = ENDLESS[name]
    mix = {"mix": {"a": 1, "b": 1}} if isinstance(data, dict) else {}
    loader = make(data, transform=transform, endless=True, num_workers=num_workers, **mix)
    with pytest.raises(CheckpointError, match=text):
        run(loader, 20)


@pytest.mark.parametrize("transform", [anyrank.Pack(40, pad=0), anyrank.Buckets("b", patience=99)])
def test_an_endless_stream_gathers_samples_over_many_passes(transform: Any) -> None:
    """A shard of 3 tokens, or of 2 rows of each bucket, fills a sample in the end."""
    loader = make(Rows(3, 3), transform=transform, endless=True, microbatch=4, global_batch=8)
    assert run(loader, 6) == [8] * 6
    again = make(Rows(3, 3), transform=transform, endless=True, microbatch=4, global_batch=8)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert run(again, 3) == [8] * 3
    assert not again.notes


@pytest.mark.parametrize("options", [{}, {"mix": {"a": 1}, "endless": True}])
def test_until_is_refused_where_it_says_nothing(options: Any) -> None:
    data = {"a": Rows(9)} if options else Rows(9)
    with pytest.raises(ValueError, match="until='all' says when a mixture's epoch ends, but there"):
        make(data, until="all", **options)


@pytest.mark.parametrize(
    ("length", "told"),
    [
        (9, "not all rows: 8 of 9 were read; does read"),
        (4, "too many rows: 8 of 4 were read; is the length"),
    ],
)
def test_a_length_that_is_wrong_is_told(
    length: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Counted(Rows):
        def __len__(self) -> int:
            return length

    loader = make(Counted(5, 3))
    run(loader)
    assert told.startswith(loader.receipts[0].verdict)
    assert told in caplog.text


def test_a_dict_of_splits_is_no_mixture() -> None:
    with pytest.raises(ValueError, match=r"pass mix=.* For one split of a dataset pass only that"):
        make({"train": Rows(9), "test": Rows(3)})


WRONG = [{"x": 1}, "text", b"bytes", torch.ones(2), (1, 2), {1, 2}, None, 3]


@pytest.mark.parametrize("given", WRONG, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("method", ["feed", "end"])
def test_a_transform_that_forgets_its_list_is_told(method: str, given: Any) -> None:
    class Bare(Never):
        pass

    setattr(Bare, method, lambda *_: given)
    text = f"Bare.{method} returned a {type(given).__name__}; it must return a list of samples"
    with pytest.raises(TypeError, match=text):
        run(make(Rows(9), transform=Bare()))


def test_a_transform_may_yield_its_samples() -> None:
    class Yields(Never):
        def feed(self, row: Any) -> Any:
            yield row
            yield row

    assert sum(run(make(Rows(9), transform=Yields()))) == 18


@pytest.mark.parametrize(
    "collate",
    [lambda rows: (row["id"] for row in rows), lambda rows: NET(torch.ones(len(rows), 1))],
    ids=["generator", "graph"],
)
def test_a_batch_that_cannot_be_copied_is_read_again(collate: Any) -> None:
    """For a microbatch without rows, at the end of an epoch."""
    found = 0
    for step in make(Rows(9, 2, 5), collate_fn=collate):
        for batch in step.microbatches(NET):
            found += len([*batch])  # a generator is used up
            step.backward(NET(torch.ones(1, 1)).mean())
    assert found == 16


def test_an_epoch_that_turns_out_to_be_over_has_no_further_step() -> None:
    """A lane that is read for the first time in what would be the last step has no row."""
    for seed in range(60):
        data = {"a": Rows(40), "b": Rows(2, 0)}
        options: dict[str, Any] = {"mix": {"a": 1, "b": 1}, "seed": seed}
        loader = make(data, **options, global_batch=4, microbatch=2)
        samples = run(loader)
        assert 0 not in samples, seed
        assert (loader.epoch, len(loader.receipts), loader.step) == (1, 1, len(samples))
