"""`ElasticLoader.from_shards`: shards that are read in sequence, with the steps of any loader."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import anyrank
from anyrank.training.streams.shards import ShardOrder, Shards

pytestmark = [
    # Workers on a machine with one core, and from Python 3.12 on.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

NET = nn.Linear(1, 1)
LENGTHS = {"a": 9, "b": 0, "c": 3, "d": 14, "e": 5}  # 31 samples


def read(shard: str) -> Iterator[Any]:
    """Samples that say who they are, and draw."""
    random.random()
    for number in range(LENGTHS[shard]):
        yield shard, number, random.random()


def make(**options: Any) -> anyrank.ElasticLoader:
    given: dict[str, Any] = {"global_batch": 6, "microbatch": 2, "seed": 3, "collate_fn": list}
    given |= {"lengths": list(LENGTHS.values()), **options}
    return anyrank.ElasticLoader.from_shards(given.pop("shards", list(LENGTHS)), read, **given)


def run(loader: anyrank.ElasticLoader, stop: int = 10**9) -> list[tuple[int, Any, float]]:
    """(step, batch, number drawn) of each microbatch of a pass, the first `stop` steps of it."""
    seen: list[tuple[int, Any, float]] = []
    for step in loader:
        seen += [(step.number, batch, random.random()) for batch in step.microbatches(NET)]
        loader.commit()
        if step.number + 1 >= stop:
            break
    return seen


def test_an_epoch_has_every_sample_of_every_shard_once() -> None:
    loader = make()
    orders: list[list[Any]] = []
    for _ in range(3):
        orders.append([sample[:2] for _, batch, _ in run(loader) for sample in batch])
        assert sorted(orders[-1]) == [
            (s, i) for s, length in LENGTHS.items() for i in range(length)
        ]
    assert orders[0] != orders[1] != orders[2]
    assert loader.receipts == [(epoch, 31, "exactly once") for epoch in range(3)]


def test_a_lane_is_read_in_sequence_and_opens_a_shard_once() -> None:
    opened: list[str] = []

    def counted(shard: str) -> Iterator[Any]:
        opened.append(shard)
        yield from read(shard)

    loader = make()
    loader._fetcher.dataset.dataset.stream.function = counted
    lanes: dict[int, list[Any]] = {}
    for number, (_, batch, _) in enumerate(run(loader)):
        lanes.setdefault(number % 3, []).extend(sample[:2] for sample in batch)
    for lane in lanes.values():
        breaks = [(a, b) for a, b in pairwise(lane) if b != (a[0], a[1] + 1)]
        assert len(breaks) <= 4
    # Each once, and once more for each of the lanes that begin within a shard
    assert len(opened) <= 4 + 2 + 1


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_no_number(num_workers: int) -> None:
    alone, other = make(), make(num_workers=num_workers)
    for _ in range(2):
        assert run(alone) == run(other)


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_a_loaded_state_goes_on_where_it_was_saved(stop: int) -> None:
    whole, saved, loader = make(), make(), make()
    expected = run(whole) + run(whole)
    first = run(saved, stop)
    loader.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    while loader.epoch < 2:
        first += run(loader)
    assert first == expected
    assert len(json.dumps(saved.state_dict())) < 400


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any),
    num=st.integers(1, 5),
    microbatch=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_every_epoch_is_a_permutation(
    lengths: list[int], num: int, microbatch: int, shuffle: bool
) -> None:
    n = sum(lengths)
    order = ShardOrder(
        n, 1, shuffle, hash(tuple(lengths)), tuple(lengths), num * microbatch, microbatch
    )
    ids = order.ids(2, 0, n)
    assert sorted(ids.tolist()) == list(range(n))
    assert torch.equal(torch.cat([order.ids(2, i, i + 1) for i in range(n)]), ids)


@pytest.mark.parametrize(("name", "message"), [("c", "more than 2"), ("d", "fewer than 15")])
def test_a_shard_of_another_length_is_an_error(name: str, message: str) -> None:
    lengths = LENGTHS | {name: int(message.split()[-1])}
    with pytest.raises(anyrank.CheckpointError, match=f"shard '{name}' has {message} samples"):
        run(make(lengths=list(lengths.values())))


def test_few_shards_stay_open() -> None:
    shards = Shards(list(LENGTHS), read, tuple(LENGTHS.values()))
    shards.max_open = 2
    for sample_id in (0, 9, 12, 26, 1, 13):
        assert (
            shards[sample_id][:2]
            == [(s, i) for s, length in LENGTHS.items() for i in range(length)][sample_id]
        )
        assert len(shards.open) <= 2


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "names": (
        {"shards": list("abcdf")},
        "the order 'shards-v1 .*Pass the saved run's shards and lengths=",
    ),
    "lengths": ({"lengths": [9, 0, 4, 13, 5]}, "the order 'shards-v1 "),
    "shuffle": (
        {"shuffle": False},
        "the saved run has shuffle=True, but this loader has shuffle=False. Set shuffle=True",
    ),
    "batch": ({"global_batch": 12}, r"Set global_batch=6, which works on any number of ranks\.$"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_state_of_other_shards_is_refused(name: str) -> None:
    saved = make()
    run(saved, 2)
    options, message = OTHERS[name]
    with pytest.raises(anyrank.CheckpointError, match=message):
        make(**options).load_state_dict(saved.state_dict())


def test_few_shards_are_opened_at_their_rows(caplog: pytest.LogCaptureFixture) -> None:
    """More lanes than shards: each lane begins within one."""
    rows: list[int] = []

    def read_from(shard: int, start: int = 0) -> Iterator[Any]:
        for number in range(start, 400):
            rows.append(number)
            yield number

    options: dict[str, Any] = {"lengths": [400], "global_batch": 64, "microbatch": 4}
    loader = anyrank.ElasticLoader.from_shards([0], read_from, **options)
    for step in loader:
        assert len([*step.microbatches(NET)])
    assert len(rows) < 1.2 * 400
    assert not caplog.records
    anyrank.ElasticLoader.from_shards([0], lambda _: iter(range(400)), **options)
    assert "1 shard with rows for 16 lanes" in caplog.text
