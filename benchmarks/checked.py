"""What the checks of saves and resumes cost: replicas compared, bytes verified, bytes read for it.

    python benchmarks/checked.py             # a minute on 2 to 4 ranks; results/checked.json
    python benchmarks/checked.py --repeats 3

Replicas: what comparing them takes of ten saves in a row, nine of which compare everything.
Verified: a resume with verify=True against one with verify=False, in turn, on the ranks that
saved and on one, from files in the page cache and from the disk, by the clock and by CPU time,
which on a machine with other work tells more. Extra bytes: read beyond those needed, on other
ranks than saved.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from figures import keep, spread
from machine import describe_machine, load_average
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.saving import collect
from anyrank.testing import run_ranks

MIB = 1 << 20
SAVES = 10  # of which nine compare all of the replicas
WIDTHS = [512, 1024, 768, 1536]
LAYERS = 20  # of 4 MiB, times three with Adam's state
SAVED_ON, RESUMED_ON = 4, (1, 2, 3)
LIMIT_SEC = 300.0
GOALS = {"replicas": 0.1, "verified": 1.1, "extra": 0.02}


class Resumed(NamedTuple):
    """Seconds of this rank, and bytes read by all."""

    clock: float
    cpu: float
    bytes_read: int


def build(widths: list[int], sharded: bool, stepped: bool) -> anyrank.TrainState:
    """Square layers and Adam."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(n, n, bias=False) for n in widths))
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


def job_replicas(path: str) -> float:
    """The comparisons' part of ten saves of a model that both ranks hold whole."""
    state, spent = build([1024] * LAYERS, sharded=False, stepped=True), 0.0
    compare = collect.compare_replicas

    def timed(*arguments: Any) -> list[str]:
        nonlocal spent
        start = time.perf_counter()
        try:
            return compare(*arguments)
        finally:
            spent += time.perf_counter() - start

    with (
        patch.object(collect, "compare_replicas", timed),
        anyrank.Checkpoints(path, state) as ckpts,
    ):
        for number in range(SAVES):
            state.step = number + 1
            ckpts.save()
        return spent / sum(record.seconds for record in ckpts.stats())


def job_save(path: str, widths: list[int]) -> None:
    with anyrank.Checkpoints(path, build(widths, sharded=True, stepped=True)) as ckpts:
        ckpts.save()


def resumed(path: str, widths: list[int], verify: bool, from_disk: bool = False) -> Resumed:
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
        took = time.perf_counter() - clock, time.process_time() - cpu
        assert report is not None
        return Resumed(*took, sum(report.bytes_read))


def job_verified(path: str, repeats: int, from_disk: bool) -> list[tuple[Resumed, Resumed]]:
    """Every byte verified, and sizes alone, in turn."""
    found: list[tuple[Resumed, Resumed]] = []
    for number in range(repeats + 1):  # the first one warms up
        order = (True, False) if number % 2 else (False, True)
        took = {verify: resumed(path, [1024] * LAYERS, verify, from_disk) for verify in order}
        found.append((took[True], took[False]))
    return found[1:]


def job_extra(path: str) -> int:
    return resumed(path, WIDTHS, True).bytes_read


def summary(values: list[float], goal: float) -> dict[str, float]:
    """Median, least and most of a figure, beside its goal."""
    return spread(values) | {"goal": goal}


def measure_replicas(top: str, repeats: int) -> dict[str, Any]:
    """What the comparisons take of the saves."""
    runs = [f"{top}/replicas-{number}" for number in range(repeats)]
    parts = [max(run_ranks(2, job_replicas, run, timeout=LIMIT_SEC)) for run in runs]
    return {"replicas": summary(parts, GOALS["replicas"])}


def measure_verified(top: str, repeats: int) -> dict[str, Any]:
    """Ratios of verified resumes to unverified ones; a resume takes as long as its slowest rank."""
    path, figures = f"{top}/verified", dict[str, Any]()
    run_ranks(2, job_save, path, [1024] * LAYERS, timeout=LIMIT_SEC)
    for ranks, from_disk in ((2, False), (1, False), (2, True), (1, True)):
        by_rank = run_ranks(ranks, job_verified, path, 3 * repeats, from_disk, timeout=LIMIT_SEC)
        rounds = [*zip(*by_rank, strict=True)]
        for kind in ("clock", "cpu"):
            ratios: list[float] = []
            for pairs in rounds:
                full, size = (max(getattr(r, kind) for r in of) for of in zip(*pairs, strict=True))
                ratios.append(full / size)
            where = ", from the disk" if from_disk else ""
            name = f"verified, saved on 2, resumed on {ranks}{where}, {kind}"
            figures[name] = summary(ratios, GOALS["verified"])
    return figures


def measure_extra(top: str) -> dict[str, Any]:
    """Bytes read beyond those that are needed."""
    path, needed = f"{top}/extra", sum(3 * 4 * n * n for n in WIDTHS)
    run_ranks(SAVED_ON, job_save, path, WIDTHS, timeout=LIMIT_SEC)
    found: dict[str, Any] = {}
    for ranks in RESUMED_ON:
        read = run_ranks(ranks, job_extra, path, timeout=LIMIT_SEC)[0]
        name = f"bytes beyond, saved on {SAVED_ON}, resumed on {ranks}"
        found[name] = summary([read / needed - 1], GOALS["extra"])
    return found


def measure(repeats: int) -> dict[str, Any]:
    """Every figure."""
    with tempfile.TemporaryDirectory(prefix="anyrank-checked-") as top:
        figures = measure_verified(top, repeats) | measure_extra(top)
        return figures | measure_replicas(top, repeats)


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    before = load_average()
    figures = measure(options.repeats)
    for what, row in figures.items():
        print(what, json.dumps(row), flush=True)
    shape = {
        "load_average": [before, load_average()],
        "replicas_mib": LAYERS * 12,
        "saves": SAVES,
        "verified_mib": LAYERS * 12,
        "widths": WIDTHS,
    }
    result = describe_machine() | shape | {"figures": figures}
    keep("checked", result)


if __name__ == "__main__":
    main()
