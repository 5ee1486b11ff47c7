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
import warnings
from collections.abc import Sequence
from pathlib import Path

import bench
from bench import MIB, Case, Run, Runs, known, median, ratios, tell
from launch import Launcher, Outcome, Stages, meet, settle, timed
from save_contenders import SAVES, load_dcp, make_state

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


def save(kind: str, folder: str, widths: Sequence[int], is_watched: bool = False) -> Stages:
    """One save on fresh ranks; see `Launcher.run`."""
    warnings.simplefilter("ignore")
    state = make_state(widths, is_sharded=kind != "accelerate")
    settle()
    meet()
    yield {}
    stall: list[float | None] = []
    table = timed(lambda: stall.append(SAVES[kind][1](state, folder)), is_watched)
    yield table | {"stall_seconds": stall[0] or 0.0}


def load(kind: str, folder: str, widths: Sequence[int], from_disk: bool = False) -> Stages:
    """One load of the whole state, into objects as a new process has them.

    Args:
        kind: of LOADS.
        folder: of one save; for anyrank of a run.
        widths: of the layers.
        from_disk: the files leave the page cache before.
    """
    warnings.simplefilter("ignore")
    state = make_state(widths)
    state[1].state.clear()  # a new process has none, and each contender makes its own
    for file in Path(folder).rglob("*.*") if from_disk else ():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    found: Run = {"bytes_read": 0}

    def resume() -> None:
        if kind == "dcp":
            load_dcp(state, folder)
            return
        whole, verify = anyrank.TrainState(*state), kind == "full"
        with anyrank.Checkpoints(folder, whole, verify=verify) as ckpts:
            report = ckpts.resume("must")
            assert report is not None
            found["bytes_read"] = sum(report.bytes_read)

    settle()
    meet()
    yield {}
    table = timed(resume)
    yield table | found


def state_bytes(widths: Sequence[int]) -> int:
    """Of parameters and Adam state on all ranks together."""
    return sum(3 * 4 * width * width for width in widths)


def figures_of(outcome: Outcome) -> Run:
    """The highest of all ranks, or why there is none."""
    if outcome.error:
        return {"error": outcome.error.strip().splitlines()[-1]}
    tables = outcome.stages[1]
    return {figure: max(table[figure] for table in tables) for figure in tables[0]}


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """Saves, then loads of what two of them saved."""
    size, widths = options.ranks, [options.width] * options.layers
    warm = 2 * state_bytes(widths)
    kinds = [kind for kind in LOADS if kind != "dcp" or kind in options.ways]
    moves = [f"{kind} {size}->{other}" for other in options.loads for kind in kinds]
    with tempfile.TemporaryDirectory(prefix="anyrank-save-") as top:

        def save_once(kind: str, number: int) -> Run:
            folder = f"{top}/{kind}-{number}"
            if options.repeats > 1:  # else no figure is compared, and others may have much to write
                os.sync()
            found = figures_of(launcher.run(size, save, kind, folder, widths, warm_bytes=warm))
            if number == 0:
                given = (kind, f"{folder}-watched", widths, True)
                watched = figures_of(launcher.run(size, save, *given, warm_bytes=warm))
                found["beyond_mib"] = watched["host_bytes"] / MIB
                found["peak_mib"] = watched["peak_bytes"] / MIB
                shutil.rmtree(given[1], ignore_errors=True)
            if kind not in ("dcp", "anyrank") or number < options.repeats - 1:
                shutil.rmtree(folder, ignore_errors=True)
            return found

        def load_once(move: str, number: int) -> Run:
            kind, other = move.split(f" {size}->")
            folder = f"{top}/{'dcp' if kind == 'dcp' else 'anyrank'}-{options.repeats - 1}"
            outcome = launcher.run(int(other), load, kind, folder, widths, warm_bytes=warm)
            return figures_of(outcome)

        runs = Case("save", options.ways, save_once).run(options.repeats)
        runs |= Case("load", moves, load_once).run(options.repeats)
    titles = {kind: SAVES[kind][0] for kind in options.ways}
    titles |= {f"load {kind}": title for kind, title in LOADS.items()}
    shape: Run = {"ranks": size, "layers": options.layers, "mib": state_bytes(widths) // MIB}
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
    figures = ("seconds", "stall_seconds", "beyond_mib", "peak_mib")
    return {
        kind: {name: round(median(of, name), 4) for name in figures if known(of, name)}
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
        if found := ratios(runs.get(ours, ()), runs.get(theirs, ()), figure):
            rows.append({"what": what, **found, "goal": most})
            tell("ratio", rows[-1])
    return rows


if __name__ == "__main__":
    small = {"ranks": 2, "layers": 2, "repeats": 1, "loads": [2, 1]}
    sizes: Run = {"ranks": 4, "layers": 21, "width": WIDTH, "repeats": 5, "loads": [4, 2, 3]}
    bench.main("save", measure, small, ["ways"], ways=[*SAVES], **sizes)
