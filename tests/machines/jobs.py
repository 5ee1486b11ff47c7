"""What runs on the simulated machines: `jobs.py FUNCTION RESULT ARGUMENTS...` on each rank."""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import anyrank
from anyrank.world.ranks import open_ranks

RANK, MACHINE = int(os.environ["RANK"]), int(os.environ["MACHINE"])


def outcome(work: Callable[[], object]) -> dict[str, Any]:
    """How a call ended, and in what time."""
    start = time.monotonic()
    try:
        return {"value": work(), "seconds": time.monotonic() - start}
    except anyrank.AnyrankError as error:
        kind, text = type(error).__name__, str(error)
        return {"error": kind, "text": text, "seconds": time.monotonic() - start}


CLOCKS_AHEAD_SEC = [float(text) for text in os.environ.get("CLOCKS_AHEAD_SEC", "0").split()]
true_time = time.time


def skew_clock(ahead_sec: float) -> None:
    """Put this process's clock wrong on the second machine."""
    if MACHINE:
        time.time = lambda: true_time() + ahead_sec


def build(fill: float = 0.0) -> anyrank.TrainState:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    nn.init.constant_(model.weight, fill)
    return anyrank.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def save_for_ever(folder: str) -> dict[str, Any]:
    """Steps without end, each saved; how they ended, and how long the last one took."""
    state = build()
    began = [time.monotonic()]

    def train() -> None:
        with anyrank.Checkpoints(folder, state, every=1, keep=2) as ckpts:
            ckpts.resume()
            while True:
                began[0] = time.monotonic()
                ckpts.step_done()
                if state.step == 3:
                    Path(folder, f"going-{RANK}").touch()

    result = outcome(train)
    return {**result, "seconds": time.monotonic() - began[0]}


def load_for_ever(path: str) -> dict[str, Any]:
    """One load after the other, until it fails."""
    began = [time.monotonic()]

    def load() -> None:
        number = 0
        while True:
            began[0] = time.monotonic()
            anyrank.load(nn.Linear(64, 64), path, strategy="stripe", buffer_bytes=4096)
            number += 1
            if number == 3:
                Path(path).with_name(f"going-{RANK}").touch()

    result = outcome(load)
    return {**result, "seconds": time.monotonic() - began[0]}


def resume(folder: str) -> dict[str, Any]:
    """Resume, take one step and save it."""
    state = build()

    def go_on() -> list[Any]:
        with anyrank.Checkpoints(folder, state, every=1, keep=2) as ckpts:
            report = ckpts.resume()
            before = state.step
            ckpts.step_done()
            return [before, state.step, None if report is None else report.saved_on.ranks]

    return outcome(go_on)


def agree_for_ever(folder: str) -> dict[str, Any]:
    """Agreements without end; how they ended."""

    def agree() -> None:
        with open_ranks(call="test()") as ranks:
            for number in itertools.count():
                assert ranks.reduce("agreeing", RANK, max) == ranks.size - 1
                if number == 3:
                    Path(folder, f"going-{RANK}").touch()

    return outcome(agree)


def hold_lock(folder: str) -> dict[str, Any]:
    """One save, and then a run that goes on until the other has tried to start as well."""

    def save() -> str:
        with anyrank.Checkpoints(folder, build()) as ckpts:
            ckpts.save()
            Path(folder, "held").touch()
            end = time.monotonic() + 180
            while not Path(folder, "tried").exists() and time.monotonic() < end:
                time.sleep(0.05)
        return "done"

    return outcome(save)


def take_lock(folder: str) -> dict[str, Any]:
    """A second run in the folder."""

    def save() -> str:
        state = build()
        with anyrank.Checkpoints(folder, state) as ckpts:
            ckpts.resume()
            state.step += 1
            ckpts.save()
        return "done"

    result = outcome(save)
    Path(folder, "tried").touch()
    return result


def local_folder() -> dict[str, Any]:
    """Save to a folder that only the own machine sees."""
    state = build()

    def save() -> None:
        with anyrank.Checkpoints(os.environ["LOCAL_DISK"] + "/run", state) as ckpts:
            ckpts.save()

    return outcome(save)


def whole_trip(path: str, folder: str) -> dict[str, Any]:
    """Load, train with saves by the clock and resume, as one test of a slow or skewed machine."""

    def work() -> list[Any]:
        model = nn.Linear(64, 64)
        anyrank.load(model, path, strategy="stripe")
        total = float(model.weight.sum())
        state = build()
        with anyrank.Checkpoints(folder, state, every="1h", keep=2) as ckpts:
            for number in range(6):
                ckpts.step_done()
                if number >= 2:
                    ckpts.save()
            listed = [one.step for one in ckpts.saved()]
        fresh = build()
        with anyrank.Checkpoints(folder, fresh) as ckpts:
            ckpts.resume()
        return [total, listed, fresh.step]

    return outcome(work)


def trips(path: str, folder: str) -> list[dict[str, Any]]:
    """A whole trip by each of the second machine's clocks."""
    found: list[dict[str, Any]] = []
    for number, ahead_sec in enumerate(CLOCKS_AHEAD_SEC):
        skew_clock(ahead_sec)
        found.append(whole_trip(path, f"{folder}/run-{number}"))
    return found


def main() -> None:
    """Run one function; its result goes to a file."""
    logging.basicConfig(level=logging.WARNING)
    faulthandler.dump_traceback_later(200, exit=True)
    name, result, *arguments = sys.argv[1:]
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo")
    found = globals()[name](*arguments)
    Path(result).write_text(json.dumps(found))
    os._exit(0)  # a broken default group of torch's waits for its own deadline at exit


if __name__ == "__main__":
    main()
