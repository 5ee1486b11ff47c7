"""Saves that are killed, and checkpoints that are damaged: what does the next run go on from?

    python benchmarks/kills.py               # every event and way; results/kills.json
    python benchmarks/kills.py --ways anyrank,dcp --events rank1,bit

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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import connection
from pathlib import Path
from typing import Any

from figures import keep
from kill_contenders import CONTENDERS, Blow, mark, newest, run_load, run_save
from launch import Launcher, Outcome
from machine import describe_machine

RANKS = 2
GRACE_SEC = 1.0  # for the survivors, once a rank is dead or has failed
DEADLINE_SEC = 30.0
MAX_TEXT = 300
LARGE_BYTES = 1 << 16  # of a file that holds tensors
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


# -- processes ------------------------------------------------------------------------------------


class Watch(Launcher):
    """Ranks that may die: one table each, and the others are ended soon after."""

    def _stages(
        self,
        outcome: Outcome,
        ends: list[connection.Connection],
        pids: list[int],
        sample: bool,
        warm_bytes: int,
        deadline: float,
    ) -> None:
        tables: list[dict[str, Any]] = [{"end": "hangs"} for _ in ends]
        waiting = dict(zip(ends, range(len(ends)), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for end in connection.wait(list(waiting), left):
                number = waiting.pop(end)  # type: ignore[arg-type]
                try:
                    tables[number] = end.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    tables[number] = {"end": "died"}
                if failed(tables[number]):
                    deadline = min(deadline, time.monotonic() + GRACE_SEC)
        outcome.stages.append(tables)
        if any(map(failed, tables)):
            outcome.error = "a rank failed"  # the others need not be waited for


def failed(table: dict[str, Any]) -> bool:
    """Whether a rank died, hangs or raised."""
    return bool(table.get("end") or table.get("error") or table.get("class"))


def port_taken(tables: list[dict[str, Any]]) -> bool:
    """Whether another program took a port that was free a moment before: nothing of this counts."""
    said = [f"{table.get('error')} {table.get('text')}" for table in tables]
    return any("EADDRINUSE" in one for one in said)


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


def cut(path: Path) -> bool:
    """A copy that broke off."""
    one = largest(path)
    os.truncate(one, one.stat().st_size // 2)
    return True


def flip(path: Path) -> bool:
    """One bit of the second parameter, of the half that rank 1 holds."""
    needle = struct.pack("<f", mark(2, 1, 1)) * 64
    for one in files_of(path):
        data = bytearray(one.read_bytes())
        if (start := data.find(needle)) >= 0:
            data[start + 130] ^= 1 << 4
            one.write_bytes(data)
            return True
    raise RuntimeError(f"{path}: holds no such values")


def remove_data(path: Path) -> bool:
    """A file that was not copied."""
    largest(path).unlink()
    return True


def remove_metadata(path: Path) -> bool:
    """The file that says what is where, if there is one."""
    for name in METADATA:
        if (path / name).is_file():
            (path / name).unlink()
            return True
    return False


DAMAGES: dict[str, Callable[[Path], bool]] = {
    "truncated": cut,
    "bit": flip,
    "gone": remove_data,
    "metadata": remove_metadata,
}


# -- verdicts -------------------------------------------------------------------------------------


def verdict(tables: list[dict[str, Any]]) -> str:
    """v2, v1, "v1, told", error (class), or SILENT."""
    if any(map(failed, tables)):
        names = [table.get("class") or table.get("end") or "broken" for table in tables]
        bad = [name for name, table in zip(names, tables, strict=True) if failed(table)]
        raised = [name for name in bad if name != "hangs"]
        return f"error ({', '.join(dict.fromkeys(raised or bad))})"
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


def cell_of(instants: list[dict[str, Any]]) -> dict[str, Any]:
    """A cell: the worst of its instants, and all of them."""
    worst = max(instants, key=lambda one: severity(one["verdict"]))
    return {"verdict": worst["verdict"], "instants": instants}


# -- the table ------------------------------------------------------------------------------------


class Bench:
    """One way of saving at a time, and the contenders that load what it saved."""

    def __init__(self, launcher: Launcher, top: Path) -> None:
        self.launcher, self.top = launcher, top
        self.count = 0

    def ranks(self, job: Callable[..., Any], *args: Any) -> list[dict[str, Any]]:
        """One table from each of the fresh ranks."""
        (tables,) = self.launcher.run(RANKS, job, *args, timeout_sec=DEADLINE_SEC).stages
        return tables

    def save(self, saves: str, blow: Blow | None) -> tuple[Path, list[dict[str, Any]]]:
        """A new folder in which two versions were saved, the second one under the blow."""
        self.count += 1
        folder = self.top / str(self.count)
        folder.mkdir()
        tables = self.ranks(run_save, saves, str(folder), blow)
        return self.save(saves, blow) if port_taken(tables) else (folder, tables)

    def load(self, name: str, folder: Path, when: str) -> dict[str, Any]:
        """The verdict over what this contender loads from a folder; the folder is used up.

        Raises:
            RuntimeError: the ranks did not get as far as the load.
        """
        while port_taken(tables := self.ranks(run_load, name, str(folder))):
            pass
        if broken := [one["error"] for one in tables if "error" in one]:
            raise RuntimeError(f"{name}, {when}: {broken[0]}")
        text = next((one["text"] for one in tables if one.get("text")), "").strip()
        last = text.splitlines()[-1] if text else ""
        shutil.rmtree(folder)
        words = last.replace(str(self.top), "FOLDER")[:MAX_TEXT]
        return {"at": when, "verdict": verdict(tables), "text": words}

    def copied(self, folder: Path) -> Path:
        """The same folder for another load."""
        self.count += 1
        return Path(shutil.copytree(folder, self.top / str(self.count)))

    def cells(self, saves: str, names: list[str], events: list[str]) -> Iterator[Any]:
        """Event, contender and cell, for all that load what one way saves.

        Raises:
            RuntimeError: the way does not even save without a kill.
        """
        whole, tables = self.save(saves, None)
        if any(map(failed, tables)):
            raise RuntimeError(f"{saves}: {tables}")
        course = course_of(tables, whole, CONTENDERS[names[0]].pattern)
        for name in names:
            sound = self.load(name, self.copied(whole), "no kill")
            if sound["verdict"] != "v2":
                raise RuntimeError(f"{name}: {sound}")
        for event in events:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            if event in DAMAGES:
                for name in names:
                    found[name].append(self.damaged(name, event, whole))
            for blow in [] if event in DAMAGES else blows_of(event, course):
                folder, tables = self.save(saves, blow)
                struck = {rank for rank, one in enumerate(tables) if one.get("end") == "died"}
                if not struck & (blow.events.keys() | blow.limits.keys()):
                    raise RuntimeError(f"{saves}: no rank died {blow.at}: {tables}")
                for name in names:
                    found[name].append(self.load(name, self.copied(folder), blow.at))
                shutil.rmtree(folder)
            for name in names:
                yield event, name, cell_of(found[name])
        shutil.rmtree(whole)

    def damaged(self, name: str, event: str, whole: Path) -> dict[str, Any]:
        """The verdict over a damaged copy of a whole version 2."""
        folder = self.copied(whole)
        if not DAMAGES[event](newest(str(folder), CONTENDERS[name].pattern)):
            return {"at": "after the save", "verdict": "-", "text": "there is none"}
        return self.load(name, folder, "after the save")


def main() -> None:
    """Fill the table, print and keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--events", default=",".join(EVENTS))
    parser.add_argument("--ways", default=",".join(CONTENDERS))
    options = parser.parse_args()
    events, ways = options.events.split(","), options.ways.split(",")
    whole = events == list(EVENTS) and ways == list(CONTENDERS)
    if importlib.util.find_spec("torch_checkpointing") is None:
        print("torch_checkpointing is left out: it is not installed")
        ways = [way for way in ways if way != "torch_checkpointing"]
    cells: dict[str, dict[str, Any]] = {event: {} for event in events}
    with tempfile.TemporaryDirectory(prefix="anyrank-kills-") as top:
        bench = Bench(Watch("preload"), Path(top))
        for saves in dict.fromkeys(CONTENDERS[way].saves for way in ways):
            names = [way for way in ways if CONTENDERS[way].saves == saves]
            for event, name, cell in bench.cells(saves, names, events):
                cells[event][name] = cell
                each = [f"{one['at']}: {one['verdict']}" for one in cell["instants"]]
                print(f"{name}, {event}: {cell['verdict']}  [{'; '.join(each)}]", flush=True)
    rows = [{"event": event, "title": EVENTS[event], "cells": cells[event]} for event in events]
    silent = [
        f"{way} ({event})"
        for event, row in cells.items()
        for way, cell in row.items()
        if way.startswith("anyrank") and cell["verdict"].startswith("SILENT")
    ]
    print(f"anyrank silent: {', '.join(silent) or 'nowhere'}")
    if whole:
        titles = {way: CONTENDERS[way].title for way in ways}
        result: dict[str, Any] = describe_machine() | {"ranks": RANKS, "ways": titles, "rows": rows}
        if "torch_checkpointing" in ways:
            result["versions"]["torch_checkpointing"] = version("torch-checkpointing")
        keep("kills", result)


if __name__ == "__main__":
    main()
