"""What `make compat` reads from a log of three sessions, and what it keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.compat import PAGE, RESULT, read_log, record, table

from anyrank.versions import TESTED_TORCH

LOG = """\
ranks     | ====================== 774 passed, 3 skipped in 441.37s (0:07:21) ==============
processes | ======= 1 error, 2 skipped, 180 passed, 4 deselected in 62.91s (0:01:02) =======
others    | ===== 2 failed, 3000 passed, 31 deselected in 415.48s (0:06:55) =====
"""


@pytest.mark.parametrize("session", ["ranks", "processes", "others"])
def test_a_log_without_the_end_of_a_session_is_refused(session: str) -> None:
    row = read_log(LOG)
    assert (row["passed"], row["failed"], row["errors"], row["skipped"]) == (3954, 2, 1, 5)
    lines = [line for line in LOG.splitlines() if not line.startswith(session)]
    with pytest.raises(ValueError, match=f"session '{session}': it was cut off"):
        read_log("\n".join(lines))


def test_every_kept_result_is_green_and_names_its_skips() -> None:
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    versions = [row["torch"] for row in rows]
    assert versions
    assert versions == [version for version in TESTED_TORCH if version in versions]
    for row in rows:
        assert (row["failed"], row["errors"], row["failures"]) == (0, 0, []), row["torch"]
        assert row["passed"] > 4000, row["torch"]
        assert re.fullmatch("[0-9a-f]{9}", row["commit"]), row["torch"]
        assert bool(row["skips"]) == bool(row["skipped"]), row["torch"]


def test_the_table_of_versions_is_that_of_the_kept_results() -> None:
    lines = table(json.loads(RESULT.read_text(encoding="utf-8")))
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8")


def test_only_a_green_run_is_kept_and_comes_into_the_page(tmp_path: Path) -> None:
    kept, page = tmp_path / "compat.json", tmp_path / "reference.md"
    page.write_text("before\n\n| torch | Python |\n| --- |\n| 1 | 2 |\n\nafter\n", "utf-8")
    row = read_log(LOG) | {"torch": "2.15.0", "python": "3.11.7", "date": "2026-11-27"}
    before = page.read_text("utf-8")
    assert not record(row, kept, page)
    assert not kept.exists()
    assert page.read_text("utf-8") == before
    row |= {"failed": 0, "errors": 0}
    assert record(row, kept, page)
    table_now = "\n".join(table(json.loads(kept.read_text("utf-8"))))
    assert page.read_text("utf-8") == f"before\n\n{table_now}\n\nafter\n"
