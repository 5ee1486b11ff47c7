"""anyrank of the working tree beside that of a commit, in turns: is it slower, or hungrier?

    python benchmarks/beside.py                                  # all of RUNS, beside HEAD
    python benchmarks/beside.py --commit 2b37ea3 --turns 5
    python benchmarks/beside.py --runs "sync.py --mib 256" "exact.py --most-ranks 2"
    python benchmarks/beside.py --quick                          # once each, nothing is written

A run is any benchmark here with its options. In each turn it runs with the `src` of both, once
each, and every figure of its results is compared with the same one of the other.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench
from bench import HERE, Case, Run, median, ratios, tell
from launch import Launcher

RUNS = (
    "load.py --contenders anyrank --ranks 4 --layout fsdp --gib 0.5 --repeats 1 --memory-repeats 1",
    "load.py --contenders anyrank --ranks 2 --layout ddp --gib 0.1 --repeats 1 --memory-repeats 1",
    "save.py --ways anyrank anyrank_background --layers 4 --repeats 1",
    "sync.py --mib 256 --repeats 3",
    "exact.py --repeats 5",
    "integrations.py --rounds 1",
)
# Parts of a result that are no figures of anyrank.
OTHERS = ("goals", "load_average", "n", "goal")


def figures_in(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The measured numbers of a result, by where they stand; a row of a list by its words."""
    if isinstance(value, float) and value > 0:
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in OTHERS:
                yield from figures_in(item, f"{name}/{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            row: Run = item if isinstance(item, dict) else {}
            words = ", ".join(word for word in row.values() if isinstance(word, str))
            yield from figures_in(item, f"{name}/{words or number}")


def run_once(line: str, root: Path) -> Run:
    """The figures of a benchmark that runs with the `src` of a checkout.

    Raises:
        RuntimeError: it failed.
    """
    script, *options = shlex.split(line)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        done = subprocess.run(
            [sys.executable, str(HERE / script), *options, "--out", str(out)],
            env=os.environ | {"PYTHONPATH": str(root / "src")},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{line}, {root}: {done.stderr[-3000:]}")
        return dict(figures_in(json.loads(out.read_text(encoding="utf-8"))))


def compare(line: str, roots: dict[str, Path], turns: int) -> dict[str, Run]:
    """Figure -> medians of both sides, and the ratios of runs in the same turn: new / old."""
    runs = Case(line, roots, lambda side, _: run_once(line, roots[side])).run(turns, is_told=False)
    shared = set.intersection(*(set(run) for of in runs.values() for run in of))
    found: dict[str, Run] = {}
    for figure in sorted(shared):
        medians = {side: round(median(of, figure), 4) for side, of in runs.items()}
        found[figure] = medians | {"ratio": ratios(runs["new"], runs["old"], figure)}
        tell(figure, found[figure])
    return found


def measure(options: argparse.Namespace, _: Launcher) -> Run:
    """All runs, in order."""
    with tempfile.TemporaryDirectory(prefix="anyrank-beside-") as top:
        given = ["git", "-C", str(HERE.parent), "archive", options.commit, "src"]
        packed = subprocess.run(given, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "x", "-C", top], input=packed, check=True)
        roots = {"new": HERE.parent, "old": Path(top)}
        rows = {line: compare(line, roots, options.turns) for line in options.runs}
    name = ["git", "-C", str(HERE), "rev-parse", "--short", options.commit]
    commit = subprocess.run(name, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return {"beside": commit, "turns": options.turns, "rows": rows}


if __name__ == "__main__":
    defaults: Run = {"commit": "HEAD", "runs": [*RUNS], "turns": 5}
    bench.main("beside", measure, {"turns": 1}, ["runs"], **defaults)
