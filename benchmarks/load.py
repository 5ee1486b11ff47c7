"""Loading a sharded model: anyrank against its peers and a hand-written minimum, in one run.

    python benchmarks/load.py                        # everything: see docs/benchmarks.md
    python benchmarks/load.py --quick                # 0.1 GiB, two ranks, one repetition
    python benchmarks/load.py --contenders hand anyrank --ranks 4 --dtype bf16 --layout fsdp

Every contender of every repetition runs in fresh processes; within a repetition they take turns.
The model is a random one of --gib GiB, or a folder of bf16 safetensors, --model. HSDP and DDP run
on 4 ranks. Memory takes repetitions of its own, as watching it takes time.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import bench
from bench import GIB, MIB, Case, Run, Runs, known, meminfo, ratios, spread, tell, warm_files
from contenders import CONTENDERS, run
from launch import Launcher, Outcome
from models import make_model, model_numel, weight_map

OPTIONS: dict[str, Any] = {
    "ranks": [2, 4, 8],
    "dtype": ["bf16", "fp32"],
    "layout": ["fsdp", "hsdp", "ddp"],
    "contenders": [*CONTENDERS],
    "repeats": 5,
    "memory_repeats": 2,
    "gib": 1.4,
    "model": None,
}
QUICK = {"gib": 0.1, "ranks": [2], "repeats": 1, "memory_repeats": 1}
OTHER_RANKS = 4  # hsdp and ddp are measured at one size
MAX_MEMORY = 0.8  # of what is available
GOALS = (
    # what, contender that it is measured against, at most
    ("time / hand-written minimum", "hand", 1.0),
    ("time / DCP reader", "dcp", 0.8),
    ("time / rank 0 + broadcast", "rank0", 0.33),
)
MAX_PEAK, MAX_BEYOND_MIB = 1.03, 16.0
Group = tuple[str, str, int]  # layout, dtype, ranks: runs that are compared with one another


def groups_of(options: argparse.Namespace) -> list[Group]:
    """What is measured, in order."""
    other = OTHER_RANKS if OTHER_RANKS in options.ranks else options.ranks[-1]
    return [
        (layout, dtype, size)
        for layout in options.layout
        for dtype in options.dtype
        for size in (options.ranks if layout == "fsdp" else [other])
    ]


def name_of(group: Group) -> str:
    """As it stands in the results."""
    return " ".join(map(str, group))


def need_bytes(group: Group, name: str, numel: int) -> int:
    """Private memory that a contender takes, at its highest, roughly."""
    layout, dtype, size = group
    fixed, per_rank = CONTENDERS[name].full_copies
    copies = fixed + per_rank * size
    if layout != "fsdp":
        copies = max(copies, 1.1 * (2 if layout == "hsdp" else size))
    return round(copies * numel * (2 if dtype == "bf16" else 4))


def figures_of(outcome: Outcome, size: int, is_watched: bool) -> Run:
    """A run in numbers."""
    if outcome.error:
        print(outcome.error, file=sys.stderr)
        return {"not_run": outcome.error.strip().splitlines()[-1]}
    prepared, loaded, checked = outcome.stages
    found: Run = {
        "usable_sec": max(table["seconds"] for table in loaded),
        "prepared_sec": max(table["prepared_sec"] for table in prepared),
        "wrong": sorted({name for table in checked for name in table["wrong"]}),
    }
    if is_watched:
        target = sum(table["share_bytes"] for table in checked)
        peak, host = (sum(table[of] for table in loaded) for of in ("peak_bytes", "host_bytes"))
        found["host_mib_per_rank"] = host / size / MIB
        found["peak_x"] = peak / target
        found["beyond_mib_per_rank"] = (peak - target) / size / MIB
    return found


def measure_group(
    launcher: Launcher, group: Group, names: list[str], folder: Path, options: argparse.Namespace
) -> list[Run]:
    """Every contender of a group: repetitions that take the time, and those that watch memory."""
    layout, dtype, size = group
    numel = model_numel(folder)

    def once(name: str, number: int, is_watched: bool) -> Run:
        if number >= CONTENDERS[name].repeats:
            return {}
        need = need_bytes(group, name, numel)
        if need > MAX_MEMORY * meminfo("MemAvailable"):
            return {"not_run": f"needs some {need / GIB:.0f} GiB of memory"}
        given, warm = (name, str(folder), dtype, layout, is_watched), 0 if is_watched else need
        outcome = launcher.run(size, run, *given, warm_bytes=warm)
        return figures_of(outcome, size, is_watched)

    able = [name for name in names if layout in CONTENDERS[name].layouts]
    what = name_of(group)
    timed = Case(what, able, lambda name, number: once(name, number, False)).run(options.repeats)
    watching = Case(f"{what}, memory", able, lambda name, number: once(name, number, True))
    return summarize(what, timed, watching.run(options.memory_repeats))


def summarize(group: str, timed: Runs, watched: Runs) -> list[Run]:
    """One row for each contender. Ratios are of runs in the same repetition."""
    rows: list[Run] = []
    for name, ours in timed.items():
        every = [*ours, *watched[name]]
        row: Run = {"group": group, "contender": name, "title": CONTENDERS[name].title}
        row["not_run"] = next((run["not_run"] for run in every if "not_run" in run), "")
        row["wrong"] = sorted({tensor for run in every for tensor in run.get("wrong", ())})
        others = sorted({other for _, other, _ in GOALS}) if name == "anyrank" else ["hand"]
        row["usable_sec"] = spread(known(ours, "usable_sec"))
        for other in others:
            row[f"time_x_{other}"] = ratios(ours, timed.get(other, ()), "usable_sec")
        for figure in ("peak_x", "beyond_mib_per_rank", "host_mib_per_rank"):
            row[figure] = spread(known(watched[name], figure))
        row = {figure: value for figure, value in row.items() if value}
        rows.append(row)
    return rows


def goals_of(result: Run) -> list[Run]:
    """What anyrank is to reach, and what it did."""
    wrong = sum(len(row.get("wrong", ())) for row in result["rows"])
    goals = [bench.goal("tensors that were loaded wrong, in all ways", wrong, 0)]
    for row in result["rows"]:
        if row["contender"] != "anyrank":
            continue
        wanted: list[tuple[str, float, float]] = []
        if "peak_x" in row:
            peak, beyond = row["peak_x"]["most"], row["beyond_mib_per_rank"]["most"]
            wanted.append(("peak / target bytes", peak, MAX_PEAK))
            wanted.append(("MiB beyond the shares", beyond, MAX_BEYOND_MIB))
        for what, other, most in GOALS:
            figure = f"time_x_{other}"
            if figure in row and row["group"].startswith("fsdp") and row["group"].endswith(" 4"):
                wanted.append((what, row[figure]["median"], most))
        goals += [bench.goal(f"{row['group']}: {what}", *each) for what, *each in wanted]
    return goals


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """All groups."""
    folder = Path(options.model) if options.model else make_model(options.gib)
    warm_files(folder)
    have = importlib.util.find_spec("accelerate") is not None
    names = [name for name in options.contenders if have or name != "accelerate"]
    rows = list[Run]()
    for group in groups_of(options):
        rows += measure_group(launcher, group, names, folder, options)
    for row in rows:
        tell("row", row)
    model = {
        "bf16_bytes": 2 * model_numel(folder),
        "shards": len(set(weight_map(folder).values())),
    }
    result: Run = {"model": model, "rows": rows}
    return result | {"goals": goals_of(result)}


if __name__ == "__main__":
    bench.main("load", measure, QUICK, ["ranks", "dtype", "layout", "contenders"], **OPTIONS)
