"""Warm starts of `anyrank run`: ranks that wait with torch imported, and then are any others."""

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

from anyrank.cli.torchrun import descendants
from anyrank.saving.peers import READ_AT_IMPORT
from anyrank.settings import PEERS_FOLDER, WARM_REQUEST

WARM = ["-m", "anyrank.cli.warm_rank"]
SCRIPT = """
import json, os, pathlib, signal, sys, time

def wait_for_the_next():
    folder = pathlib.Path(os.environ["ANYRANK_PEERS_FOLDER"])
    before = set(folder.glob("gate-*"))
    (folder / "warm-start").touch()
    while not set(folder.glob("gate-*")) - before:
        time.sleep(0.05)

def attempt():
    here = sorted(pathlib.Path().glob("seen-*"))
    main = sys.modules["__main__"]
    pathlib.Path(f"seen-{len(here)}").write_text(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__,
        "main": main.attempt is attempt, "rank": RANK, "started": sys.orig_argv[2:4],
        "imported": {"torch.distributed.fsdp", "torch._dynamo"} <= sys.modules.keys(),
        "environ": sorted(os.environ.keys() - {"TORCHELASTIC_RUN_ID"}),
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }))
    return len(here)

RANK = os.environ["RANK"]
number = attempt()
"""


def attempts(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("seen-*"))]


@pytest.mark.slow
def test_a_warm_rank_is_the_script_as_ever(anyrank: Callable[[str], Result]) -> None:
    Path("sub").mkdir()
    end = (
        "if number < 2:\n    wait_for_the_next()\n"
        "if number == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\nsys.exit([3, 0, 0][number])\n"
    )
    Path("sub/train.py").write_text(SCRIPT + end)
    result = anyrank("run --ranks 1 --then 1 --then 1 --json sub/train.py --lr 3 -m")
    codes = [one["exit_code"] for one in json.loads(result.stdout)["attempts"]]
    assert codes == [3, 128 + signal.SIGKILL, 0]
    cold, *warm = attempts(Path())
    assert [one.pop("started") for one in warm] == [WARM, WARM]
    assert cold.pop("started") != WARM
    assert [one.pop("imported") for one in (cold, *warm)] == [False, True, True]
    assert warm == [cold, cold]
    assert cold["argv"] == ["sub/train.py", "--lr", "3", "-m"]
    assert cold["path"] == str(Path("sub").resolve())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_waits_ends_with_the_run(tmp_path: Path, number: int) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT + "wait_for_the_next()\npathlib.Path('waits').touch()\ntime.sleep(60)\n"
    )
    code = "import sys; from anyrank.cli import main; main(sys.argv[1:])"
    line = ["run", "--ranks=1", "--then=1", "train.py"]
    process = subprocess.Popen([sys.executable, "-c", code, *line], cwd=tmp_path)
    wait_until(lambda: (tmp_path / "waits").exists())
    wait_until(lambda: warm_ranks(process.pid) != [])
    below = list(descendants(process.pid))
    assert len(below) >= 4  # two launchers, a rank of each
    process.send_signal(number)
    assert process.wait(100) == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not any(map(is_running, below)))


def warm_ranks(pid: int) -> list[int]:
    return [one for one in descendants(pid) if b"anyrank.cli.warm_rank" in command_of(one)[-4:]]


def command_of(pid: int) -> list[bytes]:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [] if b"anyrank.cli.launcher" in line else line


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


WISH = """
import os, sys
os.environ.update(item.split("=") for item in sys.argv[2:])
import torch
torch.optim.SGD([torch.zeros(1)])
from anyrank.saving.peers import PeerMemory
from anyrank.world.ranks import one_process
PeerMemory(sys.argv[1], "run", one_process()).open()
"""


@pytest.mark.parametrize(
    ("changed", "is_asked"),
    [
        ("TOKENIZERS_PARALLELISM=0", True),
        ("OMP_NUM_THREADS=3", False),
        ("TORCHINDUCTOR_MAX_AUTOTUNE=1", False),
        ("TORCHINDUCTOR_CACHE_DIR=/tmp/x", False),
        ("TMPDIR=/dev/shm", False),
    ],
)
def test_a_script_that_sets_what_torch_reads_is_started_cold(
    tmp_path: Path, changed: str, is_asked: bool
) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", PEERS_FOLDER: str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", WISH, str(tmp_path), changed], env=environ, check=True, timeout=240
    )
    assert (tmp_path / WARM_REQUEST).exists() == is_asked


READ = """
import importlib, os
from anyrank.cli import warm_rank

names = set()

class Environ(type(os.environ)):
    def __getitem__(self, name):
        names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name):
        names.add(name)
        return super().__contains__(name)

for name in warm_rank.IMPORTED:
    importlib.import_module(name)
os.environ.__class__ = Environ
warm_rank._make_optimizer()
print(*names)
"""


def test_all_that_the_first_optimizer_reads_of_the_environment_is_known() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", READ], capture_output=True, text=True, check=True, timeout=240
    )
    names = ended.stdout.split()
    assert "TORCHINDUCTOR_MAX_AUTOTUNE" in names
    assert [name for name in names if not READ_AT_IMPORT.match(name)] == []
