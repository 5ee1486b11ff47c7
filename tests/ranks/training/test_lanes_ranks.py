"""Streams on several ranks: the rows of (step, k) are those of one rank, through kills."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ranks.spies import meetings
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.errors import CheckpointError
from anyrank.testing import run_ranks
from anyrank.training.streams.lane import LaneState
from anyrank.training.streams.workers import BlockAnswer, BlockReader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

UNTIL = 48  # an epoch has some 40 steps
SIZES = [7, 0, 30, 3, 12, 5, 60, 1, 1, 25, 2, 2]


def read(shard: int) -> Iterator[Any]:
    for number in range(SIZES[shard]):
        yield torch.tensor([shard / 9, number / 50, torch.rand(()).item() / 9])


def read_from(shard: int, start: int = 0) -> Iterator[Any]:
    for number in range(start, SIZES[shard]):
        yield torch.tensor([shard / 9, number / 50, torch.rand(()).item() / 9])


def bucket(row: torch.Tensor) -> int:
    return int(row[1] * 50) % 3


def document(shard: int) -> Iterator[Any]:
    chance = random.Random(shard)
    for number in range(SIZES[shard]):
        yield {"input_ids": [1 + (shard * 61 + number) % 97] * chance.randint(0, 9)}


class Parts:
    """The same rows, as those of a dataset that is cut into shards by itself."""

    num_shards = len(SIZES)

    def shard(self, *, num_shards: int, index: int) -> Iterator[Any]:
        assert num_shards == self.num_shards
        return read(index)


class Few(Parts):
    """Others, which begin again before the epoch is over."""

    num_shards = 2

    def shard(self, *, num_shards: int, index: int) -> Iterator[Any]:
        return (torch.tensor([index, n / 9, 1.0]) for n in range(9 + index))


class Sparse(Parts):
    """Rows in every fifth shard alone, so that a step's lanes may all be without one."""

    num_shards = 20

    def shard(self, *, num_shards: int, index: int) -> Iterator[Any]:
        return (torch.tensor([index / 9, n / 9, 1.0]) for n in range(9 * (index % 5 == 0)))


class Late:
    """Holds three rows, and draws for each when it comes, and at the end."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, torch.Tensor]] = []
        self.fed = 0

    def feed(self, row: torch.Tensor) -> list[torch.Tensor]:
        self.rows.append((self.fed, row + torch.rand(3) / 9))
        self.fed += 1
        return [self.rows.pop(0)[1]] if len(self.rows) > 3 else []

    def end(self) -> list[torch.Tensor]:
        return [row + torch.rand(3) / 9 for _, row in self.rows]

    def held(self) -> list[int]:
        return [number for number, _ in self.rows]


def make(kind: str, **options: Any) -> anyrank.ElasticLoader:
    given: dict[str, Any] = {"global_batch": 12, "microbatch": 2, "seed": 3, **options}
    if kind == "drawn":
        return anyrank.ElasticLoader.from_iterable(Parts(), transform=Late(), **given)
    if kind == "pack":
        given["transform"] = anyrank.Pack(4, eos=0)
    if kind == "buckets":
        given["transform"] = anyrank.Buckets(bucket, patience=9)
    if kind == "window":
        given["window"] = 7
    if kind == "mixed":
        parts = {"a": Parts(), "b": Few()}
        return anyrank.ElasticLoader.from_iterable(
            parts, mix={"a": 3, "b": 1}, until="all", **given
        )
    if kind == "sparse":
        parts = {"a": Sparse(), "b": Sparse()}
        return anyrank.ElasticLoader.from_iterable(parts, mix={"a": 1, "b": 1}, **given)
    if kind == "few":  # fewer shards than ranks: one lane is read by several
        return anyrank.ElasticLoader.from_shards([6, 9, 2], read_from, **given)
    function = document if kind == "pack" else read
    shards = [n for n, size in enumerate(SIZES) if size] if kind == "endless" else range(len(SIZES))
    return anyrank.ElasticLoader.from_shards(shards, function, **given)


class Killed(Exception):
    """As a kill: nothing is saved after it."""


def job(
    folder: str, kind: str, until: int, kill: int | None, options: dict[str, Any]
) -> tuple[dict[tuple[int, int], Any], list[Any], str]:
    """Run from where the folder is, up to a step, or to a kill within another."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    if kind == "pack":
        model = nn.Sequential(nn.Embedding(200, 3), nn.Linear(3, 1))
    if dist.is_initialized() and kind != "plain":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = make(kind, **options)
    state = anyrank.TrainState(model, optimizer, data=loader)
    seen: dict[tuple[int, int], Any] = {}
    try:
        with anyrank.Checkpoints(folder, state, every=4) as ckpts:
            ckpts.resume()
            for step in ckpts.steps(until=until):
                for batch in step.microbatches(model):
                    if isinstance(batch, dict):
                        batch = batch["input_ids"]
                    if not step.is_copy:
                        seen[step.number, step.k] = batch.tolist()
                    if kind != "pack":
                        batch[:] = batch + 0.0  # a copy may be changed as well
                    step.backward(model(batch).square().mean())
                    if step.number == kill:
                        raise Killed
                optimizer.step()
                optimizer.zero_grad()
    except Killed:
        pass
    weights = [parameter.detach() for parameter in model.parameters()]
    digest = hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights)).hexdigest()
    return seen, [*loader.receipts], digest


def run(size: int, *args: Any) -> tuple[dict[tuple[int, int], Any], list[Any], str]:
    """The job on some ranks: what they have seen together, and what is equal on all."""
    rows = run_ranks(size, job, *args) if size > 1 else [job(*args)]
    seen: dict[tuple[int, int], Any] = {}
    for part, _, _ in rows:
        assert not seen.keys() & part.keys()  # a microbatch is one rank's
        seen |= part
    assert all(row[1:] == rows[0][1:] for row in rows)
    _, receipts, digest = rows[0]
    return seen, receipts, digest


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plain", {"exact": True}),
        ("rows", {"num_workers": 1}),
        ("window", {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True}),
        ("pack", {"exact": True}),
        ("buckets", {}),
        ("drawn", {"num_workers": 1}),
        ("endless", {"endless": True, "exact": True, "num_workers": 1}),
        ("mixed", {"exact": True, "num_workers": 2}),
        ("sparse", {"exact": True, "num_workers": 1}),
        ("few", {"exact": True, "num_workers": 1}),
    ],
    ids=str,
)
def test_killed_on_3_then_2_then_4_ranks_is_as_one_undisturbed(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    is_exact = "exact" in options
    plain = {name: options[name] for name in ("exact", "endless") if name in options}
    expected, receipts, digest = run(1, str(tmp_path / "one"), kind, UNTIL, None, plain)
    assert len(receipts) >= (kind != "endless")
    folder = str(tmp_path / "run")
    for size, kill in ((3, 10), (2, 21), (4, None)):
        seen, found, end = run(size, folder, kind, UNTIL, kill, options)
        assert {key: expected[key] for key in seen} == seen, size
    assert found == receipts
    if kind in ("endless", "mixed", "sparse"):
        assert len(receipts) == (0 if kind == "endless" else len(receipts))
    else:
        text = "each row read was used once: 148 rows in 12 shards"
        assert receipts[0].verdict.startswith(text) or kind == "few"
    if is_exact:
        assert end == digest


def job_failing(folder: str, workers: int) -> tuple[str, str]:
    def failing(shard: int) -> Iterator[Any]:
        for number, row in enumerate(read(shard)):
            if (shard, number) == (6, 33):
                raise OSError("no such block")
            yield row

    sizes: dict[str, Any] = {"global_batch": 12, "microbatch": 2, "num_workers": workers}
    loader = anyrank.ElasticLoader.from_shards(range(len(SIZES)), failing, **sizes)
    model = nn.Linear(3, 1)
    try:
        for step in loader:
            for batch in step.microbatches(model):
                step.backward(model(batch).mean())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("workers", [0, 1])
def test_what_one_rank_cannot_read_is_every_ranks_error(workers: int, tmp_path: Path) -> None:
    found = run_ranks(3, job_failing, str(tmp_path), workers)
    assert len({*found}) == 1
    name, text = found[0]
    assert name == "RankError"
    for part in ("no such block", "shard 6 (number 6), rows from 32 on, epoch 0", "rank"):
        assert part in text, text


def job_barren(workers: int) -> tuple[str, str]:
    sizes: dict[str, Any] = {"global_batch": 12, "microbatch": 2, "num_workers": workers}
    pack = anyrank.Pack(4, eos=0)
    loader = anyrank.ElasticLoader.from_shards(
        [2, 6, 4, 9],
        lambda n: document(n) if n != 6 else ({"input_ids": []},),
        transform=pack,
        endless=True,
        **sizes,
    )
    model = nn.Embedding(200, 1)
    try:
        for step in loader:
            for batch in step.microbatches(model):
                step.backward(model(batch["input_ids"]).mean())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_endless_shard_without_samples_is_every_ranks_error(workers: int) -> None:
    found = run_ranks(3, job_barren, workers)
    assert len({*found}) == 1
    assert "shard 6 (number 1) was read completely, but Pack made no" in found[0][1]


def job_meetings(kind: str, folder: str, workers: int) -> list[list[str]]:
    """What the ranks agree on in each step of a run whose lanes are long."""
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes: dict[str, Any] = {"global_batch": 8, "microbatch": 2, "num_workers": workers}

    def rows(shard: int) -> Iterator[Any]:
        yield from torch.randn(40, 3)

    loader = anyrank.ElasticLoader.from_shards(range(8), rows, **sizes)
    state = anyrank.TrainState(model, optimizer, data=loader)
    agreed: list[list[str]] = []
    with meetings() as met, anyrank.Checkpoints(folder, state) as ckpts:
        for step in ckpts.steps(until=12):
            agreed.append([*met])
            met.clear()
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return agreed[4:]


FETCH, COMPLETE = "fetching a batch", "completing the step"


@pytest.mark.parametrize(("workers", "agreed"), [(0, [FETCH, COMPLETE]), (1, [COMPLETE])])
def test_ranks_agree_as_often_as_with_a_dataset(
    workers: int, agreed: list[str], tmp_path: Path
) -> None:
    for steps in run_ranks(2, job_meetings, "ddp", str(tmp_path), workers):
        assert steps == [agreed] * 8


def test_what_a_rank_tells_of_two_blocks_fits_into_one_message() -> None:
    state = LaneState(100, 10**6, 64, 30, 99, 10**6, "f" * 20, "1234", "0" * 8, 10**5, 10**9)
    reports = [BlockAnswer((n, 1 << 32, 10**5), 8, state) for n in range(2)]
    assert len(pickle.dumps((None, reports))) < 400


def job_without_rows() -> int:
    """An epoch whose last steps have a microbatch without a row; returns its number of steps."""
    loader = anyrank.ElasticLoader.from_shards(
        [20, 3, 20, 3],
        lambda size: (torch.ones(1) for _ in range(size)),
        shuffle=False,
        global_batch=4,
        microbatch=1,
    )
    again = mock.patch.object(BlockReader, "read_once", side_effect=AssertionError)
    with torch.no_grad(), again:
        for step in loader:
            assert all(len(batch) == 1 for batch in step.microbatches(nn.Linear(1, 1)))
            loader.commit()
    return loader.step


def test_a_microbatch_without_a_row_opens_no_shard_again() -> None:
    """It repeats the batch before it, of which it has a copy."""
    assert run_ranks(2, job_without_rows) == [12, 12]


def job_other(by_rank: list[int]) -> str:
    shards = [[1.0] * by_rank[dist.get_rank()]] * 4
    loader = anyrank.ElasticLoader.from_shards(shards, iter, global_batch=4, microbatch=2)
    try:
        next(iter(loader))
    except CheckpointError as error:
        return str(error)
    return ""


def test_shards_that_differ_between_ranks_are_refused() -> None:
    texts = run_ranks(2, job_other, [3, 4])
    assert all("shards= differs between ranks" in text for text in texts), texts


def job_sharded(num_workers: int) -> tuple[list[bytes], list[str]]:
    """Two epochs under FSDP2, whose ranks take turns with exact=True: the weights' bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"global_batch": 12, "microbatch": 2, "num_workers": num_workers}
    shards = list(range(9))
    loader = anyrank.ElasticLoader.from_shards(shards, short_shard, exact=True, **options)
    while loader.epoch < 2:
        for step in loader:
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    whole = [full(value).numpy().tobytes() for value in model.state_dict().values()]
    return whole, [receipt.verdict for receipt in loader.receipts]


def short_shard(shard: int, start: int = 0) -> Iterator[torch.Tensor]:
    for row in range(start, 3 + shard % 4):
        yield torch.tensor([shard / 9, row / 7])


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.exact_fsdp
def test_ranks_that_take_turns_under_fsdp2_read_the_lanes_of_one_rank() -> None:
    alone = job_sharded(0)
    for ranks, num_workers in ((2, 0), (3, 2)):
        assert run_ranks(ranks, job_sharded, num_workers) == [alone] * ranks
