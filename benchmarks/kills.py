"""Saves that are killed, and checkpoints that are damaged: what does the next run go on from?

    python benchmarks/kills.py               # every event and way; results/kills.json
    python benchmarks/kills.py --ways anyrank dcp --events rank1 bit

Two ranks save version 1, then version 2, whose values all differ. The save of version 2 is killed,
or its files are damaged afterwards. Fresh ranks load what the way's user would load, and every
value of model and optimizer is compared with both versions. No cell of anyrank may be SILENT.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
from bench import Case, Run
from kill_contenders import CONTENDERS, Blow, mark, newest, run_load, run_save
from launch import Launcher, Table, has_failed

RANKS = 2
GRACE_SEC = 1.0  # for the survivors, once a rank is dead or has failed
DEADLINE_SEC = 30.0
MAX_TEXT = 300
LARGE_BYTES = 1 << 16  # of a file that holds tensors
DAMAGES = ("truncated", "bit", "gone", "metadata")
METADATA = ("anyrank.json", ".metadata")
EVENTS = {
    "rank1": "rank 1 killed while it saves",
    "rank0": "rank 0 killed after its data, before the save is complete",
    "all": "all ranks killed while they save",
    "truncated": "a data file cut to half",
    "bit": "one bit of a tensor flipped",
    "gone": "a data file removed",
    "metadata": "the metadata file removed",
}


# -- kills ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """How the second save goes when nothing happens.

    Attributes:
        seen: the file events of each rank: kind and name.
        sizes: of the largest file that each rank writes, in bytes; 0 for none.
        opens: for each rank, the numbers of the events that open files with tensors, from 1.
    """

    seen: list[list[tuple[str, str]]]
    sizes: list[int]
    opens: list[list[int]]


def course_of(tables: list[dict[str, Any]], folder: Path, pattern: str) -> Course:
    """From the tables of a run without a kill, and the files that it left."""
    large = {
        path.name: path.stat().st_size
        for path in files_of(newest(str(folder), pattern))
        if path.stat().st_size >= LARGE_BYTES
    }
    seen = [table["seen"] for table in tables]
    opens = [
        [n for n, (kind, name) in enumerate(one, 1) if kind == "open" and name in large]
        for one in seen
    ]
    sizes = [
        max((large[one[n - 1][1]] for n in numbers), default=0)
        for one, numbers in zip(seen, opens, strict=True)
    ]
    if not any(sizes):  # written by C++, by the first rank: Python hears of no file
        sizes[0] = max(large.values())
    return Course(seen, sizes, opens)


def blows_of(event: str, course: Course) -> list[Blow]:
    """The instants of a kind of kill."""
    if event == "all":
        return [Blow(at(part), limits=limits(course, part)) for part in (0, 0.25, 0.5, 0.75, 1)]
    if event == "rank1":
        early = [Blow("before its save", events={1: 0})]
        for first in course.opens[1][:1]:
            early.append(Blow(f"before {told(course.seen[1][first - 1])}", events={1: first}))
        parts = (0, 0.5, 1) if course.sizes[1] else ()
        return early + [Blow(at(part), limits={1: limits(course, part)[1]}) for part in parts]
    last = max(course.opens[0], default=len(course.seen[0]))
    after = [
        Blow(f"before {told(one)}", events={0: n})
        for n, one in enumerate(course.seen[0], 1)
        if n > last
    ]
    return [Blow(at(1), limits={0: limits(course, 1)[0]}), *after]


def limits(course: Course, part: float) -> dict[int, int]:
    """Sizes that the ranks' files do not pass; all but a byte for the whole."""
    return {rank: min(int(size * part), size - 1) for rank, size in enumerate(course.sizes) if size}


def at(part: float) -> str:
    """An instant in words."""
    if part in (0, 1):
        return "at its last byte" if part else "at its first byte"
    return f"at {part:.0%} of its bytes"


def told(event: tuple[str, str]) -> str:
    """A file event in words, without the random part of a temporary name."""
    return f"{event[0].removeprefix('os.')} {re.sub('-[0-9a-f]{8}', '', event[1])}"


# -- damage ---------------------------------------------------------------------------------------


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint."""
    return sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]


def largest(path: Path) -> Path:
    """The largest file of a checkpoint, the last one of those."""
    return max(files_of(path), key=lambda one: (one.stat().st_size, one.name))


def damage(event: str, path: Path) -> bool:
    """Do to a checkpoint what the event says; whether it has such a file."""
    one = largest(path)
    if event == "truncated":  # a copy that broke off
        os.truncate(one, one.stat().st_size // 2)
    elif event == "gone":  # a file that was not copied
        one.unlink()
    elif event == "bit":
        flip(path)
    else:  # the file that says what is where
        names = [name for name in METADATA if (path / name).is_file()]
        for name in names[:1]:
            (path / name).unlink()
        return bool(names)
    return True


def flip(path: Path) -> None:
    """One bit of the second parameter, of the half that rank 1 holds."""
    needle = struct.pack("<f", mark(2, 1, 1)) * 64
    for one in files_of(path):
        data = bytearray(one.read_bytes())
        if (start := data.find(needle)) >= 0:
            data[start + 130] ^= 1 << 4
            one.write_bytes(data)
            return
    raise RuntimeError(f"{path}: holds no such values")


# -- verdicts -------------------------------------------------------------------------------------


def verdict(tables: list[Table]) -> str:
    """v2, v1, "v1, told", error (class), or SILENT."""
    failed = [table.get("class") or table["end"] for table in tables if has_failed(table)]
    if failed:
        raised = [name for name in failed if name != "hangs"]
        return f"error ({', '.join(dict.fromkeys(raised or failed))})"
    found = {kind for table in tables for kind, count in table["versions"].items() if count}
    if found == {"v2"}:
        return "v2"
    if found == {"v1"}:
        return "v1, told" if all(table["told"] for table in tables) else "v1"
    return "SILENT: wrong values" if "neither" in found else "SILENT: v1 and v2 mixed"


def severity(said: str) -> int:
    """How bad a verdict is."""
    order = ("-", "v2", "v1, told", "v1", "error")
    return order.index(said.split(" (")[0]) if not said.startswith("SILENT") else len(order)


# -- the table ------------------------------------------------------------------------------------


class Bench:
    """Saves that are struck, and loads of what they left, in folders of their own."""

    def __init__(self, launcher: Launcher, top: Path) -> None:
        self.launcher, self.top = launcher, top
        self.count = 0
        self.courses: dict[str, tuple[Path, Course]] = {}

    def ranks(self, job: Callable[..., Any], *args: Any) -> list[Table]:
        """One table from each of the fresh ranks.

        Raises:
            RuntimeError: they did not get as far as the save or the load.
        """
        while True:
            limits: dict[str, Any] = {"grace_sec": GRACE_SEC, "timeout_sec": DEADLINE_SEC}
            outcome = self.launcher.run(RANKS, job, *args, **limits)
            if "EADDRINUSE" in outcome.error:  # another program took a port that was free before
                continue
            if len(outcome.stages) < 2:
                raise RuntimeError(f"{args}: {outcome.error}")
            return outcome.stages[1]

    def save(self, name: str, blow: Blow | None) -> tuple[Path, list[Table]]:
        """A new folder in which two versions were saved, the second one under the blow."""
        self.count += 1
        folder = self.top / str(self.count)
        folder.mkdir()
        return folder, self.ranks(run_save, name, str(folder), blow)

    def load(self, name: str, folder: Path, when: str) -> Run:
        """The verdict over what this contender loads from a folder; the folder is used up."""
        tables = self.ranks(run_load, name, str(folder))
        text = next((one["text"] for one in tables if one.get("text")), "").strip()
        last = text.splitlines()[-1] if text else ""
        shutil.rmtree(folder)
        words = last.replace(str(self.top), "FOLDER")[:MAX_TEXT]
        return {"at": when, "verdict": verdict(tables), "text": words}

    def copied(self, folder: Path) -> Path:
        """The same folder for another load."""
        self.count += 1
        return Path(shutil.copytree(folder, self.top / str(self.count)))

    def whole(self, name: str) -> tuple[Path, Course]:
        """What a contender leaves behind without a kill.

        Raises:
            RuntimeError: it is not whole.
        """
        if name in self.courses:
            return self.courses[name]
        folder, tables = self.save(name, None)
        if any(map(has_failed, tables)):
            raise RuntimeError(f"{name}: {tables}")
        sound = self.load(name, self.copied(folder), "no kill")
        if sound["verdict"] != "v2":
            raise RuntimeError(f"{name}: {sound}")
        self.courses[name] = folder, course_of(tables, folder, CONTENDERS[name].pattern)
        return self.courses[name]

    def cell(self, name: str, event: str) -> Run:
        """The worst outcome of an event, and how often each was met.

        Raises:
            RuntimeError: nobody was killed.
        """
        whole, course = self.whole(name)
        found: list[Run] = []
        if event in DAMAGES:
            folder = self.copied(whole)
            if damage(event, newest(str(folder), CONTENDERS[name].pattern)):
                found.append(self.load(name, folder, "after the save"))
            else:
                found.append({"at": "after the save", "verdict": "-", "text": "there is none"})
        for blow in [] if event in DAMAGES else blows_of(event, course):
            folder, tables = self.save(name, blow)
            struck = {rank for rank, one in enumerate(tables) if one.get("end") == "died"}
            if not struck & (blow.events.keys() | blow.limits.keys()):
                raise RuntimeError(f"{name}: no rank died {blow.at}: {tables}")
            found.append(self.load(name, folder, blow.at))
        worst = max(found, key=lambda one: severity(one["verdict"]))
        said = {"said": worst["text"]} if worst["text"] else {}
        instants = dict(Counter(one["verdict"] for one in found))
        return {"verdict": worst["verdict"], "instants": instants} | said


def measure(options: argparse.Namespace, launcher: Launcher) -> Run:
    """The table: for each event, the worst outcome of every way."""
    ways = options.ways
    if importlib.util.find_spec("torch_checkpointing") is None:
        print("torch_checkpointing is left out: it is not installed")
        ways = [way for way in ways if way != "torch_checkpointing"]
    rows: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="anyrank-kills-") as top:
        every = Bench(launcher, Path(top))
        for event in options.events:
            cells = Case(event, ways, lambda way, _, event=event: every.cell(way, event)).once()
            rows.append({"event": event, "title": EVENTS[event], "cells": cells})
    titles = {way: CONTENDERS[way].title for way in ways}
    result: Run = {"ranks": RANKS, "ways": titles, "rows": rows}
    return result | {"goals": goals_of(result)}


def goals_of(result: Run) -> list[Run]:
    """What anyrank is to reach, and what it did: a whole version, and damage is told."""
    rows = {row["event"]: row["cells"] for row in result["rows"]}
    goals = [bench.goal("events that were left out", len(EVENTS.keys() - rows.keys()), 0)]
    for way in result["ways"].keys() & {"anyrank", "anyrank_background"}:
        wrong = [
            event
            for event, cells in rows.items()
            if cells[way]["verdict"] not in (("v1, told",) if event in DAMAGES else ("v1", "v2"))
        ]
        goals.append(bench.goal(f"{way}, other outcomes: {wrong}", len(wrong), 0))
    return goals


if __name__ == "__main__":
    choices: Run = {"events": [*EVENTS], "ways": [*CONTENDERS]}
    small: Run = {"events": ["rank1", "bit"], "ways": ["anyrank", "dcp"]}
    bench.main("kills", measure, small, [*choices], **choices)
