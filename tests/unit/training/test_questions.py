"""`ends_epoch`, `samples` and the loader's properties are questions: asked anywhere, any number of
times, with any number of workers and over kills, they change nothing.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import anyrank

pytestmark = [
    # Workers on a machine with one core, and from Python 3.12 on.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

EXAMPLES = int(os.environ.get("QUESTIONS_EXAMPLES", "40"))
NET = nn.Linear(1, 1)


def read(shard: tuple[int, int]) -> Iterator[Any]:
    """Rows that say who they are, and draw."""
    number, size = shard
    for row in range(size):
        yield {
            "id": (number, row),
            "key": row % 3,
            "input_ids": [number, row],
            "x": random.random(),
        }


def transform_of(name: str) -> Any:
    return {"buckets": anyrank.Buckets("key", patience=9), "pack": anyrank.Pack(5)}.get(name)


def make(sizes: list[int], k: int, kind: str, workers: int) -> anyrank.ElasticLoader:
    given: dict[str, Any] = {
        "global_batch": 3 * k,
        "microbatch": 3,
        "seed": 1,
        "num_workers": workers,
        "collate_fn": list,
    }
    if kind == "map style":
        return anyrank.ElasticLoader([*range(sum(sizes))], **given)
    shards = [*enumerate(sizes)]
    return anyrank.ElasticLoader.from_shards(shards, read, transform=transform_of(kind), **given)


class Asker:
    """Asks everything that a loop may ask, at random."""

    def __init__(self, seed: int | None) -> None:
        self.chance = None if seed is None else random.Random(seed)

    def ask(self, loader: anyrank.ElasticLoader, step: Any = None) -> None:
        while self.chance is not None and self.chance.random() < 0.6:
            for thing, names in {
                loader: ["epoch", "step", "consumed", "samples", "dropped", "notes", "receipts"],
                step: ["ends_epoch", "samples", "number", "epoch", "is_last", "k", "is_copy"],
            }.items():
                with may_say("is not known before", "only available inside"):
                    getattr(thing, self.chance.choice(names), None)
            if self.chance.random() < 0.2:
                with may_say("rows are counted as they are read"):
                    len(loader)


@contextlib.contextmanager
def may_say(*texts: str) -> Iterator[None]:
    """A question that has no answer yet says so."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not any(text in str(error) for text in texts):
            raise


def passes(loader: Any, asker: Asker, epochs: int, save_at: int = -1) -> tuple[list[Any], str]:
    """The steps up to the end of some epochs, and the loader's state after one of them."""
    seen: list[Any] = []
    saved = ""
    while loader.epoch < epochs:
        asker.ask(loader)
        for step in loader:
            asker.ask(loader, step)
            rows: list[Any] = []
            for batch in step.microbatches(NET):
                asker.ask(loader, step)
                rows.append((step.k, step.is_last, copy.deepcopy(batch), random.random()))
            asker.ask(loader, step)
            seen.append((step.number, step.epoch, step.samples, step.ends_epoch, rows))
            loader.commit()
            asker.ask(loader, step)
            if len(seen) == save_at:
                saved = json.dumps(loader.state_dict())
                break
        if saved:
            break
    return seen, saved


def plain(seen: list[Any]) -> str:
    return repr(
        [
            (*row, [(k, last, [plain_row(one) for one in batch], x) for k, last, batch, x in rows])
            for *row, rows in seen
        ]
    )


def plain_row(row: Any) -> Any:
    if isinstance(row, dict):
        return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in row.items()}
    return row


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 7, 30]), min_size=1, max_size=7).filter(any),
    k=st.integers(1, 4),
    kind=st.sampled_from(["map style", "stream", "stream", "buckets", "pack"]),
    seed=st.integers(0, 1000),
    save_at=st.integers(1, 8),
)
def test_questions_change_nothing(
    sizes: list[int], k: int, kind: str, seed: int, save_at: int
) -> None:
    check(sizes, k, kind, seed, save_at, workers=0)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["map style", "stream", "buckets", "pack"])
def test_questions_change_nothing_with_workers(kind: str, workers: int) -> None:
    check([7, 0, 30, 1, 12], 3, kind, 7 * workers, save_at=4, workers=workers)


def check(sizes: list[int], k: int, kind: str, seed: int, save_at: int, workers: int) -> None:
    if kind == "map style" and sum(sizes) < 3 * k:
        return  # refused: it has less than one global batch
    expected, _ = passes(make(sizes, k, kind, 0), Asker(None), 2)
    asked, saved = passes(make(sizes, k, kind, workers), Asker(seed), 2, save_at)
    if saved:
        loader = make(sizes, k, kind, workers)
        loader.load_state_dict(json.loads(saved))
        asked += passes(loader, Asker(seed + 1), 2)[0]
    assert plain(asked) == plain(expected)
