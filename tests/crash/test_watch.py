"""`anyrank.watch`: jobs that hang name the rank and the line.

They run on forks of the pool's ranks, and under torchrun where its signals end a rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.hangs import ASYNCHRONOUS, HANGS, MESSAGES, ON_MANY_RANKS, PRELUDE, Hang, within_a_run
from tests.scripts import TORCHRUN as TORCHELASTIC
from tests.scripts import exit_code, fork, our_frames

from anyrank.testing import RankPool, run_ranks
from anyrank.testing.pool import find_port
from anyrank.watching.launched import run_program
from anyrank.watching.system import descendants

LIMIT_SEC = 240  # for a job that takes ten on a machine of its own
AFTER = "3s"
KILL_SEC = 10.0  # for ranks to end after the report
LONGER = "6s"  # than a busy machine takes to start the workers of a DataLoader
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
TOGETHER = {
    **HANGS,
    **ASYNCHRONOUS,
    **MESSAGES,
    **{f"{name}, within a run": within_a_run(hang) for name, hang in HANGS.items()},
}
ANYRANK = ["-c", "import sys; from anyrank.cli import main; main(sys.argv[1:])"]


def run(folder: Path, *arguments: str, script: str = "") -> subprocess.CompletedProcess[str]:
    """Run this Python in a folder; its descendants are gone when this returns."""
    if script:
        (folder / "train.py").write_text(script)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Files, as what a job has left behind may hold a pipe open.
    said, told = folder / "stdout", folder / "stderr"
    with open(said, "w") as out, open(told, "w") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=environ, stdout=out, stderr=err
        )
    try:
        process.wait(LIMIT_SEC)
    finally:
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
    texts = [path.read_text(errors="replace") for path in (said, told)]
    return subprocess.CompletedProcess(arguments, process.returncode, *texts)


def torchrun(folder: Path, script: str, *arguments: str, ranks: int = 3) -> Any:
    line = [*TORCHRUN, f"--nproc-per-node={ranks}", "train.py", *arguments]
    return run(folder, *line, script=script)


def screens(text: str) -> list[str]:
    """The first lines of what the watch has said."""
    return [line for line in text.splitlines() if line.startswith("anyrank: ")]


def read(report: Path) -> dict[str, Any]:
    return dict(json.loads(report.read_text()))


def check(report: dict[str, Any], hang: Hang, script: Path, ranks: int = 3) -> None:
    culprit = hang.culprit % ranks
    assert report["culprits"] == [culprit]
    assert report["kind"] in hang.kinds
    assert report["waiting"] == [rank for rank in range(ranks) if rank != culprit]
    if hang.has_line:
        assert (report["file"], report["line"] in hang.lines) == (str(script), True), report
    else:
        assert (report["file"], report["line"], report["function"]) == (None, None, None)
    assert set(report) == {
        *("culprits", "kind", "file", "line", "function", "waiting", "collective", "stacks")
    }


def run_train(folder: str, *arguments: str) -> None:
    os.chdir(folder)
    run_program(("train.py", *arguments))


def job_hangs(ports: dict[str, int]) -> list[int]:
    """The exit codes of this rank in jobs by their folders, which all hang at once."""
    forks = [
        fork(f"{folder}/log", run_train, [folder, LONGER, "out"], MASTER_PORT=str(port))
        for folder, port in ports.items()
    ]
    return [end_of(pid, Path(folder, "out")) for pid, folder in zip(forks, ports, strict=True)]


def end_of(pid: int, report: Path) -> int:
    """The exit code of a fork, or minus the signal that ends it, once it was reported; a rank that
    is stopped, or holds the GIL, does not end itself.
    """
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if report.exists() and time.time() > report.stat().st_mtime + KILL_SEC:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return exit_code(pid)


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int]]]:
    """The folder of each hang, and the exit codes of its ranks; together, as each mostly waits."""
    folders = {name: tmp_path_factory.mktemp("hang") for name in TOGETHER}
    for name, folder in folders.items():
        (folder / "train.py").write_text(TOGETHER[name].script)
    ports: set[int] = set()
    while len(ports) < len(folders):
        ports.add(find_port())
    jobs = dict(zip(map(str, folders.values()), ports, strict=True))
    with RankPool() as pool:  # of ranks that have run no backward, which forks cannot take over
        codes = pool.run(3, job_hangs, jobs, init=False, env=TORCHELASTIC, timeout=LIMIT_SEC)
    return {name: (folders[name], [*ended]) for name, *ended in zip(folders, *codes, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_a_hang_names_its_rank_and_line(name: str, hung: dict[str, tuple[Path, list[int]]]) -> None:
    folder, codes = hung[name]
    log = (folder / "log").read_text(errors="replace")
    assert 124 in codes, log
    assert len(screens(log)) == 1, log
    check(read(folder / "out"), TOGETHER[name], folder / "train.py")


MANY = 24  # ranks of a job, on the cores of one machine


def many_hang(folders: list[str], ports: list[int]) -> list[list[int]]:
    """The exit codes of the ranks of jobs that hang at once."""
    jobs = [
        [
            fork(
                f"{folder}/log",
                run_train,
                [folder, LONGER, "out"],
                **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
                **{name: str(MANY) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
                MASTER_PORT=str(port),
            )
            for rank in range(MANY)
        ]
        for folder, port in zip(folders, ports, strict=True)
    ]
    return [
        [end_of(pid, Path(folder, "out")) for pid in job]
        for folder, job in zip(folders, jobs, strict=True)
    ]


@pytest.mark.slow
def test_of_many_ranks_the_right_one_is_named(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ON_MANY_RANKS]
    for folder, hang in zip(folders, ON_MANY_RANKS.values(), strict=True):
        folder.mkdir()
        (folder / "train.py").write_text(hang.script)
    ports = [find_port() for _ in folders]
    codes = run_ranks(
        1, many_hang, [*map(str, folders)], ports, init=False, env=TORCHELASTIC, timeout=LIMIT_SEC
    )[0]
    for folder, hang, ended in zip(folders, ON_MANY_RANKS.values(), codes, strict=True):
        log = (folder / "log").read_text(errors="replace")
        assert (124 in ended, len(screens(log))) == (True, 1), log
        check(read(folder / "out"), hang, folder / "train.py", MANY)
        late_sec = (folder / "out").stat().st_mtime - last_step(folder) - float(LONGER[:-1])
        assert late_sec < 20, log


def last_step(folder: Path) -> float:
    """When any rank of a job has stepped last."""
    return max(path.stat().st_mtime for path in folder.glob("step-*"))


@pytest.mark.slow
def test_a_rank_whose_end_torchrun_does_not_see_is_named(tmp_path: Path) -> None:
    hang = HANGS["SIGKILL with sockets kept open by a child"]
    program = [sys.executable, "train.py", AFTER, "out"]
    line = ["--no-python", "bash", "-c", '"$@"; sleep 8', "bash", *program]
    done = run(tmp_path, *TORCHRUN, "--nproc-per-node=3", *line, script=hang.script)
    assert len(screens(done.stderr)) == 1, done.stderr
    check(read(tmp_path / "out"), hang, tmp_path / "train.py")


FIRST_STOPS = """
for number in range(100):
    if rank == 0 and number == 5:
        if os.fork() == 0:
            while not os.path.exists("out"):
                time.sleep(0.1)
            time.sleep(1)  # until the others have ended
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
    step(x)
"""


@pytest.mark.slow
def test_the_next_rank_judges_if_the_first_is_silent(tmp_path: Path) -> None:
    done = torchrun(tmp_path, PRELUDE + FIRST_STOPS, AFTER, "out")
    assert len(screens(done.stderr)) == 1, done.stderr
    report = read(tmp_path / "out")
    found = report["culprits"], report["kind"], report["waiting"]
    assert found == ([0], "stopped", [1, 2]), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a save under if rank == 0", "the GIL held in C"])
def test_anyrank_run_watches_a_script_as_it_is(name: str, tmp_path: Path) -> None:
    hang = HANGS[name]
    options = ["run", "--ranks=3", "--watch", AFTER, "--exit", "--report", "out", "train.py"]
    done = run(tmp_path, *ANYRANK, *options, script=hang.script)
    assert done.returncode == 124
    assert len(screens(done.stderr)) == 1, done.stderr
    check(read(tmp_path / "out"), hang, tmp_path / "train.py")
    assert not [pid for pid in Path("/proc").iterdir() if runs_in(pid, tmp_path)]


def runs_in(process: Path, folder: Path) -> bool:
    """Whether a process, as a folder of /proc, has this folder as its own."""
    try:
        return process.name.isdigit() and os.readlink(process / "cwd") == str(folder)
    except OSError:
        return False


UNEVEN = """
import random
draw = random.Random(rank)
big = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])

def evaluate():
    end = time.monotonic() + 8
    while time.monotonic() < end:
        big(torch.ones(512, 128)).sum().item()

def save():
    end = time.monotonic() + 6
    while time.monotonic() < end:
        torch.save(big.state_dict(), f"saved-{rank}")

for number in range(8):
    time.sleep(draw.random() * 1.5)
    step(x)
    if number == 3 and rank == 0:
        evaluate()
    if number == 5 and rank == 1:
        save()
print("trained")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_an_uneven_job_raises_no_alarm(tmp_path: Path) -> None:
    """A rank evaluates, and one saves, for longer than the limit; the others wait."""
    done = torchrun(tmp_path, PRELUDE + UNEVEN, AFTER, "out")
    assert (done.returncode, done.stdout.count("trained")) == (0, 3), done.stderr
    assert (screens(done.stderr), our_frames(done.stderr)) == ([], [])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_job_goes_on_after_the_report(tmp_path: Path) -> None:
    script = """
import anyrank
step(x)  # the first one connects the ranks, which takes seconds on a busy machine
anyrank.watch("5s", report="out")
if rank == 1:
    while not os.path.exists("out"):
        time.sleep(0.1)
step(x)
print("trained")
"""
    done = torchrun(tmp_path, PRELUDE + script)
    assert (done.returncode, done.stdout.count("trained")) == (0, 3), done.stderr
    assert [line[:15] for line in screens(done.stderr)] == ["anyrank: rank 1"]
    report = read(tmp_path / "out")
    assert (report["culprits"], report["kind"]) == ([1], "slow")


@pytest.mark.slow
def test_a_rank_that_never_calls_watch_is_named(tmp_path: Path) -> None:
    script = """
import anyrank
if rank != 1:
    anyrank.watch("2s", exit=True, report="out")
step(x)
if rank == 1:
    time.sleep(1000)
step(x)
"""
    done = torchrun(tmp_path, PRELUDE + script)
    assert "rank 1 never called anyrank.watch. Call it on every rank" in done.stderr
    (screen,) = screens(done.stderr)
    said = "anyrank: rank 1 has never called anyrank.watch; ranks 0, 2 called all_reduce #2 at "
    assert screen.startswith(said)
    report = read(tmp_path / "out")
    assert (report["culprits"], report["waiting"], report["line"]) == ([1], [0, 2], None)


@pytest.mark.slow
def test_a_script_that_does_odd_things_goes_on_as_without_a_watch(tmp_path: Path) -> None:
    """It watches twice, forks, prints binary, leaves its group, and raises at the end."""
    script = """
import anyrank
first = anyrank.watch("1s", report="out")
anyrank.watch("2s", report="out")
step(x)
child = os.fork()
if child == 0:
    os._exit(7)
assert os.waitpid(child, 0)[1] >> 8 == 7
sys.stdout.buffer.write(bytes(range(256)))
dist.destroy_process_group()
time.sleep(3)
raise KeyError("of the script")
"""
    done = torchrun(tmp_path, PRELUDE + script, ranks=2)
    assert done.returncode == 1
    assert done.stderr.count("watch() is already running, after=1 s") == 2
    assert "KeyError: 'of the script'" in done.stderr
    assert (screens(done.stderr), our_frames(done.stderr)) == ([], [])
    assert not (tmp_path / "out").exists()


THREADS = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise KeyError('of the script')", 1, "KeyError: 'of the script'"),
        ("os._exit(3)", 3, ""),
        ("sys.exit(4)", 4, ""),
    ],
)
def test_a_watched_script_ends_as_it_does_alone(
    ending: str, code: int, said: str, tmp_path: Path
) -> None:
    checks = "import os, sys\nassert (sys.argv[1:], __name__) == (['--x'], '__main__')\n"
    (tmp_path / "train.py").write_text(f"{checks}{THREADS}{ending}\n")
    done = run(tmp_path, *ANYRANK, "run", "--ranks=1", "--watch=60s", "train.py", "--x")
    assert done.returncode == code
    assert said in done.stderr
    assert our_frames(done.stderr) == []
    # One that is in C++ at the end would abort the process.
    assert ("['MainThread']" in done.stdout) == ("_exit" not in ending)
