"""Buckets of a map-style dataset: read as a stream, or planned from keys that are known before."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

KEYS = [n % 3 if n % 7 else 5 for n in range(101)]


class Pictures:
    """Which notes what is loaded."""

    def __init__(self, size: int = len(KEYS)) -> None:
        self.size, self.loaded = size, Counter[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        self.loaded[i] += 1
        return {"id": i, "ratio": KEYS[i], "drawn": torch.rand(()).item()}


def make(data: Any = None, **options: Any) -> anyrank.ElasticLoader:
    given: dict[str, Any] = {"transform": anyrank.Buckets("ratio"), "collate_fn": list}
    given |= {"global_batch": 12, "microbatch": 3, "seed": 3}
    return anyrank.ElasticLoader(data or Pictures(), **given | options)


def run(loader: anyrank.ElasticLoader, stop: int = 10**9) -> list[list[Any]]:
    batches: list[list[Any]] = []
    for step in loader:
        batches += step.microbatches(nn.Linear(1, 1))
        loader.commit()
        if loader.step >= stop:
            break
    return batches


FULL = anyrank.Buckets("ratio", drop_last=True)
WAYS: dict[str, dict[str, Any]] = {
    "planned": {"keys": KEYS},
    "planned, full": {"keys": torch.tensor(KEYS), "transform": FULL},
    "planned, in order": {"keys": KEYS, "shuffle": False},
    "planned, whole steps": {"keys": KEYS, "tail": "drop"},
    "read": {},
    "read, full": {"transform": FULL},
    "read by workers": {"num_workers": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_microbatches_are_of_one_bucket_through_resumes(way: str) -> None:
    data = Pictures()
    loader = make(data, **WAYS[way])
    expected, second = run(loader), run(loader)
    for batches in (expected, second):
        assert all(len({row["ratio"] for row in batch}) == 1 for batch in batches)
        ids = Counter(row["id"] for batch in batches for row in batch)
        dropped = len(KEYS) - len(ids)
        assert set(ids.values()) == {1}
        if "full" in way:
            assert {len(batch) for batch in batches} == {3}
            assert 0 < dropped < 4 * 4 * 3
        else:
            assert (dropped > 0) == ("whole" in way)
    assert loader.receipts[0].verdict.startswith("exactly once")
    if "read" in way:
        assert "101 of 101 rows" in loader.receipts[0].verdict
    if dropped:
        assert f"{dropped} dropped" in loader.receipts[1].verdict
    if "order" not in way:
        assert [row["id"] for row in expected[0]] != [row["id"] for row in second[0]]
    begun, seen = make(**WAYS[way]), list[Any]()
    for stop in (2, 5, 7):
        seen += run(begun, stop)
        state = json.loads(json.dumps(begun.state_dict()))
        begun = make(**WAYS[way])
        begun.load_state_dict(state)
    assert seen + run(begun) == expected


def test_keys_are_known_without_a_sample_and_give_a_length() -> None:
    data = Pictures()
    loader = make(data, keys=KEYS)
    assert not data.loaded
    short = sum(KEYS.count(key) % 3 > 0 for key in set(KEYS))
    blocks = sum(KEYS.count(key) // 3 for key in set(KEYS)) + short
    assert len(loader) == -(-blocks // 4)
    run(loader)
    assert set(data.loaded.values()) == {1}
    assert (loader.step, loader.samples) == (len(loader), len(KEYS))
    with pytest.raises(TypeError, match="number of steps per epoch is unknown"):
        len(make())


def test_packing_is_for_map_style_data_too() -> None:
    class Documents(Pictures):
        def __getitem__(self, i: int) -> Any:
            return {"input_ids": [i + 1] * (i % 5)}

    loader = make(Documents(), transform=anyrank.Pack(8), collate_fn=None)
    batches: list[Any] = run(loader)
    tokens = Counter(int(t) for batch in batches for t in batch["input_ids"].flatten())
    assert tokens == Counter({i + 1: i % 5 for i in range(101) if i % 5})
    assert "101 of 101 rows" in loader.receipts[0].verdict


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"keys": KEYS[1:]}, ValueError, "keys= has 100 values: must have 101"),
        ({"keys": [[1]] * 101}, TypeError, "keys= cannot identify buckets"),
        ({"keys": KEYS, "transform": None}, ValueError, r"Pass transform=anyrank.Buckets\(...\)"),
        ({"keys": KEYS, "weights": [1.0] * 101}, ValueError, "weights= draw samples"),
        ({"weights": [1.0] * 101}, ValueError, "weights= cannot be combined with transform="),
        ({"microbatch": 0}, ValueError, "microbatch=0: must be at least 1"),
        ({"tail": "drop"}, ValueError, r"Buckets\(key, drop_last=True\)"),
        (
            {"transform": anyrank.Buckets},
            TypeError,
            "transform=: pass an instance, not the class Buckets",
        ),
        (
            {"keys": range(101), "transform": anyrank.Buckets("x", drop_last=True)},
            ValueError,
            "drop_last=True leaves no samples",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_at_once(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        make(**options)


def test_a_resume_with_other_keys_is_refused() -> None:
    loader = make(keys=KEYS)
    run(loader, 2)
    with pytest.raises(CheckpointError, match="ElasticLoader: the saved run has"):
        make(keys=KEYS[1:] + KEYS[:1]).load_state_dict(loader.state_dict())
    read = make()
    run(read, 2)
    for length in (100, 2):  # 2 samples are fewer than the microbatches of a step
        text = rf"the saved run did not have length {length}, .*skip=\['data'\]"
        with pytest.raises(CheckpointError, match=text):
            make(Pictures(length)).load_state_dict(read.state_dict())


def test_a_resume_with_other_keys_says_so() -> None:
    def make_keyed(count: int, **options: Any) -> anyrank.ElasticLoader:
        given: dict[str, Any] = {"global_batch": 4, "microbatch": 2} | options
        keys = [n % count for n in range(50)]
        buckets = anyrank.Buckets("b")
        return anyrank.ElasticLoader([{"b": 0}] * 50, transform=buckets, keys=keys, **given)

    state = make_keyed(3).state_dict()
    with pytest.raises(
        anyrank.CheckpointError, match=r"the order 'buckets-v1 .*the saved run's keys=,"
    ):
        make_keyed(2).load_state_dict(state)
    with pytest.raises(
        anyrank.CheckpointError, match=r"shuffle=True, but this loader has shuffle=False\. Set shuf"
    ):
        make_keyed(3, shuffle=False).load_state_dict(state)
    plain = anyrank.ElasticLoader(range(50), global_batch=4, microbatch=2)
    with pytest.raises(
        anyrank.CheckpointError, match=r"keys=, but this loader has a dataset\. Pass the"
    ):
        plain.load_state_dict(state)


@pytest.mark.parametrize("extra", [-1, 1])
def test_samples_of_another_number_than_asked_for_are_an_error(extra: int) -> None:
    """Else a part would seem to end there, or rows would come twice."""

    class Several(Pictures):
        def __getitems__(self, ids: list[int]) -> list[Any]:
            return [self[i] for i in [*ids, *ids][: len(ids) + extra]]

    with pytest.raises(ValueError, match=r"returned \d samples for \d ids") as caught:
        run(make(Several()))
    assert caught.value.__notes__[0].startswith("raised by dataset.__getitems__, part ")
