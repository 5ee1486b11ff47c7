"""What differs between ranks in a loader, a sampler or a model: one clear error on all of them."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.testing import run_ranks

SECONDS = 20.0  # far below the wait of a rank for another


class Unread:
    """A dataset that no rank may read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("a sample was read before the ranks were compared")


BASE: dict[str, Any] = {"n": 36, "global_batch": 12, "microbatch": 2}
DIFFERENT: dict[str, tuple[Any, str]] = {
    "seed": (1, "seed= differs between ranks: 0 on rank 0, 1 on rank 1"),
    "shuffle": (False, "shuffle= differs between ranks: True on rank 0, False on rank 1"),
    "global_batch": (24, "global_batch= differs between ranks: 12 on rank 0, 24 on rank 1"),
    "microbatch": (4, "microbatch= differs between ranks: 2 on rank 0, 4 on rank 1"),
    "tail": ("drop", "tail= differs between ranks: 'short' on rank 0, 'drop' on rank 1"),
    "n": (40, "dataset= differs between ranks: '36 samples' on rank 0, '40 samples' on rank 1"),
    "weights": ([1.0] * 36, r"weights= differs between ranks: None on rank 0, 'digest \w+' on r"),
    "key": ("b", "key= differs between ranks: None on rank 0, 'b' on rank 1"),
    "exact": (True, "exact= differs between ranks: False on rank 0, True on rank 1"),
}


def given(name: str) -> dict[str, Any]:
    value, _ = DIFFERENT[name]
    return BASE | ({name: value} if dist.get_rank() == 1 else {})


def error_of(call: Any) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "none", "", 0.0


def check(rows: list[tuple[str, str, float]], kind: str, text: str) -> None:
    assert {row[0] for row in rows} == {kind}
    assert len({row[1] for row in rows}) == 1
    assert re.search(text, rows[0][1]), rows[0][1]
    assert max(row[2] for row in rows) < SECONDS


def job_loader(names: list[str]) -> list[tuple[str, str, float]]:
    found: list[tuple[str, str, float]] = []
    for name in names:
        options = given(name)
        loader = anyrank.ElasticLoader(Unread(options.pop("n")), **options)
        found.append(error_of(lambda loader=loader: next(iter(loader))))
    return found


def test_a_loader_that_differs_is_refused_before_a_sample_is_read() -> None:
    for name, *rows in zip(DIFFERENT, *run_ranks(2, job_loader, list(DIFFERENT)), strict=True):
        check(rows, "CheckpointError", DIFFERENT[name][1])


def job_shards() -> list[tuple[str, str, float]]:
    found: list[tuple[str, str, float]] = []
    for names, lengths in ((["a", "c"], [8, 8]), (["a", "b"], [6, 10])):
        if dist.get_rank() == 0:
            names, lengths = ["a", "b"], [8, 8]
        loader = anyrank.ElasticLoader.from_shards(
            names, iter, lengths=lengths, global_batch=4, microbatch=2
        )
        found.append(error_of(lambda loader=loader: next(iter(loader))))
    return found


def test_shards_that_differ_are_refused() -> None:
    for rows in zip(*run_ranks(2, job_shards), strict=True):
        check(list(rows), "CheckpointError", r"shards= differs between ranks")


def job_position() -> tuple[str, str, float]:
    loader = anyrank.ElasticLoader(Unread(36), global_batch=12, microbatch=2)
    if dist.get_rank() == 1:  # as after a file that only one rank has read
        other = anyrank.ElasticLoader(
            torch.zeros(36, 1), global_batch=12, microbatch=2, process_group=anyrank.ALONE
        )
        net = nn.Linear(1, 1)
        for step in other:
            for batch in step.microbatches(net):
                step.backward(net(batch).mean())
            other.commit()
            break
        loader.load_state_dict(other.state_dict())
    return error_of(lambda: next(iter(loader)))


def test_a_position_that_differs_is_refused() -> None:
    text = "'epoch 0, step 0, 0 samples of the epoch' on rank 0, 'epoch 0, step 1, 12 samples"
    check(run_ranks(2, job_position), "CheckpointError", text)


def job_open(names: list[str], path: str) -> list[tuple[str, str, float]]:
    found: list[tuple[str, str, float]] = []
    for name in names:
        options = given(name)
        loader = anyrank.ElasticLoader(Unread(options.pop("n")), **options)
        state = anyrank.TrainState(nn.Linear(1, 1), data=loader)
        with anyrank.Checkpoints(f"{path}/{name}", state) as ckpts:
            found.append(error_of(ckpts.resume))
    return found


def test_a_loader_that_differs_is_refused_when_the_run_is_opened(tmp_path: Path) -> None:
    found = run_ranks(2, job_open, list(DIFFERENT), str(tmp_path))
    for name, *rows in zip(DIFFERENT, *found, strict=True):
        check(rows, "CheckpointError", DIFFERENT[name][1])


def job_freeze(frozen: dict[int, list[str]], later: bool) -> tuple[str, str, float]:
    """One epoch of a model without a wrapper, whose ranks freeze different parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(torch.ones(36, 1), global_batch=12, microbatch=2)

    def train() -> None:
        for step in loader:
            if step.number == int(later):
                for name in frozen.get(dist.get_rank(), []):
                    net.get_parameter(name).requires_grad_(False)
            for batch in step.microbatches(net):
                step.backward(net(batch + dist.get_rank()).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return error_of(train)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "names", [["0.weight"], ["0.weight", "0.bias", "1.bias"]], ids=["a part", "nearly all"]
)
def test_parameters_that_only_some_ranks_train_are_refused(names: list[str], later: bool) -> None:
    rows = run_ranks(2, job_freeze, {1: names}, later)
    text = "requires_grad of 0.weight differs between ranks: True on rank 0, False on rank 1"
    check(rows, "ValueError", text)


def test_parameters_that_all_ranks_freeze_are_not_trained() -> None:
    names = ["0.weight", "0.bias"]
    rows = run_ranks(2, job_freeze, {0: names, 1: names}, True)
    assert [row[0] for row in rows] == ["none", "none"]
