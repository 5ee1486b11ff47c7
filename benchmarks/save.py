"""Saving and loading a sharded training state: anyrank beside its peers, in one run.

    python benchmarks/save.py                # 1008 MiB of parameters and Adam state, 4 ranks
    python benchmarks/save.py --quick        # small, 2 ranks, nothing is written

Every contender of every repetition runs in fresh processes; within a repetition they take turns.
Saves count until the bytes are on the disk, which nobody else writes to then; loads start from
files in the page cache. As much memory as is needed is touched and freed before. Memory is that of
one more run, as watching it takes time. A layer has 16 MiB, three times that with Adam's state.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings

import bench
import torch.distributed as dist
from bench import MIB, Case, Run, Runs, median, ratios, tell
from launch import Launcher, Outcome, Stages, settle
from save_contenders import SAVES, load_dcp, local_tensors, make_state

import anyrank

LOADS = {
    "dcp": "dcp.load, no check",
    "size": "anyrank, verify=False",
    "full": "anyrank, verify=True",
}
WIDTH = 2048
GOALS = (
    # what, contender, measured against, figure, at most
    ("save / dcp.save", "anyrank", "dcp", "seconds", 0.7),
    ("save / each rank its bytes", "anyrank", "hand", "seconds", 1.15),
    ("save / torch.save on rank 0", "anyrank", "rank0", "seconds", 0.35),
    ("stall / dcp.async_save", "anyrank_background", "dcp_async", "stall_seconds", 0.35),
    ("durable / dcp.async_save", "anyrank_background", "dcp_async", "seconds", 1.5),
)
MAX_LOAD = 1.0


def save(kind: str, folder: str, layers: int) -> Stages:
    """One save on fresh ranks; see `Launcher.run`."""
    warnings.simplefilter("ignore")
    state = make_state(layers, WIDTH, is_sharded=kind != "accelerate")
    settle()
    dist.barrier()
    yield {}
    start = time.perf_counter()
    stall = SAVES[kind][1](state, folder)
    yield {"seconds": time.perf_counter() - start, "stall_seconds": stall or 0.0}


def load(kind: str, folder: str, layers: int) -> Stages:
    """One load of the whole state, into objects as a new process has them."""
    warnings.simplefilter("ignore")
    state = make_state(layers, WIDTH)
    state[1].state.clear()  # a new process has none, and each contender makes its own
    state[1].zero_grad()
    settle()
    dist.barrier()
    yield {}
    start = time.perf_counter()
    if kind == "dcp":
        load_dcp(state, folder)
    else:
        whole, verify = anyrank.TrainState(*state), kind == "full"
        with anyrank.Checkpoints(folder, whole, verify=verify) as ckpts:
            ckpts.resume("must")
    seconds = time.perf_counter() - start
    yield {
        "seconds": seconds,
        "sum": sum(float(one.double().sum()) for one in local_tensors(state)),
    }


def state_bytes(layers: int) -> int:
    """Of parameters and Adam state on all ranks together."""
    return layers * 48 * MIB


def figures_of(outcome: Outcome) -> Run:
    """The highest of all ranks, or why there is none."""
    if outcome.error:
        return {"error": outcome.error.strip().splitlines()[-1]}
    tables = outcome.stages[1]
    return {figure: max(table[figure] for table in tables) for figure in tables[0]}


def measure(options: argparse.Namespace) -> Run:
    """Saves, then loads of what two of them saved."""
    launcher, size, layers = Launcher("save"), options.ranks, options.layers
    warm = 2 * state_bytes(layers)
    moves = [f"{kind} {size}->{other}" for other in options.loads for kind in LOADS]
    with tempfile.TemporaryDirectory(prefix="anyrank-save-") as top:

        def save_once(kind: str, number: int) -> Run:
            folder = f"{top}/{kind}-{number}"
            os.sync()
            found = figures_of(launcher.run(size, save, kind, folder, layers, warm_bytes=warm))
            if number == 0:
                given = (kind, f"{folder}-watched", layers)
                outcome = launcher.run(size, save, *given, sample=True, warm_bytes=warm)
                found["beyond_mib"] = outcome.added_bytes / size / MIB
                shutil.rmtree(given[1], ignore_errors=True)
            if kind not in ("dcp", "anyrank") or number < options.repeats - 1:
                shutil.rmtree(folder, ignore_errors=True)
            return found

        def load_once(move: str, number: int) -> Run:
            kind, other = move.split(f" {size}->")
            folder = f"{top}/{'dcp' if kind == 'dcp' else 'anyrank'}-{options.repeats - 1}"
            given = (kind, folder, layers)
            return figures_of(launcher.run(int(other), load, *given, warm_bytes=warm))

        runs = Case("save", SAVES, save_once).run(options.repeats)
        runs |= Case("load", moves, load_once).run(options.repeats)
    titles = {kind: title for kind, (title, _) in SAVES.items()}
    titles |= {f"load {kind}": title for kind, title in LOADS.items()}
    shape: Run = {"ranks": size, "layers": layers, "mib": state_bytes(layers) // MIB}
    shape |= {"titles": titles, "n": options.repeats}
    shape |= {"rows": rows_of(runs), "ratios": ratios_of(runs, size, options.loads)}
    return shape | {"goals": goals_of(shape)}


def goals_of(result: Run) -> list[Run]:
    """The memory that saves may take, and what they did; ratios have their goals beside them."""
    beyond = {
        kind: result["rows"][kind]["beyond_mib"] for kind in ("anyrank", "anyrank_background")
    }
    share = result["mib"] / result["ranks"]
    return [
        bench.goal("MiB a rank beyond the share", beyond["anyrank"], 64),
        bench.goal("the same in the background", beyond["anyrank_background"], share + 64),
    ]


def rows_of(runs: Runs) -> dict[str, Run]:
    """The medians of each contender."""
    figures = ("seconds", "stall_seconds", "beyond_mib")
    return {
        kind: {
            figure: median([run for run in of if figure in run], figure)
            for figure in figures
            if any(figure in run for run in of)
        }
        for kind, of in runs.items()
    }


def ratios_of(runs: Runs, size: int, loads: list[int]) -> list[Run]:
    """The goals, with what was reached in each repetition."""
    wanted = [*GOALS]
    for other in loads:
        what = f"load {size}->{other}, every byte verified / dcp.load"
        wanted.append((what, f"full {size}->{other}", f"dcp {size}->{other}", "seconds", MAX_LOAD))
    rows: list[Run] = []
    for what, ours, theirs, figure, most in wanted:
        pairs = zip(runs[ours], runs[theirs], strict=True)
        both = [pair for pair in pairs if all(figure in run for run in pair)]
        mine, peers = zip(*both, strict=True)
        rows.append({"what": what, **ratios(mine, peers, figure), "goal": most})
        tell("ratio", rows[-1])
    return rows


if __name__ == "__main__":
    small = {"ranks": 2, "layers": 2, "repeats": 1, "loads": [2, 1]}
    bench.main("save", measure, small, ranks=4, layers=21, repeats=5, loads=[4, 2, 3])
