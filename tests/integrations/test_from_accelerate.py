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


def objects(accelerator: Any, seed: int, times: int | None = None) -> Any:
    """A model, optimizer and scheduler that Accelerate prepared."""
    net = tools.seeded(seed)
    optimizer = tools.optimizer_of(net)
    scheduler = tools.cosine(optimizer, times or accelerator.num_processes)
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


def job_short_schedule(folder: str) -> None:
    """Save a run whose schedule has no factor for the processes, and ends as many times early."""
    from accelerate import Accelerator

    with tools.new_accelerate():
        accelerator = Accelerator(cpu=True)
        train(accelerator, objects(accelerator, 0, times=1), 0, 1)
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()


def test_a_schedule_that_ended_early_is_told_of(tmp_path: Path) -> None:
    source = str(tmp_path / "accelerate")
    run_ranks(2, job_short_schedule, source)
    _, report, _ = run_ranks(1, tools.job_adopt, source, str(tmp_path / "run"), "ddp")[0]
    reason = report.components["scheduler"].reason
    assert reason.startswith(
        "Accelerate steps it once per process, 2 times per optimizer step, so 2 became 1; a "
    )
    assert "is now f(2 * step); its lambda" in reason
    assert "returns a learning rate of 0.00933013 at step 1, but 0.0075 when" in reason


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
            parts = {"model": kind, "optimizer": kind, "scheduler": stepped, "random": "derived"}
            assert report.components == parts
    tools.check_weights(source, tmp_path / "weights")
