"""Promise 8: several processes that are in no group are not N runs in one folder without a word."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.testing import run_ranks


def parts() -> tuple[nn.Module, anyrank.ElasticLoader, anyrank.TrainState]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(torch.randn(24, 4), global_batch=12, microbatch=2)
    return model, loader, anyrank.TrainState(model, optimizer, data=loader)


def resume(folder: str) -> None:
    anyrank.Checkpoints(folder, parts()[2]).resume()


def save(folder: str) -> None:
    anyrank.Checkpoints(folder, parts()[2]).save()


def count(folder: str) -> None:
    anyrank.Checkpoints(folder, anyrank.TrainState(nn.Linear(1, 1))).step_done()


def steps(folder: str) -> None:
    next(iter(anyrank.Checkpoints(folder, parts()[2]).steps(until=1)))


def iterate(folder: str) -> None:
    next(iter(parts()[1]))


def sync(folder: str) -> None:
    anyrank.sync(nn.Linear(4, 1), nn.Linear(4, 1))


def convert(folder: str) -> None:
    anyrank.convert(nn.Linear(4, 1), f"{folder}/out")


CALLS: list[Callable[[str], None]] = [resume, save, count, steps, iterate, sync, convert]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def errors_without_group(folder: str) -> list[str]:
    texts: list[str] = []
    for call in CALLS:
        with pytest.raises(anyrank.AnyrankError) as caught:
            call(folder)
        texts.append(str(caught.value))
    return texts


def test_runs_loaders_and_syncs_without_a_group_are_errors(tmp_path: Path) -> None:
    for texts in run_ranks(2, errors_without_group, str(tmp_path), init=False):
        for text in texts:
            assert (
                "2 processes were launched (WORLD_SIZE), but no process group is initialized"
                in text
            )
            assert "First call torch.distributed.init_process_group()" in text
    assert [*tmp_path.iterdir()] == []


def load_before_the_group(source: str, run: str, freezes: bool) -> tuple[list[str], Any]:
    from anyrank.world.group import warn_about_no_group

    warn_about_no_group.cache_clear()  # a rank of the pool is a process of several tests
    logger, handler = logging.getLogger("anyrank.world"), Lines()
    logger.addHandler(handler)
    try:
        model, _, state = parts()
        anyrank.load(model, source)
        with anyrank.meta():
            on_meta = nn.Linear(4, 1)
        anyrank.materialize(on_meta)
        if freezes:
            anyrank.freeze(on_meta)
        anyrank.plan(model, source)
        ckpts = anyrank.Checkpoints(run, state)
    finally:
        logger.removeHandler(handler)
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model)
    with ckpts:
        ckpts.resume()
        for step in ckpts.steps(until=1):
            for batch in step.microbatches(wrapped):
                step.backward(wrapped(batch).square().mean())
            for optimizer in state.parts.optimizers():
                optimizer.step()
    saved = [(one.step, one.samples) for one in ckpts.saved()]
    dist.destroy_process_group()
    return handler.lines, saved


@pytest.mark.parametrize("freezes", [False, True])
def test_models_that_are_built_before_the_group_are_right_and_warned_of_once(
    freezes: bool, tmp_path: Path
) -> None:
    source = str(tmp_path / "weights.pt")
    torch.save(nn.Linear(4, 1).state_dict(), source)
    call = load_before_the_group
    for lines, saved in run_ranks(2, call, source, str(tmp_path / "run"), freezes, init=False):
        (line,) = lines
        assert line.startswith(
            "2 processes were launched (WORLD_SIZE), but no process group is initialized yet"
        )
        assert saved == [(1, 12)]


def alone(folder: str) -> int:
    state = anyrank.TrainState(nn.Linear(2, 1))
    run = f"{folder}/{os.environ['RANK']}"
    with anyrank.Checkpoints(run, state, process_group=anyrank.ALONE) as ckpts:
        ckpts.save()
    anyrank.sync(nn.Linear(2, 1), nn.Linear(2, 1), process_group=anyrank.ALONE)
    return len(ckpts.saved())


def test_a_process_that_says_it_is_alone_is_let(tmp_path: Path) -> None:
    assert run_ranks(2, alone, str(tmp_path), init=False) == [1, 1]
