"""`anyrank stacks`: the ranks of a launcher that knows nothing of it, and who holds them up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from anyrank.watching.job import Job, describe
from anyrank.watching.looks import Look
from anyrank.watching.options import VERDICT
from anyrank.watching.system import state_of, variable_of

LAUNCHER = """
import os, subprocess, sys, time
code = "import os, time; os.write(1, b'1'); time.sleep(600)"
for rank in range(3):
    line = [sys.executable, "-c", code]
    if rank == 2:  # a wrapper, which has RANK too
        line = ["bash", "-c", '"$@"; true', "bash", *line]
    subprocess.Popen(line, env={**os.environ, "RANK": str(rank)})
time.sleep(600)
"""
# Stands in for py-spy: says of each process what the file of its rank says. A first line cannot
# name a Python whose path has a blank.
PY_SPY = """#!/bin/sh
"exec" "{python}" "$0" "$@"
import os, sys
pid = sys.argv[sys.argv.index("--pid") + 1]
variables = open(f"/proc/{{pid}}/environ").read().split("\\0")
rank = next(one[5:] for one in variables if one.startswith("RANK="))
path = f"{folder}/answer-{{rank}}"
if not os.path.exists(path):
    sys.exit("Permission denied (os error 13)")
print(open(path).read())
"""


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A process that has started three ranks."""
    monkeypatch.delenv("RANK", raising=False)
    line = [sys.executable, "-c", LAUNCHER]
    process = subprocess.Popen(line, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(3) == b"111"  # each of them runs
    yield process.pid
    os.killpg(process.pid, signal.SIGCONT)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def ranks_of(launcher: int) -> dict[int, str]:
    """Process -> RANK, of those below a launcher."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    group = [pid for pid in pids if pid != launcher and session_of(pid) == launcher]
    return {pid: variable_of(pid, "RANK") for pid in group if variable_of(pid, "RANK")}


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`py_spy("all_reduce", "all_gather", "all_reduce")`: what the ranks stand in."""
    tool = tmp_path / "bin/py-spy"
    tool.parent.mkdir()
    tool.write_text(PY_SPY.format(python=sys.executable, folder=tmp_path))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)

    def answer(*names: str) -> None:
        for rank, name in enumerate(names):
            torch = "/v/site-packages/torch/distributed/distributed_c10d.py"
            frames = [{"name": name, "filename": torch, "line": 1}]
            frames.append({"name": "main", "filename": "/u/train.py", "line": 10 + len(name)})
            thread = {"thread_name": "MainThread", "frames": frames}
            (tmp_path / f"answer-{rank}").write_text(json.dumps([thread]))

    return answer


def test_the_odd_rank_of_a_launcher_is_named(
    launcher: int, py_spy: Callable[..., None], anyrank: Callable[[str], Result]
) -> None:
    py_spy("all_reduce", "all_gather_object", "all_reduce")
    result = anyrank(f"stacks {launcher}")
    assert result.exit_code == 1
    first, second, *_ = result.stdout.splitlines()
    assert first == (
        "anyrank: rank 1 waits in all_gather_object at /u/train.py:27 main; "
        "ranks 0, 2 wait in all_reduce at /u/train.py:20 main"
    )
    assert second == (
        "  every rank must make the same calls, with the same dtypes and numbers of elements"
    )
    assert {state_of(pid) for pid in ranks_of(launcher)} == {"S"}  # the job lives on


def test_a_rank_of_the_job_leads_to_all_of_them(
    launcher: int, py_spy: Callable[..., None], anyrank: Callable[[str], Result]
) -> None:
    py_spy("barrier", "barrier", "barrier")
    pid = next(iter(ranks_of(launcher)))
    result = anyrank(f"stacks --json {pid}")
    assert result.exit_code == 0  # all wait in one place, and nobody is named
    found = json.loads(result.stdout)
    assert found["launcher"] == launcher
    assert [one["rank"] for one in found["ranks"]] == [0, 1, 2]
    assert found["verdict"]["culprits"] == []
    assert "python" in os.readlink(f"/proc/{found['ranks'][2]['pid']}/exe")


def test_without_a_right_to_the_stacks_the_reason_is_said(
    launcher: int, py_spy: Callable[..., None], anyrank: Callable[[str], Result]
) -> None:
    result = anyrank(f"stacks {launcher}")
    assert result.exit_code == 0
    assert result.stdout.count("py-spy: Permission denied (os error 13)") == 3
    assert "Traceback (most" not in result.output


def test_without_py_spy_the_commands_are_named(
    launcher: int, anyrank: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    result = anyrank(f"stacks {launcher}")
    assert result.exit_code == 0
    assert result.stdout.count(": py-spy dump --pid ") == 3
    assert (
        "the stacks of ranks 0, 1, 2 are needed to tell which rank blocks the others"
        in result.stdout
    )
    assert "no rank appears to block" not in result.stdout
    assert "pip install 'anyrank[stacks]'" in result.stdout


def test_what_a_watch_has_said_is_shown() -> None:
    """Of a job whose stacks nobody may read."""
    job = Job(4711, {0: os.getpid()})
    file = os.memfd_create(VERDICT)
    os.write(file, b"02:31:07\nanyrank: rank 1 is in its data loader")
    lines, verdict = describe(job, [Look(0)])
    os.close(file)
    assert verdict is None
    said = ["  the watch of rank 0 reported at 02:31:07:", "anyrank: rank 1 is in its data loader"]
    assert lines[-2:] == said


def test_a_stopped_rank_needs_no_stacks_and_stays_as_it_is(
    launcher: int, anyrank: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    pid = next(pid for pid, rank in ranks_of(launcher).items() if rank == "1")
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while state_of(pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    result = anyrank(f"stacks {launcher}")
    assert result.exit_code == 1
    assert "anyrank: rank 1 is stopped" in result.stdout
    assert f"kill -CONT {pid}" in result.stdout
    assert state_of(pid) == "T"


def test_what_is_no_job_is_one_message(anyrank: Callable[[str], Result]) -> None:
    alone = subprocess.Popen(["sleep", "60"])
    try:
        for pid, said in (
            (alone.pid, f"process {alone.pid}: is neither a rank nor a launcher of ranks"),
            (4194304, "process 4194304: does not exist on this machine"),
        ):
            result = anyrank(f"stacks {pid}")
            assert result.exit_code == 1
            assert said in result.stderr
            assert len(result.stderr.splitlines()) == 1
    finally:
        alone.kill()
        alone.wait()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--watch soon", "must be a positive time"),
        ("--watch 60s --report nowhere/x.json", "must be a file in a folder that exists"),
        ("--exit", "--exit and --report require --watch TIME"),
        ("--report x.json", "--exit and --report require --watch TIME"),
    ],
)
def test_options_of_a_watch_that_are_wrong_are_wrong_usage(
    options: str, said: str, anyrank: Callable[[str], Result]
) -> None:
    Path("train.py").write_text("")
    result = anyrank(f"run {options} train.py")
    assert result.exit_code == 2
    assert said in result.stderr
