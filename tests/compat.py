"""Sums up a log of `make compat`: what passed on a torch version, printed and kept as a result.

Called by the Makefile with the Python of that version's environment, and the log. It exits with 1
if a test failed, or if the log has not the end of each of the three sessions.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "compat.json"
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
    row["failures"] = sorted(set(re.findall(r"\| (?:FAILED|ERROR) (\S+)", text)))
    row["skips"] = sorted(set(re.findall(r"\| SKIPPED \[\d+\] (.*)$", text, flags=re.M)))
    return row


def keep(row: Row, result: Row) -> Row:
    """The result with a version's row in the place of an earlier one, by version."""
    rows = [other for other in result["rows"] if other["torch"] != row["torch"]]
    by_version = sorted([*rows, row], key=lambda each: [int(n) for n in each["torch"].split(".")])
    return {"command": "make compat TORCH=VERSION", "rows": by_version}


def main() -> None:
    import torch

    row = read_log(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    row |= {
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": "none, gloo",
    }
    before = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"rows": []}
    RESULT.write_text(json.dumps(keep(row, before), indent=1) + "\n", encoding="utf-8")
    print(f"torch {row['torch']}: " + ", ".join(f"{row[kind]} {kind}" for kind in COUNTED))
    for line in row["failures"]:
        print(f"  failed: {line}")
    for line in row["skips"]:
        print(f"  skipped: {line}")
    sys.exit(1 if row["failed"] or row["errors"] or not row["passed"] else 0)


if __name__ == "__main__":
    main()
