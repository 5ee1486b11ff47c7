"""Saving and loading a sharded training state: anyrank beside its peers, in one run.

    python benchmarks/save.py                # 1008 MiB of parameters and Adam state, 4 ranks
    python benchmarks/save.py --quick        # small, 2 ranks, nothing is written

Every contender of every repetition runs in fresh processes; within a repetition they take turns.
Saves count until the bytes are on the disk, which nobody else writes to then; loads start from
files in the page cache. As much memory as is needed is touched and freed before (`launch.py`).
Memory is that of one more run, as watching it takes time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterable
from typing import Any

from figures import in_turn, keep, ratios
from launch import Launcher
from machine import describe_machine
from save_contenders import SAVES, run_load, run_save

LOADS = {
    "dcp": "dcp.load, no check",
    "size": "anyrank, verify=False",
    "full": "anyrank, verify=True",
}
MIB = 1 << 20
GOALS = (
    # what, contender, measured against, field, at most
    ("save / dcp.save", "anyrank", "dcp", "seconds", 0.7),
    ("save / each rank its bytes", "anyrank", "hand", "seconds", 1.15),
    ("save / torch.save on rank 0", "anyrank", "rank0", "seconds", 0.35),
    ("stall / dcp.async_save", "anyrank_background", "dcp_async", "stall_seconds", 0.35),
    ("durable / dcp.async_save", "anyrank_background", "dcp_async", "seconds", 1.5),
)
MAX_LOAD = 1.0


def measure_save(
    launcher: Launcher, size: int, layers: int, kind: str, folder: str, sample: bool
) -> Any:
    """Seconds until it is durable and of stall, or with `sample` memory beyond the shares."""
    os.sync()
    given = (kind, folder, layers)
    outcome = launcher.run(
        size, run_save, *given, sample=sample, warm_bytes=2 * state_bytes(layers)
    )
    if outcome.error:
        return {"error": outcome.error.strip().splitlines()[-1]}
    tables = outcome.stages[1]
    if sample:
        return {"beyond_mib": (outcome.peak_bytes - outcome.baseline_bytes) / size / MIB}
    return {
        "seconds": max(table["seconds"] for table in tables),
        "stall_seconds": max(table["stall_seconds"] for table in tables),
    }


def state_bytes(layers: int) -> int:
    """Of parameters and Adam state on all ranks together."""
    return layers * 48 * MIB


def measure_load(launcher: Launcher, size: int, layers: int, kind: str, folder: str) -> Any:
    """Seconds until the state is there, and the sum of all its values."""
    warm = 2 * state_bytes(layers)
    outcome = launcher.run(size, run_load, kind, folder, layers, warm_bytes=warm)
    if outcome.error:
        return {"error": outcome.error.strip().splitlines()[-1]}
    tables = outcome.stages[1]
    seconds = max(table["seconds"] for table in tables)
    return {"seconds": seconds, "sum": sum(table["sum"] for table in tables)}


def repetition(
    launcher: Launcher, size: int, layers: int, loads: Iterable[int], number: int
) -> dict[str, Any]:
    """Every contender once; each repetition begins with another one."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="anyrank-save-") as top:
        for kind in in_turn(SAVES, number):
            folder = f"{top}/{kind}"
            found[kind] = measure_save(launcher, size, layers, kind, folder, False)
            if number == 0:
                other = f"{folder}-watched"
                found[kind] |= measure_save(launcher, size, layers, kind, other, True)
                shutil.rmtree(other, ignore_errors=True)
            if kind not in ("dcp", "anyrank"):
                shutil.rmtree(folder, ignore_errors=True)
        for other in loads:
            for kind in LOADS:
                source = f"{top}/{'dcp' if kind == 'dcp' else 'anyrank'}"
                found[f"{kind} {size}->{other}"] = measure_load(
                    launcher, other, layers, kind, source
                )
    return found


def ratio(runs: list[dict[str, Any]], ours: str, theirs: str, field: str) -> dict[str, Any]:
    """The ratio within each repetition."""
    able = [run for run in runs if field in run[ours]]
    return ratios((run[ours][field] for run in able), (run[theirs][field] for run in able))


def summarise(runs: list[dict[str, Any]], size: int, loads: Iterable[int]) -> dict[str, Any]:
    """Medians, and the goals with what was reached."""
    rows = {
        kind: {
            field: statistics.median(run[kind][field] for run in runs if field in run[kind])
            for field in runs[0][kind]
            if field not in ("sum", "error")
        }
        for kind in runs[0]
    }
    goals = [
        (what, ratio(runs, mine, peer, field), most) for what, mine, peer, field, most in GOALS
    ]
    for other in loads:
        what = f"load {size}->{other}, every byte verified / dcp.load"
        mine, peer = f"full {size}->{other}", f"dcp {size}->{other}"
        goals.append((what, ratio(runs, mine, peer, "seconds"), MAX_LOAD))
    table = [{"what": what, **found, "goal": most} for what, found, most in goals]
    return {"rows": rows, "ratios": table}


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=21, help="of 16 MiB, times three with Adam")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 ranks, 2 layers, nothing is kept")
    options = parser.parse_args()
    loads = [4, 2, 3]
    if options.quick:
        options.ranks, options.layers, options.repeats, loads = 2, 2, 1, [2, 1]
    launcher = Launcher("preload")
    runs: list[dict[str, Any]] = []
    for number in range(options.repeats):
        runs.append(repetition(launcher, options.ranks, options.layers, loads, number))
        print(number, json.dumps(runs[-1]), flush=True)
    summary = summarise(runs, options.ranks, loads)
    for row in summary["ratios"]:
        print(
            f"{row['what']}: {row['median']:.2f} ({row['least']:.2f}-{row['most']:.2f}), "
            f"goal {row['goal']}"
        )
    names = {kind: title for kind, (title, _) in SAVES.items()}
    names |= {f"load {kind}": title for kind, title in LOADS.items()}
    shape = {"ranks": options.ranks, "layers": options.layers, "mib": options.layers * 48}
    result = describe_machine() | shape | {"titles": names, "n": len(runs)} | summary
    if not options.quick:
        keep("save", result)


if __name__ == "__main__":
    main()
