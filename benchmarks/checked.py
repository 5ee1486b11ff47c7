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
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from typing import Any
from unittest.mock import patch

import bench
import torch
from bench import Case, Run, ratios, spread, tell
from launch import Launcher
from models import linears, wrapped
from save import figures_of, load, state_bytes
from save_contenders import SAVES, make_state

import anyrank
from anyrank.runs.resume import checkpoints
from anyrank.runs.saving import collect

SAVES_IN_A_ROW = 10  # of which nine compare all of the replicas
STEPS, EVERY, ROWS = 10, 100, 64  # of a training that compares once
WIDTH, WIDTHS = 1024, [512, 1024, 768, 1536]
SAVED_ON, RESUMED_ON = 4, (1, 2, 3)
GOALS = {"replicas": 0.1, "every": 0.01, "verified": 1.1, "extra": 0.02}


@contextlib.contextmanager
def seconds_in(module: Any, name: str) -> Generator[list[float]]:
    """The seconds of each call of a module's function, as long as this lasts."""
    inner, spent = getattr(module, name), list[float]()

    def clocked(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return inner(*arguments)
        finally:
            spent.append(time.perf_counter() - start)

    with patch.object(module, name, clocked):
        yield spent


def compare_in_saves(path: str, widths: Sequence[int]) -> float:
    """The comparisons' part of ten saves of a model that both ranks hold whole."""
    state = anyrank.TrainState(*make_state(widths, is_sharded=False))
    with (
        seconds_in(collect, "find_differing_replicas") as spent,
        anyrank.Checkpoints(path, state) as ckpts,
    ):
        start = time.perf_counter()
        for number in range(SAVES_IN_A_ROW):
            state.step = number + 1
            ckpts.save()
        return sum(spent) / (time.perf_counter() - start)


def compare_in_steps(path: str, widths: Sequence[int]) -> float:
    """One comparison under DDP over `EVERY` median steps without it, on this rank."""
    model = wrapped("ddp", linears(widths), ())
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
    return sum(spent) / (EVERY * statistics.median(steps[1:]))


def save(path: str, widths: Sequence[int]) -> None:
    """A run that resumes will read."""
    SAVES["anyrank"][1](make_state(widths), path)


# What comparing replicas takes -> its job, and its goal.
COMPARED = {
    "replicas": (compare_in_saves, "replicas"),
    f"replicas_every={EVERY}": (compare_in_steps, "every"),
}


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """Every figure, beside its goal."""
    widths, repeats = [WIDTH] * options.layers, options.repeats
    figures: dict[str, Any] = {}

    def record(name: str, figure: Run, goal: str) -> None:
        figures[name] = figure | {"goal": GOALS[goal]}
        tell(name, figures[name])

    with tempfile.TemporaryDirectory(prefix="anyrank-checked-") as top:
        launcher.values(2, save, f"{top}/verified", widths)
        for ranks, from_disk in ((2, False), (1, False), (2, True), (1, True)):
            given = (f"{top}/verified", widths, from_disk)

            def resume(way: str, _: int, ranks: int = ranks, given: Any = given) -> Run:
                return figures_of(launcher.run(ranks, load, way, *given))

            runs = Case("resume", ("full", "size"), resume).run(3 * repeats, warm=1)
            for clock, figure in (("clock", "seconds"), ("cpu", "cpu")):
                where = ", from the disk" if from_disk else ""
                what = f"verified, saved on 2, resumed on {ranks}{where}, {clock}"
                record(what, ratios(runs["full"], runs["size"], figure), "verified")
        launcher.values(SAVED_ON, save, f"{top}/extra", WIDTHS)
        for ranks in RESUMED_ON:
            run = figures_of(launcher.run(ranks, load, "full", f"{top}/extra", WIDTHS))
            beyond = run["bytes_read"] / state_bytes(WIDTHS) - 1
            what = f"bytes beyond, saved on {SAVED_ON}, resumed on {ranks}"
            record(what, spread([beyond]), "extra")

        def compare(way: str, number: int) -> Run:
            job, _ = COMPARED[way]
            return {"part": max(launcher.values(2, job, f"{top}/{way}-{number}", widths))}

        for way, runs in Case("compare", COMPARED, compare).run(repeats).items():
            record(way, spread(run["part"] for run in runs), COMPARED[way][1])
    mib = options.layers * 12
    shape = {"replicas_mib": mib, "saves": SAVES_IN_A_ROW, "verified_mib": mib}
    return shape | {"widths": WIDTHS, "figures": figures}


if __name__ == "__main__":
    bench.main("checked", measure, {"repeats": 1, "layers": 2}, repeats=5, layers=20)
