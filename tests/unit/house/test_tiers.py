"""What `make test` runs, and what the run itself says of it: rooms that differ, and durations."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests import tiers
from tests.durations import ERROR_LINES, Recorder, failures, read_sessions, skips, slowest, table
from tests.tiers import ROOMS, ROOT, FastTier, changed_files, changed_rooms, files_of, left_out


def test_each_file_of_a_room_is_there_and_in_no_list_twice() -> None:
    named = [name for room in ROOMS.values() for name in room.slow.split()]
    assert sorted(named) == sorted(set(named))
    smoke = {files_of(room)[-1] for room in ROOMS.values()}
    assert len(smoke) == len(ROOMS)
    assert smoke & left_out(set()) == set()
    files = [file for room in ROOMS.values() for file in files_of(room)]
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_each_promise_has_its_files_in_both_tiers() -> None:
    files = sorted(ROOT.glob("tests/*/test_promise_*.py"))
    numbers = {int(file.stem.split("_")[2]) for file in files}
    assert numbers == set(range(1, 11))
    tier = FastTier()
    assert [file for file in files if tier.leaves_out(file) or tier.leaves_out_slow_of(file)] == []


@pytest.mark.parametrize(
    ("file", "rooms"),
    [
        ("src/anyrank/training/exact/sums.py", {"exact"}),
        ("src/anyrank/world/ranks.py", set[str]()),
        ("tests/crash/test_pool.py", {"testing"}),
        ("tests/unit/world/test_faults.py", {"testing"}),
        ("README.md", {"docs"}),
        ("src/anyrank/integrations/peft.py", {"integrations", "peft"}),
        ("tests/integrations/test_object_store.py", {"remote"}),
        ("tests/integrations/test_rl_sync.py", set[str]()),
        ("tests/integrations/test_trainer.py", {"integrations"}),
        ("tests/ranks/exact_runs.py", {"exact"}),
        ("", set[str]()),
    ],
)
def test_a_room_whose_files_differ_runs_whole(file: str, rooms: set[str]) -> None:
    assert changed_rooms({file}) == rooms
    assert left_out(rooms) == left_out(set()) - {
        one for name in rooms for one in files_of(ROOMS[name])
    }


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_what_differs_is_asked_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "ROOT", tmp_path)
    no_clone = ("nothing, as this is no clone, or git is not there", set())
    assert changed_files() == no_clone
    git(tmp_path, "init", "--initial-branch", "main")
    assert changed_files() == ("nothing, as git knows no branch main here", set())
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        git(tmp_path, "add", name)
        git(tmp_path, "commit", "-m", name)
        if name == "a":  # or in a clone of one commit
            assert changed_files() == ("nothing, as git has no commit before this one", set())
    (tmp_path / "a").write_text("changed")
    assert changed_files() == ("the commit before", {"a", "b"})
    git(tmp_path, "checkout", "-b", "work")
    git(tmp_path, "commit", "-a", "-m", "changed")
    git(tmp_path, "mv", "b", "moved")
    (tmp_path / "new").touch()
    assert changed_files() == ("main", {"a", "b", "moved", "new"})
    git(tmp_path, "checkout", "--orphan", "other")
    git(tmp_path, "commit", "-m", "without a past")
    assert changed_files() == ("nothing, as git knows no branch main here", set())
    (tmp_path / "copy").mkdir()  # below the clone of something else
    monkeypatch.setattr(tiers, "ROOT", tmp_path / "copy")
    assert changed_files() == no_clone


def test_the_run_writes_what_its_tests_took(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "build" / "ranks.json")
    for name, seconds in (("tests/a.py::x", 2.0), ("tests/a.py::x", 0.25), ("tests/b.py::y", 1.0)):
        report = pytest.TestReport(name, ("", 0, ""), {}, "passed", None, "call", duration=seconds)
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish(pytest.ExitCode.OK)
    sessions = read_sessions(tmp_path / "build")
    assert sessions["ranks"]["tests"] == {"tests/a.py::x": 2.25, "tests/b.py::y": 1.0}
    lines = slowest(sessions)
    assert lines[:2] == ["the 2 slowest of 2 tests:", "     2.2 s  tests/a.py::x"]
    assert lines[-1] == "ranks 0 s"
    assert failures(sessions) == []
    kept = json.loads(json.dumps(table(sessions)))
    assert kept["files"][0] == {"file": "a.py", "seconds": 2.2, "tests": 1}


def test_the_run_ends_with_the_last_lines_of_each_error(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "ranks.json")
    error = "\n".join(["trace", *["more"] * ERROR_LINES, "rank 2 stood at a.py:7"])
    recorder.pytest_runtest_logreport(
        pytest.TestReport("tests/a.py::x", ("", 0, ""), {}, "failed", error, "call", duration=1.0)
    )
    recorder.pytest_collectreport(
        pytest.CollectReport("tests/b.py", "failed", "no module named c", [])
    )
    recorder.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    lines = failures(read_sessions(tmp_path))
    assert lines[0] == "failed: tests/a.py::x"
    assert lines[ERROR_LINES] == "    rank 2 stood at a.py:7"
    assert "    trace" not in lines
    assert lines[-2:] == ["failed: tests/b.py", "    no module named c"]


def test_the_run_ends_with_what_was_skipped_and_why(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "ranks.json")
    for name in ("x", "y"):
        why = ("/a.py", 7, "Skipped: there is no g++")
        recorder.pytest_runtest_logreport(
            pytest.TestReport(f"tests/a.py::{name}", ("", 0, ""), {}, "skipped", why, "setup")
        )
    whole = ("/b.py", 1, "Skipped: could not import 'datasets'")
    recorder.pytest_collectreport(pytest.CollectReport("tests/b.py", "skipped", whole, []))
    recorder.pytest_sessionfinish(pytest.ExitCode.OK)
    assert skips(read_sessions(tmp_path)) == [
        "skipped, 2 in tests/a.py: there is no g++",
        "skipped, 1 in tests/b.py: could not import 'datasets'",
    ]
