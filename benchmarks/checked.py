"""What the checks of saves and resumes cost: replicas compared, bytes verified, bytes read for it.

    python benchmarks/checked.py             # some minutes on 1 to 4 ranks; results/checked.json
    python benchmarks/checked.py --quick     # small, nothing is written

Replicas: what comparing them takes of ten saves in a row, nine of which compare everything; and
what `replicas_every=100` takes of a training, one comparison on the slower rank over 100 median
steps. Verified: a resume with verify=True against one with verify=False, in turn, on the ranks that
saved and on one, from files in the page cache and from the disk, by the clock and by CPU time,
which on a machine with other work tells more. Extra bytes: read beyond those needed, on other
ranks than saved. A layer has 4 MiB, three times that with Adam's state.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench
import torch
import torch.distributed as dist
from bench import Case, Run, Runs, ratios, slowest, spread, tell
from launch import Launcher
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.resume import checkpoints
from anyrank.saving import collect

SAVES = 10  # of which nine compare all of the replicas
STEPS, EVERY, ROWS = 10, 100, 64  # of a training that compares once
WIDTH, WIDTHS = 1024, [512, 1024, 768, 1536]
SAVED_ON, RESUMED_ON = 4, (1, 2, 3)
GOALS = {"replicas": 0.1, "every": 0.01, "verified": 1.1, "extra": 0.02}


def network(widths: list[int]) -> Any:
    """Square layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(n, n, bias=False) for n in widths))


def build(widths: list[int], sharded: bool, stepped: bool) -> anyrank.TrainState:
    """Square layers and Adam."""
    model = network(widths)
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return anyrank.TrainState(model, optimizer)


# -- what each rank does --------------------------------------------------------------------------


@contextlib.contextmanager
def seconds_in(module: Any, name: str) -> Iterator[list[float]]:
    """The seconds of each call of a module's function, as long as this lasts."""
    inner, spent = getattr(module, name), list[float]()

    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*arguments)
        finally:
            spent.append(time.perf_counter() - start)

    with patch.object(module, name, timed):
        yield spent


def compare_in_saves(path: str, layers: int) -> float:
    """The comparisons' part of ten saves of a model that both ranks hold whole."""
    state = build([WIDTH] * layers, sharded=False, stepped=True)
    with (
        seconds_in(collect, "compare_replicas") as spent,
        anyrank.Checkpoints(path, state) as ckpts,
    ):
        for number in range(SAVES):
            state.step = number + 1
            ckpts.save()
        return sum(spent) / sum(record.seconds for record in ckpts.stats())


def compare_in_steps(path: str, layers: int) -> Run:
    """Seconds of one comparison under DDP, and of the median step without it, on this rank."""
    model = DistributedDataParallel(network([WIDTH] * layers))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = anyrank.ElasticLoader(torch.randn(256, WIDTH), global_batch=ROWS, microbatch=ROWS // 2)
    state, steps = anyrank.TrainState(model, optimizer, data=loader), list[float]()
    with (
        seconds_in(checkpoints, "check_replicas") as spent,
        anyrank.Checkpoints(path, state, replicas_every=STEPS) as ckpts,
    ):
        start = time.perf_counter()
        for step in ckpts.steps(until=STEPS):
            for x in step.microbatches(model):
                step.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - start)
            start = time.perf_counter()
    return {"sec": sum(spent), "step_sec": statistics.median(steps[1:])}


def save(path: str, widths: list[int]) -> None:
    with anyrank.Checkpoints(path, build(widths, sharded=True, stepped=True)) as ckpts:
        ckpts.save()


def resume(path: str, widths: list[int], verify: bool, from_disk: bool = False) -> Run:
    """A resume into a new state; from the disk, the files have left the page cache before."""
    state = build(widths, sharded=True, stepped=False)
    if from_disk:
        for file in Path(path).rglob("*.*"):
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    with anyrank.Checkpoints(path, state, verify=verify) as ckpts:
        gc.collect()
        dist.barrier()
        clock, cpu = time.perf_counter(), time.process_time()
        report = ckpts.resume("must")
        found = {"clock": time.perf_counter() - clock, "cpu": time.process_time() - cpu}
        assert report is not None
        return found | {"bytes_read": sum(report.bytes_read)}


def resume_in_turn(path: str, layers: int, repeats: int, from_disk: bool) -> Runs:
    """Every byte verified, and sizes alone."""

    def once(way: str, number: int) -> Run:
        return resume(path, [WIDTH] * layers, way == "full", from_disk)

    return Case("resume", ("full", "size"), once).run(repeats, warm=1, is_told=False)


# -- figures --------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Run:
    """Every figure, beside its goal."""
    launcher, layers, repeats = Launcher("checked"), options.layers, options.repeats
    figures: dict[str, Any] = {}

    def record(name: str, figure: Run, goal: str) -> None:
        figures[name] = figure | {"goal": GOALS[goal]}
        tell(name, figures[name])

    with tempfile.TemporaryDirectory(prefix="anyrank-checked-") as top:
        launcher.values(2, save, f"{top}/verified", [WIDTH] * layers)
        for ranks, from_disk in ((2, False), (1, False), (2, True), (1, True)):
            given = (f"{top}/verified", layers, 3 * repeats, from_disk)
            runs = slowest(launcher.values(ranks, resume_in_turn, *given))
            for clock in ("clock", "cpu"):
                where = ", from the disk" if from_disk else ""
                what = f"verified, saved on 2, resumed on {ranks}{where}, {clock}"
                record(what, ratios(runs["full"], runs["size"], clock), "verified")
        launcher.values(SAVED_ON, save, f"{top}/extra", WIDTHS)
        needed = sum(3 * 4 * n * n for n in WIDTHS)
        for ranks in RESUMED_ON:
            read = launcher.values(ranks, resume, f"{top}/extra", WIDTHS, True)[0]["bytes_read"]
            what = f"bytes beyond, saved on {SAVED_ON}, resumed on {ranks}"
            record(what, spread([read / needed - 1]), "extra")
        parts: list[float] = []
        shares: list[float] = []
        for number in range(repeats):
            parts.append(max(launcher.values(2, compare_in_saves, f"{top}/{number}", layers)))
            each = launcher.values(2, compare_in_steps, f"{top}/steps-{number}", layers)
            sec, step_sec = (max(run[figure] for run in each) for figure in ("sec", "step_sec"))
            shares.append(sec / (EVERY * step_sec))
        record("replicas", spread(parts), "replicas")
        record(f"replicas_every={EVERY}", spread(shares), "every")
    shape = {"replicas_mib": layers * 12, "saves": SAVES, "verified_mib": layers * 12}
    return shape | {"widths": WIDTHS, "figures": figures}


if __name__ == "__main__":
    bench.main("checked", measure, {"repeats": 1, "layers": 2}, repeats=5, layers=20)
