"""`anyrank run`: real torchrun, restarts on other ranks, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from tests.scripts import wait_for_the_end_of

from anyrank.cli.run import script_environment
from anyrank.cli.torchrun import describe_rendezvous
from anyrank.testing.pool import find_port
from anyrank.watching.system import descendants

SCRIPT = """
import os, sys, pathlib, time
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
pathlib.Path(f"seen-{size}-{rank}").write_text(" ".join(sys.argv[1:]))
if "--wait" in sys.argv:
    time.sleep(60)
raise SystemExit(int(size) > 1)
"""


@pytest.mark.slow
def test_a_script_that_fails_goes_on_on_fewer_ranks(anyrank: Callable[[str], Result]) -> None:
    Path("train.py").write_text(SCRIPT)
    result = anyrank("run --ranks 2 --then 1 --then 1 --json train.py --lr 3 --json")
    assert result.exit_code == 0
    attempts = json.loads(result.stdout)["attempts"]
    assert [(one["ranks"], one["exit_code"]) for one in attempts] == [(2, 1), (1, 0)]
    assert "exit code 1 on 2 ranks after" in result.stderr
    assert "continuing on 1" in result.stderr
    assert sorted(path.name for path in Path().glob("seen-*"))[0] == "seen-1-0"
    assert Path("seen-1-0").read_text() == "--lr 3 --json"  # the script's own flags


@pytest.mark.slow
def test_the_exit_code_is_the_scripts(anyrank: Callable[[str], Result]) -> None:
    # Those of scripts that raise, and that exit, are among the attempts of other tests.
    Path("train.py").write_text("import os; os.kill(os.getpid(), 9)")
    result = anyrank("run train.py")
    assert (result.exit_code, result.stdout) == (137, "")


@pytest.mark.slow
def test_a_module_runs_as_with_python_m(anyrank: Callable[[str], Result]) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").write_text("")
    Path("package/train.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom . import __name__ as package\n"
        "Path('seen').write_text(' '.join([package, __name__, *sys.argv[1:]]))\n"
    )
    assert anyrank("run --ranks 1 -m package.train -m --lr 3").exit_code == 0
    assert Path("seen").read_text() == "package __main__ -m --lr 3"


@pytest.mark.slow
def test_sigterm_is_passed_on_and_ends_the_attempts(tmp_path: Path) -> None:
    process = start_and_wait(tmp_path)
    os.kill(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(json.loads(said)["attempts"]) == 1


@pytest.mark.slow
def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    process = start_and_wait(tmp_path)
    below = list(descendants(process.pid))
    assert len(below) >= 3  # torchrun and two ranks
    process.kill()
    process.communicate(timeout=240)
    wait_for_the_end_of(below)


def start_and_wait(tmp_path: Path) -> subprocess.Popen[str]:
    """`anyrank run` with two ranks of a script that waits, once both have begun."""
    (tmp_path / "train.py").write_text(SCRIPT)
    line = ["-m", "anyrank.cli", "run", "--ranks=2", "--then=1", "--json", "train.py", "--wait"]
    code = "import sys; from anyrank.cli import main; main(sys.argv[3:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *line], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while not (tmp_path / "seen-2-1").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_several_machines_take_the_flags_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, pathlib, sys, torch.distributed as dist\n"
        'dist.init_process_group("gloo")\n'
        "dist.barrier()\n"  # one that ended would cut off another that still connects
        'seen = f"seen-{dist.get_rank()}-{dist.get_world_size()}"\n'
        'pathlib.Path(seen).write_text(os.environ["GROUP_RANK"] + sys.argv[1])\n'
    )
    code = "import sys; from anyrank.cli import main; main(sys.argv[1:])"
    common = ["--ranks=1", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={find_port()}"]
    machines = [
        subprocess.Popen(
            [sys.executable, "-c", code, "run", *common, f"--node-rank={n}", "train.py", "--x"],
            cwd=tmp_path,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for n in range(2)
    ]
    try:
        assert [one.wait(240) for one in machines] == [0, 0]
    finally:
        for one in machines:
            one.kill()
            one.wait()
    assert (tmp_path / "seen-0-2").read_text() == "0--x"
    assert (tmp_path / "seen-1-2").read_text() == "1--x"


@pytest.mark.parametrize(
    ("name", "line"), [("run_no_script", "run nothing.py"), ("run_no_ranks", "run --ranks 0 x.py")]
)
def test_wrong_usage_is_exit_2(
    name: str, line: str, snapshot: Callable[[str, str], Result]
) -> None:
    assert snapshot(name, line).exit_code == 2


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert script_environment(1)["OMP_NUM_THREADS"] == str(cores)
    assert script_environment(64 * cores)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert script_environment(1)["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--nnodes 2", "--nnodes 2 needs --master-addr"),
        ("--nnodes 1:4 --node-rank 1", "--nnodes 1:4 needs --master-addr"),
        ("--nnodes 2 --rdzv-backend c10d --master-addr a", "needs --rdzv-endpoint"),
        (
            "--node-rank 1 --master-addr a",
            "--node-rank 1: must be less than the number of machines, --nnodes 1",
        ),
        (
            "--nnodes 2 --node-rank 2 --master-addr a",
            "--node-rank 2: must be less than the number of machines",
        ),
    ],
)
def test_machines_that_could_not_find_each_other_are_wrong_usage(
    anyrank: Callable[[str], Result], flags: str, said: str
) -> None:
    Path("train.py").write_text(SCRIPT)
    result = anyrank(f"run --ranks 1 {flags} train.py")
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not list(Path().glob("seen-*"))


def test_a_machine_that_can_find_the_others_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MASTER_ADDR", "host-0")
    assert "waiting for the others at host-0" in str(describe_rendezvous({"nnodes": "2"}))
    machines: dict[str, str | None] = {"nnodes": "1:2", "rdzv_backend": "c10d", "node_rank": None}
    assert "at host-1:29400" in str(
        describe_rendezvous({**machines, "rdzv_endpoint": "host-1:29400"})
    )
    monkeypatch.setenv("PET_NODE_RANK", "1")  # as a cluster sets it, for a job on one machine too
    for alone in ({}, {"nnodes": "1"}, {"nnodes": "1:1", "master_port": "3"}, {"nnodes": "many"}):
        assert describe_rendezvous(alone) is None


@pytest.mark.slow
def test_a_machine_whose_others_do_not_come_says_where_it_waits(
    anyrank: Callable[[str], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyrank.cli.run.WAIT_SEC", 1)
    Path("train.py").write_text(SCRIPT)
    place = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{find_port()}"
    limits = "--rdzv-conf join_timeout=2,last_call_timeout=1"
    result = anyrank(f"run --ranks 1 --nnodes 2 {place} {limits} train.py")
    assert result.exit_code != 0
    said = " ".join(result.stderr.split())
    assert "This is machine 0 (--nnodes 2), waiting for the others at 127.0.0.1:" in said
