"""How long each test took, written by the run itself; the Makefile calls this to sum it up.

`python tests/durations.py FOLDER` prints the slowest tests of all sessions that have left a file in
the folder, then what was skipped, and the end of each error: of a long log often only the last
lines are kept. With `--keep` it writes the time of each test file into tests.json of
benchmarks/results.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "tests.json"
SLOWEST = 20
ERROR_LINES = 24
Session = dict[str, Any]


class Recorder:
    """A plugin of pytest that writes a file when the session ends.

    The file is a JSON object: `seconds` of the whole session, its imports as well; `ended` with
    0 where all is green; `tests`, which has the seconds of each test by its name, with what
    its fixtures took; `skipped`, which has the reason of each test or file that did not run; and
    `failed`, the last lines of the error of each that has one.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start = time.monotonic()
        self.tests: dict[str, float] = {}
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the time of a test, or of its set-up or end, and how it ended."""
        self.tests[report.nodeid] = self.tests.get(report.nodeid, 0.0) + report.duration
        self._note_end(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file was skipped, or cannot be imported."""
        self._note_end(report)

    def _note_end(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = report.longreprtext.splitlines()[-ERROR_LINES:]
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the file."""
        tests = {name: round(seconds, 3) for name, seconds in self.tests.items()}
        seconds = round(time.monotonic() - self.start, 1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        told = {"seconds": seconds, "ended": int(exitstatus), "tests": tests}
        told |= {"skipped": self.skipped, "failed": self.failed}
        self.path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def read_sessions(folder: Path) -> dict[str, Session]:
    """What the sessions have written, by their names."""
    files = sorted(folder.glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def slowest(sessions: dict[str, Session]) -> list[str]:
    """Lines with the tests that took longest, and what each session took."""
    tests = [(seconds, name) for one in sessions.values() for name, seconds in one["tests"].items()]
    lines = [f"{seconds:8.1f} s  {name}" for seconds, name in sorted(tests, reverse=True)[:SLOWEST]]
    ends = [f"{name} {one['seconds']:.0f} s" for name, one in sessions.items()]
    return [f"the {len(lines)} slowest of {len(tests)} tests:", *lines, ", ".join(ends)]


def skips(sessions: dict[str, Session]) -> list[str]:
    """Lines with what did not run: how many tests of each file, and why."""
    counts = Counter(
        (name.partition("::")[0], why)
        for one in sessions.values()
        for name, why in one["skipped"].items()
    )
    return [f"skipped, {count} in {file}: {why}" for (file, why), count in counts.items()]


def failures(sessions: dict[str, Session]) -> list[str]:
    """Lines with the end of the error of each test that has failed."""
    lines: list[str] = []
    for one in sessions.values():
        for name, error in one["failed"].items():
            lines += [f"failed: {name}", *(f"    {line}" for line in error)]
    return lines


def table(sessions: dict[str, Session]) -> dict[str, Any]:
    """What is kept of a whole run: the time of each file, the longest first, and its tests."""
    seconds, tests = Counter[str](), Counter[str]()
    for one in sessions.values():
        for name, taken in one["tests"].items():
            file = name.partition("::")[0].removeprefix("tests/")
            seconds[file] += taken
            tests[file] += 1
    rows = [
        {"file": f, "seconds": round(s, 1), "tests": tests[f]} for f, s in seconds.most_common()
    ]
    return {
        "command": "make test-all",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "commit": _commit(),
        "sessions": {name: one["seconds"] for name, one in sessions.items()},
        "slowest": slowest(sessions)[1:-1],
        "files": rows,
    }


def _commit() -> str:
    """The short hash of what is checked out; empty outside of a clone."""
    line = ["git", "rev-parse", "--short=9", "HEAD"]
    return subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()


def main() -> None:
    sessions = read_sessions(Path(sys.argv[1]))
    print(*slowest(sessions), *skips(sessions), *failures(sessions), sep="\n")
    if "--keep" in sys.argv:
        if any(one["ended"] for one in sessions.values()):
            sys.exit("not kept, as tests have failed")
        RESULT.write_text(json.dumps(table(sessions), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
