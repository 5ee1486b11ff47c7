"""Runs of Accelerate go on as runs of anyrank, with the losses of Accelerate's own resume.

The folders are written by Accelerate itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import tools

from anyrank.testing import run_ranks

pytest.importorskip("accelerate")


def objects(accelerator: Any, seed: int) -> Any:
    """A model, optimizer and scheduler that Accelerate prepared."""
    net = tools.seeded(seed)
    optimizer = tools.optimizer_of(net)
    scheduler = tools.cosine(optimizer, accelerator.num_processes)
    return accelerator.prepare(net, optimizer, scheduler)


def train(accelerator: Any, prepared: Any, first: int, last: int) -> list[float]:
    net, optimizer, scheduler = prepared
    losses: list[float] = []
    for step in range(first, last):
        loss = tools.loss_of(net, step)
        accelerator.backward(loss)
        losses.append(tools.mean_over_ranks(loss))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def job_accelerate(folder: str) -> list[float]:
    """Train, save, and let Accelerate resume with new objects; the losses from there on."""
    from accelerate import Accelerator

    with tools.new_accelerate():
        accelerator = Accelerator(cpu=True)
        prepared = objects(accelerator, 0)
        train(accelerator, prepared, 0, tools.SAVED)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        prepared = objects(accelerator, 1)
        accelerator.load_state(folder)
        return train(accelerator, prepared, tools.SAVED, tools.STEPS)


@pytest.mark.parametrize("world", [1, 2])
def test_ddp(tmp_path: Path, world: int) -> None:
    source = tmp_path / "accelerate"
    expected = run_ranks(world, job_accelerate, str(source))[0]
    names = {path.name for path in source.iterdir()}
    assert {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"} <= names
    for other, layout in ((1, "ddp"), (3, "ddp"), (2, "fsdp")):
        folder = str(tmp_path / f"run-{other}-{layout}")
        for losses, report, steps in run_ranks(other, tools.job_adopt, str(source), folder, layout):
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
            assert steps == [6, 4]
            assert (report.step, report.saved_on.ranks) == (3, world)
            kind = "exact" if layout == "ddp" else "resharded"
            stepped = "exact" if world == 1 else "derived"
            parts = {"model": kind, "optimizer": kind, "scheduler": stepped, "streams": "derived"}
            assert report.components == parts
