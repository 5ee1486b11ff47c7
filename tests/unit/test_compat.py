"""What `make compat` reads from a log of three sessions, and what it keeps."""

from __future__ import annotations

import json
import re

import pytest
from tests.compat import RESULT, ROOT, keep, read_log, table

from anyrank.versions import TESTED_TORCH

LOG = """\
make[1]: Entering directory
ranks     | tests/ranks/test_sync.py ....                                      [ 10%]
others    | ERROR    anyrank:save.py:12 a line that a test logged
others    | the 4 passed in 3.2s of the text of a test
ranks     | SKIPPED [3] tests/ranks/test_exact.py:145: exact=True needs torch 2.13
processes | ======= 1 error, 2 skipped, 180 passed, 4 deselected in 62.91s (0:01:02) =======
ranks     | ====================== 774 passed, 3 skipped in 441.37s (0:07:21) ==============
others    | FAILED tests/unit/test_a.py::test_one[dict in keyword] - assert 1 == 2
others    | FAILED tests/unit/test_a.py::test_one[list]
processes | ERROR tests/cli/test_b.py::test_two - OSError: - gone
processes | SKIPPED [2] tests/crash/test_pool.py:465: it names no threads
others    | ===== 2 failed, 3000 passed, 31 deselected in 415.48s (0:06:55) =====
others    | nanobind: leaked 1 instances!
make: *** [Makefile:34: test] Error 2
"""


def test_the_counts_are_the_sums_of_the_three_sessions() -> None:
    row = read_log(LOG)
    counts = {kind: row[kind] for kind in ("passed", "failed", "errors", "skipped")}
    assert counts == {"passed": 3954, "failed": 2, "errors": 1, "skipped": 5}


def test_what_failed_and_why_others_were_skipped_is_named() -> None:
    row = read_log(LOG)
    assert row["failures"] == [
        "tests/cli/test_b.py::test_two",
        "tests/unit/test_a.py::test_one[dict in keyword]",
        "tests/unit/test_a.py::test_one[list]",
    ]
    assert row["skips"] == [
        "tests/crash/test_pool.py:465: it names no threads",
        "tests/ranks/test_exact.py:145: exact=True needs torch 2.13",
    ]


@pytest.mark.parametrize("session", ["ranks", "processes", "others"])
def test_a_log_without_the_end_of_a_session_is_refused(session: str) -> None:
    lines = [x for x in LOG.splitlines() if not (x.startswith(session) and " in " in x)]
    with pytest.raises(ValueError, match=f"session '{session}': it was cut off"):
        read_log("\n".join(lines))


def test_a_version_has_one_row_and_rows_go_by_version() -> None:
    rows = {"rows": [{"torch": "2.9.0", "passed": 1}, {"torch": "2.15.0", "passed": 1}]}
    once = keep({"torch": "2.11.0", "passed": 2}, rows)
    twice = keep({"torch": "2.11.0", "passed": 3}, once)
    found = [(row["torch"], row["passed"]) for row in twice["rows"]]
    assert found == [("2.9.0", 1), ("2.11.0", 3), ("2.15.0", 1)]


def test_an_error_counts_as_failed_in_the_table() -> None:
    row = read_log(LOG) | {"torch": "2.11.0", "python": "3.11.7"}
    assert table({"rows": [row]})[2:] == ["| 2.11.0 | 3.11.7 | 3954 | 3 | 5 |"]


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


def test_the_table_of_support_in_the_readme_is_that_of_the_kept_results() -> None:
    lines = table(json.loads(RESULT.read_text(encoding="utf-8")))
    assert "\n".join(lines) in (ROOT / "README.md").read_text(encoding="utf-8")
