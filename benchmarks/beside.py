"""anyrank of the working tree beside that of a commit, in turns: is it slower, or hungrier?

    python benchmarks/beside.py                        # beside the last commit
    python benchmarks/beside.py --commit 2b37ea3       # beside an older one
    python benchmarks/beside.py --cases save call      # those that begin with these words
    python benchmarks/beside.py --quick                # once each, nothing is written

Each side is a process of its own with its own `src`, that starts fresh ranks for every run; all
run the jobs of this file, which use what is public, and in `call` the ranks' agreement. A third
side is the commit once more: its time beside itself is what chance makes of a ratio. Seconds are
those of the slowest rank, CPU seconds those of all ranks. Memory is that of one more run, as
watching it takes time: the peaks of what the ranks add (`RssAnon`), from inputs that are there
already.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench
import torch
from bench import HERE, MIB, Case, Run, median, ratios, tell
from exact import ROWS, Stepper
from exact import WIDTH as STEP_WIDTH
from integrations import RANKS, train
from launch import Launcher, Table, settle, timed
from models import linears, sharded
from safetensors.torch import save_file
from save_contenders import SAVES, make_state
from sync import ends_of
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import PeakMemory
from anyrank.world.ranks import open_ranks

Job = Callable[..., Any]
WIDTH, LAYERS = 2048, 16  # of a model that is loaded: 256 MiB in float32
SMALL = 1024  # elements of a small tensor


def once(run: Callable[[], Any], is_watched: bool) -> Table:
    """One call, its ranks beginning together."""
    settle()
    return timed(run, is_watched)


def in_a_row(run: Callable[[], Any], number: int, is_watched: bool) -> Table:
    """Many calls on ranks that are connected: the median of one, after the first quarter."""
    ends: list[tuple[float, float]] = [(time.perf_counter(), time.process_time())]
    with PeakMemory() if is_watched else nullcontext() as host:
        for _ in range(number):
            run()
            ends.append((time.perf_counter(), time.process_time()))
    late = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends[number // 4 :])]
    return medians(late) | ({"peak_bytes": host.peak_bytes} if host else {})


def medians(steps: list[tuple[float, float]]) -> Table:
    """Of wall and CPU seconds."""
    walls, cpus = zip(*steps, strict=True)
    return {"seconds": statistics.median(walls), "cpu": statistics.median(cpus)}


# -- jobs: each gets a folder of its own, beside the files that are there for all ------------------


def load(folder: Path, is_watched: bool, kind: str) -> Table:
    """A model of large matrices, whole on each rank, or sharded by rows or columns."""
    with torch.device("cpu" if kind == "whole" else "meta"):
        model: Any = linears([WIDTH] * LAYERS)
    if kind == "whole":
        model = DistributedDataParallel(model)
    else:
        placement = Shard(0 if kind == "rows" else 1)
        sharded(model, (), shard_placement_fn=lambda _: placement).to_empty(device="cpu")
    return once(lambda: anyrank.load(model, folder.parent / "large.safetensors"), is_watched)


def load_small(folder: Path, is_watched: bool, number: int) -> Table:
    """One module of many small tensors."""
    model: Any = nn.Module()
    for n in range(number):
        model.register_parameter(str(n), nn.Parameter(torch.zeros(SMALL)))
    return once(lambda: anyrank.load(model, folder.parent / f"{number}.safetensors"), is_watched)


def call(folder: Path, is_watched: bool) -> Table:
    """A call with one agreement and nothing to do."""

    def run() -> None:
        with open_ranks(None, "benchmark") as ranks:
            ranks.run("nothing", lambda: 0)

    return in_a_row(run, 200, is_watched)


def sync(folder: Path, is_watched: bool) -> Table:
    """FSDP2 into tensor parallel on the same ranks, many times."""
    dst, src = ends_of(256, ([*range(4)], [*range(4)]))
    kept = getattr(anyrank, "Sync", None)  # older ones keep what they planned by themselves
    return in_a_row(kept(dst, src) if kept else lambda: anyrank.sync(dst, src), 8, is_watched)


def save(folder: Path, is_watched: bool, kind: str) -> Table:
    """192 MiB of parameters and Adam's state; in the background it is the stall that counts."""
    state = make_state([WIDTH] * 4)
    stalls: list[float | None] = []
    found = once(lambda: stalls.append(SAVES[kind][1](state, str(folder / "run"))), is_watched)
    return found | ({"seconds": stalls[0]} if stalls[0] else {})


def resume(folder: Path, is_watched: bool) -> Table:
    """What the same ranks have saved, every byte checked."""
    state = make_state([WIDTH] * 4)
    SAVES["anyrank"][1](state, str(folder / "run"))
    state[1].state.clear()

    def run() -> None:
        with anyrank.Checkpoints(folder / "run", anyrank.TrainState(*state)) as ckpts:
            ckpts.resume("must")

    return once(run, is_watched)


def save_compared(folder: Path, is_watched: bool) -> Table:
    """48 MiB on each rank that are equal, written once, and compared for it."""
    state = anyrank.TrainState(*make_state([WIDTH], is_sharded=False))
    with anyrank.Checkpoints(folder / "run", state, replicas_every=1) as ckpts:
        return once(ckpts.save, is_watched)


def convert(folder: Path, is_watched: bool, is_run: bool) -> Table:
    """A file cast to bfloat16, or a run's weights, into a file."""
    source, dtype = folder.parent / "large.safetensors", "bfloat16"
    if is_run:
        source, dtype = folder / "run", None
        with anyrank.Checkpoints(source, anyrank.TrainState(linears([WIDTH] * LAYERS))) as ckpts:
            ckpts.save()
    return once(lambda: anyrank.convert(source, folder / "x.safetensors", dtype=dtype), is_watched)


def verify(folder: Path, is_watched: bool) -> Table:
    """A run of 192 MiB: every checksum."""
    with anyrank.Checkpoints(
        folder / "run", anyrank.TrainState(*make_state([WIDTH] * 4, is_sharded=False))
    ) as ckpts:
        ckpts.save()
    return once(lambda: anyrank.verify(folder / "run"), is_watched)


def step(folder: Path, is_watched: bool, name: str, rounds: int) -> Table:
    """Forward, backward and exchange of a step that the loader gives."""
    stepper = Stepper(name, rounds, STEP_WIDTH, ROWS, 4)

    def run() -> None:
        stepper.prepared()()
        stepper.net.zero_grad()

    found = in_a_row(run, 12, is_watched)
    stepper.loader.close()
    return found


def framework(folder: Path, is_watched: bool, name: str) -> Table:
    """Short steps of a framework."""
    with PeakMemory() if is_watched else nullcontext() as host:
        found = medians(train(name, "four layers", str(folder / "run")))
    return found | ({"peak_bytes": host.peak_bytes} if host else {})


def tiles(folder: Path, is_watched: bool) -> Table:
    """An MLP in 16 tiles, forward and backward."""
    up, down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)
    mlp = anyrank.tile(nn.Sequential(up, nn.GELU(), down), chunk_size=128, in_dims=0, out_dims=0)
    rows = torch.randn(2048, 1024, requires_grad=True)
    return once(lambda: mlp(rows).square().mean().backward(), is_watched)


# What is compared -> ranks, job and its arguments.
CASES: dict[str, tuple[int, Job, tuple[Any, ...]]] = {
    "load whole, 256 MiB on each of 4 ranks": (4, load, ("whole",)),
    "load rows, 256 MiB over 4 ranks": (4, load, ("rows",)),
    "load columns, 256 MiB over 4 ranks": (4, load, ("columns",)),
    "load 20,000 tensors of 4 KiB, 1 rank": (1, load_small, (20_000,)),
    "load 10,000 tensors of 4 KiB, 2 ranks": (2, load_small, (10_000,)),
    "call with one agreement, 2 ranks": (2, call, ()),
    "call with one agreement, 4 ranks": (4, call, ()),
    "sync 256 MiB, the same 4 ranks": (4, sync, ()),
    "save 192 MiB, 4 ranks": (4, save, ("anyrank",)),
    "save in the background, its stall": (4, save, ("anyrank_background",)),
    "resume 192 MiB, checked, 4 ranks": (4, resume, ()),
    "save 48 MiB under DDP, compared, 4 ranks": (4, save_compared, ()),
    "convert 256 MiB into bfloat16": (1, convert, (False,)),
    "convert a run of 256 MiB": (1, convert, (True,)),
    "verify a run of 192 MiB": (1, verify, ()),
    "step under DDP, 2 ranks, 3 microbatches": (2, step, ("ddp stock", 3)),
    "step with exact=True, DDP, 4 ranks": (4, step, ("ddp exact", 3)),
    "step with exact=True, FSDP2, 4 ranks": (4, step, ("fsdp exact", 3)),
    "step of 25 ms, Accelerate": (RANKS, framework, ("accelerate",)),
    "step of 25 ms, Lightning": (RANKS, framework, ("lightning",)),
    "step of 25 ms, Trainer": (RANKS, framework, ("transformers",)),
    "tile, 16 tiles of an MLP": (1, tiles, ()),
}


# -- sides ----------------------------------------------------------------------------------------


class Side:
    """A process that runs the jobs with the `src` of one commit.

    Args:
        root: the checkout.
        folder: in which its runs get folders of their own.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(root / "src")],
            env=os.environ | {"PYTHONPATH": str(root / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, case: str, is_watched: bool) -> Run:
        """One run of a case on fresh ranks."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            print(json.dumps([case, folder, is_watched]), file=self.process.stdin, flush=True)
            for line in self.process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"{case}: the side of {self.folder.name} has ended")

    def close(self) -> None:
        """It ends with its input."""
        self.process.communicate()


ANSWER = "answer: "


def serve(source: str) -> None:
    """What the process of a side does: each line names a case."""
    if not Path(anyrank.__file__).is_relative_to(source):
        raise RuntimeError(f"{anyrank.__file__} was imported, and not that of {source}")
    launcher = Launcher("beside")
    for line in sys.stdin:
        case, folder, is_watched = json.loads(line)
        size, job, given = CASES[case]
        tables = launcher.values(size, job, Path(folder), is_watched, *given)
        found = {"seconds": max(table["seconds"] for table in tables)}
        found["cpu"] = sum(table["cpu"] for table in tables)
        found["memory"] = sum(table.get("peak_bytes", 0) for table in tables)
        print(ANSWER + json.dumps(found), flush=True)


# -- the command ----------------------------------------------------------------------------------


@contextmanager
def sides(commit: str) -> Iterator[dict[str, Side]]:
    """The process of the working tree and two of a commit, with the files that are loaded."""
    with tempfile.TemporaryDirectory(prefix="anyrank-beside-") as top:
        roots = {"new": HERE.parent, "old": Path(top, "old"), "again": Path(top, "old")}
        roots["old"].mkdir()
        given = ["git", "-C", str(HERE.parent), "archive", commit, "src"]
        packed = subprocess.run(given, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "x", "-C", str(roots["old"])], input=packed, check=True)
        found: dict[str, Side] = {}
        try:
            for name, root in roots.items():
                runs = Path(top, f"runs-{name}")
                runs.mkdir()
                write_files(runs)
                found[name] = Side(root, runs)
            yield found
        finally:
            for side in found.values():
                side.close()


def write_files(folder: Path) -> None:
    """What is loaded: large matrices, and many small tensors."""
    large = {f"{n}.weight": torch.randn(WIDTH, WIDTH) for n in range(LAYERS)}
    save_file(large, folder / "large.safetensors")
    for number in (20_000, 10_000):
        small = {str(n): torch.randn(SMALL) for n in range(number)}
        save_file(small, folder / f"{number}.safetensors")


# Ratios are of runs in the same repetition: new / old, and the commit's own `again` / old.
COLUMNS = [
    *("case", "new sec", "old sec", "ratio", "least", "most", "CPU ratio"),
    *("again", "again least", "again most", "again CPU", "new MiB", "old MiB"),
]


def row_of(case: str, by_name: dict[str, Side], repeats: int) -> list[Any]:
    """All sides of a case, as `COLUMNS` has them."""
    runs = Case(case, by_name, lambda name, _: by_name[name].run(case, False)).run(repeats, warm=1)
    row: list[Any] = [case, *(round(median(runs[name], "seconds"), 4) for name in ("new", "old"))]
    for name in ("new", "again"):
        wall, cpu = (ratios(runs[name], runs["old"], figure) for figure in ("seconds", "cpu"))
        row += [round(wall[figure], 2) for figure in ("median", "least", "most")]
        row += [round(cpu["median"], 2)]
    return row + [round(by_name[name].run(case, True)["memory"] / MIB) for name in ("new", "old")]


def measure(options: argparse.Namespace, _: Launcher) -> Run:
    """All cases, in order."""
    if options.serve:
        serve(options.serve)
        return {}
    chosen = [case for case in CASES if case.startswith(tuple(options.cases))]
    rows: list[list[Any]] = []
    with sides(options.commit) as by_name:
        for case in chosen:
            rows.append(row_of(case, by_name, options.repeats))
            tell("row", rows[-1])
    name = ["git", "-C", str(HERE), "rev-parse", "--short", options.commit]
    commit = subprocess.run(name, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return {"beside": commit, "repeats": options.repeats, "columns": COLUMNS, "rows": rows}


if __name__ == "__main__":
    options: dict[str, Any] = {"commit": "HEAD", "cases": [""], "repeats": 9, "serve": None}
    bench.main("beside", measure, {"repeats": 1}, ["cases", "serve"], **options)
