"""Loading a sharded model: anyrank against its peers and a hand-written minimum, in one run.

    python benchmarks/load.py                        # everything: see docs/benchmarks.md
    python benchmarks/load.py --quick                # a small model, two ranks, one repetition
    python benchmarks/load.py --contenders hand,anyrank --ranks 4 --dtype bf16 --layout fsdp
    python benchmarks/load.py --device cuda          # one rank on one GPU

Every contender of every repetition runs in fresh processes; within a repetition they take turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu
from contenders import CONTENDERS, run
from figures import in_turn, keep, spread
from launch import Launcher, Outcome
from machine import describe_machine, load_average, meminfo, warm_files
from weights import make_model, model_numel, weight_map

MIB = 1 << 20
OTHER_RANKS = 4  # hsdp and ddp are measured at one size
MAX_MEMORY = 0.8  # of what is available
BASELINE = "hand"
GOALS = (
    # what, contender that it is measured against, at most
    ("time to usable weights / hand-written minimum", "hand", 1.0),
    ("time to usable weights / DCP reader", "dcp", 0.8),
    ("time to usable weights / rank 0 + broadcast", "rank0", 0.33),
)
MAX_PEAK, MAX_BEYOND_MIB = 1.03, 16.0


@dataclass(frozen=True)
class Group:
    """Runs that are compared with one another."""

    layout: str
    dtype: str
    ranks: int

    @property
    def name(self) -> str:
        """As it stands in the results."""
        return f"{self.layout} {self.dtype} {self.ranks}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4,8", help="of FSDP; HSDP and DDP run on 4")
    parser.add_argument("--dtype", default="bf16,fp32", help="of the parameters; the file is bf16")
    parser.add_argument("--layout", default="fsdp,hsdp,ddp")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=5, help="that take the time")
    parser.add_argument("--memory-repeats", type=int, default=2, help="that watch the memory")
    parser.add_argument("--gib", type=float, default=1.4, help="size of the random model")
    parser.add_argument("--model", help="folder of bf16 safetensors, instead of a random model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="0.1 GiB, 2 ranks, 1 repetition")
    parser.add_argument("--out", help="file of the results; none with --quick by default")
    options = parser.parse_args(arguments)
    if options.quick:
        options.gib, options.ranks, options.repeats, options.memory_repeats = 0.1, "2", 1, 1
    return options


def groups_of(options: argparse.Namespace) -> list[Group]:
    """What is measured, in order."""
    sizes = [int(size) for size in options.ranks.split(",")]
    other = OTHER_RANKS if OTHER_RANKS in sizes else sizes[-1]
    return [
        Group(layout, dtype, size)
        for layout in options.layout.split(",")
        for dtype in options.dtype.split(",")
        for size in (sizes if layout == "fsdp" else [other])
    ]


def names_of(options: argparse.Namespace) -> list[str]:
    """The contenders that were asked for and whose packages are there."""
    names = [name for name in options.contenders.split(",") if name in CONTENDERS]
    have = importlib.util.find_spec("accelerate") is not None
    return [name for name in names if have or name != "accelerate"]


# -- measuring ------------------------------------------------------------------------------------


class Bench:
    """Runs contenders and keeps what each run said."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.launcher = Launcher("preload")
        self.numel = model_numel(folder)
        self.runs: list[dict[str, Any]] = []

    def measure(self, group: Group, name: str, repetition: int, sample: bool) -> None:
        """One contender once, on fresh ranks."""
        made: dict[str, Any] = {"group": group.name, "contender": name, "repetition": repetition}
        made["kind"] = "memory" if sample else "time"
        if short := self.too_large(group, name):
            made["skipped"] = short
        else:
            given = (name, str(self.folder), group.dtype, group.layout)
            warm = 0 if sample else self.need_bytes(group, name)
            outcome = self.launcher.run(group.ranks, run, *given, sample=sample, warm_bytes=warm)
            made |= self.told(outcome, group, sample)
        self.runs.append(made)
        print(f"{group.name:12} {name:16} {repetition} {line_of(made)}", flush=True)

    def told(self, outcome: Outcome, group: Group, sample: bool) -> dict[str, Any]:
        """A run in numbers."""
        if outcome.error:
            print(outcome.error, file=sys.stderr)
            return {"error": outcome.error.strip().splitlines()[-1]}
        prepared, loaded, checked = outcome.stages
        made: dict[str, Any] = {
            "usable_sec": round(max(table["usable_sec"] for table in loaded), 4),
            "called_sec": round(max(table["called_sec"] for table in loaded), 4),
            "prepared_sec": round(max(table["prepared_sec"] for table in prepared), 4),
            "wrong": sorted({name for table in checked for name in table["wrong"]}),
            "imported_late": sorted({name for table in loaded for name in table["late"]}),
        }
        if sample:
            target = sum(table["share_bytes"] for table in checked)
            peak = outcome.peak_bytes - outcome.baseline_bytes
            made["target_bytes"] = target
            made["peak_bytes"] = peak
            made["peak_x"] = round(peak / target, 4)
            made["final_x"] = round((outcome.final_bytes - outcome.baseline_bytes) / target, 4)
            made["beyond_mib_per_rank"] = round((peak - target) / group.ranks / MIB, 2)
        return made

    def need_bytes(self, group: Group, name: str) -> int:
        """Private memory that a contender takes, at its highest, roughly."""
        fixed, per_rank = CONTENDERS[name].full_copies
        copies = fixed + per_rank * group.ranks
        if group.layout != "fsdp":
            copies = max(copies, 1.1 * (2 if group.layout == "hsdp" else group.ranks))
        return round(copies * self.numel * (2 if group.dtype == "bf16" else 4))

    def too_large(self, group: Group, name: str) -> str:
        """Why this machine cannot run a contender; "" when it can."""
        need, have = self.need_bytes(group, name), MAX_MEMORY * meminfo("MemAvailable")
        return "" if need < have else f"needs some {need / (1 << 30):.0f} GiB of memory"


def line_of(made: dict[str, Any]) -> str:
    """One run on one line."""
    if "skipped" in made or "error" in made:
        return str(made.get("skipped") or made.get("error"))
    text = f"{made['usable_sec']:7.3f} s"
    if "peak_x" in made:
        text += f"  peak {made['peak_x']:.3f} x, {made['beyond_mib_per_rank']:+.1f} MiB per rank"
    return text + (f"  WRONG: {', '.join(made['wrong'][:5])}" if made["wrong"] else "")


def measure_all(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Every contender of every group, in turns; another one begins in each repetition."""
    bench = Bench(options, folder)
    names, groups = names_of(options), groups_of(options)
    bench.measure(groups[0], names[0], 0, False)  # starts the server, and is not counted
    bench.runs.clear()
    kinds = [(number, False) for number in range(options.repeats)]
    kinds += [(number, True) for number in range(options.memory_repeats)]
    for repetition, sample in kinds:
        for group in groups:
            able = [
                name
                for name in names
                if group.layout in CONTENDERS[name].layouts
                and repetition < CONTENDERS[name].repeats
            ]
            for name in in_turn(able, repetition):
                bench.measure(group, name, repetition, sample)
    return bench.runs


# -- summing up -----------------------------------------------------------------------------------


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each group and contender. Ratios are of runs in the same repetition."""
    rows: list[dict[str, Any]] = []
    for group, name in dict.fromkeys((one["group"], one["contender"]) for one in runs):
        ours = [one for one in runs if (one["group"], one["contender"]) == (group, name)]
        row: dict[str, Any] = {"group": group, "contender": name, "title": CONTENDERS[name].title}
        said = [one[key] for one in ours for key in ("skipped", "error") if key in one]
        if said:
            row["not_run"] = said[0]
        row["wrong"] = sorted({tensor for one in ours for tensor in one.get("wrong", ())})
        times = {one["repetition"]: one["usable_sec"] for one in ours if timed(one)}
        if times:
            row["usable_sec"] = spread(list(times.values()))
        for other in ("hand", "dcp", "rank0"):
            ratios = [
                times[one["repetition"]] / one["usable_sec"]
                for one in runs
                if timed(one)
                and (one["group"], one["contender"]) == (group, other)
                and one["repetition"] in times
            ]
            if ratios:
                row[f"time_x_{other}"] = spread(ratios)
        watched = [one for one in ours if "peak_x" in one]
        for key in ("peak_x", "final_x", "beyond_mib_per_rank") if watched else ():
            row[key] = spread([one[key] for one in watched])
        rows.append(row)
    return rows


def timed(one: dict[str, Any]) -> bool:
    """Whether a run took the time."""
    return one["kind"] == "time" and "usable_sec" in one


def goals_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What anyrank is to reach, and what it did."""
    goals: list[dict[str, Any]] = []

    def add(group: str, what: str, most: float, value: float) -> None:
        goals.append(
            {"group": group, "what": what, "at_most": most, "value": value, "met": value <= most}
        )

    for row in rows:
        if row["contender"] != "anyrank":
            continue
        group = row["group"]
        if "peak_x" in row:
            add(group, "peak of added memory / target bytes", MAX_PEAK, row["peak_x"]["most"])
            beyond = row["beyond_mib_per_rank"]["most"]
            add(group, "MiB per rank beyond the shares", MAX_BEYOND_MIB, beyond)
        for what, other, most in GOALS:
            if f"time_x_{other}" in row and group.startswith("fsdp") and group.endswith(" 4"):
                add(group, what, most, row[f"time_x_{other}"]["median"])
    return goals


def main() -> None:
    """Measure, print, and keep the results."""
    options = parse()
    start = time.monotonic()
    folder = Path(options.model) if options.model else make_model(options.gib)
    if options.device == "cuda":
        result = gpu.measure(folder, options.repeats)
    else:
        warm_files(folder)
        result = cpu_result(options, folder)
    result = describe_machine() | {"seconds": round(time.monotonic() - start), **result}
    result["load_average_after"] = round(load_average(), 1)
    name = "load" if options.device == "cpu" else "load-cuda"
    if options.out or not options.quick:
        keep(name, result, options.out)


def cpu_result(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The measurements on CPU ranks."""
    runs = measure_all(options, folder)
    rows = summarise(runs)
    goals = goals_of(rows)
    for row in rows:
        print(row_line(row))
    for goal in goals:
        mark, most = "met " if goal["met"] else "MISS", goal["at_most"]
        print(f"{mark} {goal['group']:12} {goal['what']}: {goal['value']} (at most {most})")
    shards = len(set(weight_map(folder).values()))
    model = {"bf16_bytes": 2 * model_numel(folder), "shards": shards}
    return {"model": model, "rows": rows, "goals": goals}


def row_line(row: dict[str, Any]) -> str:
    """One row of the summary on one line."""
    parts = [f"{row['group']:12} {row['contender']:16}"]
    units = {"usable_sec": "s", "time_x_hand": "x hand", "peak_x": "x peak"}
    for key, unit in {**units, "beyond_mib_per_rank": "MiB beyond"}.items():
        if key in row:
            known = row[key]
            parts.append(
                f"{known['median']:.3f} [{known['least']:.3f}, {known['most']:.3f}] {unit}"
            )
    parts += [row["not_run"]] if "not_run" in row else []
    parts += [f"WRONG {row['wrong'][:3]}"] if row["wrong"] else []
    return "  ".join(parts)


if __name__ == "__main__":
    main()
