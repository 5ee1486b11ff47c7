"""Sums up a log of `make compat`: what passed on a torch version, printed, and where nothing failed
kept as a result and in the table of docs/reference.md.

Called by the Makefile with the Python of that version's environment, and the log; the log of an
earlier commit is followed by that commit. It exits with 1 if a test failed, or if the log has not
the end of each of the three sessions.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "compat.json"
PAGE = ROOT / "docs" / "reference.md"
SESSIONS = ("ranks", "processes", "others")
COUNTED = ("passed", "failed", "errors", "skipped")
Row = dict[str, Any]


def read_log(text: str) -> Row:
    """The counts of all sessions, the tests that failed, and the reasons of those skipped.

    Raises:
        ValueError: a session has not ended.
    """
    row: Row = dict.fromkeys(COUNTED, 0)
    for session in SESSIONS:
        lines = re.findall(rf"^{session} *\| (.*)$", text, flags=re.M)
        ends = [line for line in lines if re.search(r"\d+ \w+.* in [\d.]+s", line)]
        if not ends:
            raise ValueError(f"the log has no last line of the session {session!r}: it was cut off")
        for number, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", ends[-1]):
            row["errors" if kind.startswith("error") else kind] += int(number)
    failures = re.findall(r"\| (?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, flags=re.M)
    row["failures"] = sorted(set(failures))
    row["skips"] = sorted(set(re.findall(r"\| SKIPPED \[\d+\] (.*)$", text, flags=re.M)))
    return row


def keep(row: Row, result: Row) -> Row:
    """The result with a version's row in the place of an earlier one, by version."""
    rows = [other for other in result["rows"] if other["torch"] != row["torch"]]
    by_version = sorted([*rows, row], key=lambda each: [int(n) for n in each["torch"].split(".")])
    return {"command": "make compat TORCH=VERSION", "rows": by_version}


def table(result: Row) -> list[str]:
    """The lines of the page's table: an error in a test's set-up counts as failed."""
    lines = ["| torch | Python | run on | passed | failed | skipped |", "| --- " * 6 + "|"]
    for row in result["rows"]:
        failed = row["failed"] + row["errors"]
        counts = (row["passed"], failed, row["skipped"])
        cells = (row["torch"], row["python"], row["date"], *counts)
        lines.append("| " + " | ".join(f"{cell}" for cell in cells) + " |")
    return lines


def record(row: Row, kept: Path, page: Path) -> bool:
    """Keep a version's row, and write the page's table; only of a green run, so that a red one does
    not fail the next.

    Args:
        row: of the run.
        kept: the results so far.
        page: has a table already.

    Returns:
        Whether it was green.
    """
    if row["failed"] or row["errors"] or not row["passed"]:
        return False
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {"rows": []}
    result = keep(row, before)
    kept.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = "\n".join(table(result))
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"\| torch \| Python \|.*?(?=\n\n)", lines, text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")
    return True


def commit_of(name: str) -> str:
    """The short hash of a commit; the tests that ran are that commit's."""
    command = ["git", "rev-parse", "--verify", "--short=9", f"{name}^{{commit}}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    import torch

    row = read_log(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    row |= {
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": "none, gloo",
        "commit": commit_of(sys.argv[2] if len(sys.argv) > 2 else "HEAD"),
    }
    is_green = record(row, RESULT, PAGE)
    print(f"torch {row['torch']}: " + ", ".join(f"{row[kind]} {kind}" for kind in COUNTED))
    for line in row["failures"]:
        print(f"  failed: {line}")
    for line in row["skips"]:
        print(f"  skipped: {line}")
    sys.exit(0 if is_green else 1)


if __name__ == "__main__":
    main()
