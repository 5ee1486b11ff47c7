"""The memory of `anyrank run`: there for its ranks, and gone when it ends, however it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from anyrank.cli.run_memory import TMPFS, surviving_memory
from anyrank.settings import PEERS_FOLDER


def test_it_is_there_until_the_end(tmp_path: Path) -> None:
    with surviving_memory(str(tmp_path)) as variables:
        folder = Path(variables[PEERS_FOLDER])
        (folder / "run").mkdir()
        assert folder.stat().st_mode & 0o077 == 0
        with surviving_memory(str(tmp_path)) as others:
            assert others != variables
        assert (folder / "run").is_dir()  # another run's is left alone
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_owner_left_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom anyrank.cli.run_memory import surviving_memory\n"
        "with surviving_memory(sys.argv[1]) as variables:\n"
        "    os.mkdir(os.path.join(*variables.values(), 'run'))\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    with surviving_memory(str(tmp_path)) as variables:
        assert [str(one) for one in tmp_path.iterdir()] == [*variables.values()]
        assert not left.exists()


def test_a_machine_without_such_memory_has_none(tmp_path: Path) -> None:
    with surviving_memory(str(tmp_path / "gone")) as variables:
        assert variables == {}


SCRIPT = """
import json, os, pathlib, signal
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import anyrank

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(6, 6))
optimizer = torch.optim.AdamW(model.parameters())
loader = anyrank.ElasticLoader(torch.randn(24, 6), global_batch=12, microbatch=1)
state = anyrank.TrainState(model, optimizer, data=loader)
is_first = not os.path.exists("begun")
records = []
with anyrank.Checkpoints("run", state, peers=True, on_commit=records.append) as ckpts:
    report = ckpts.resume()
    for step in ckpts.steps(until=5):
        for x in step.microbatches(model):
            if is_first and step.number == 3 and dist.get_rank() == 1:
                pathlib.Path("begun").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
if dist.get_rank() == 0:
    said = [report.step, report.path, len(records)]
    said.append([(one.epoch, one.samples, one.verdict) for one in loader.receipts])
    pathlib.Path("report.json").write_text(json.dumps(said))
"""


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_goes_on_from_memory(
    anyrank: Callable[[str], Result],
) -> None:
    Path("train.py").write_text(SCRIPT)
    result = anyrank("run --ranks 2 --then 2 --json train.py")
    attempts = json.loads(result.stdout)["attempts"]
    assert [one["ranks"] for one in attempts] == [2, 2]
    assert attempts[0]["exit_code"] == 137
    assert attempts[1]["exit_code"] == 0
    step, path, saves, receipts = json.loads(Path("report.json").read_text())
    assert (step, saves) == (3, 1)  # the one save is that at the end: none was there to be read
    assert path.startswith(f"{TMPFS}/anyrank-run-")
    assert not Path(path).exists()
    assert receipts == [[0, 24, "exactly once"], [1, 24, "exactly once"]]
