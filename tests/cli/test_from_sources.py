"""What runs from sources on PYTHONPATH, where no metadata of anyrank is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

# For each Python that a test starts, and those that these start: hides what pip has written.
HIDE = """
import importlib.metadata as metadata

found = metadata.Distribution.from_name.__func__


def from_name(kind, name):
    if name == "anyrank":
        raise metadata.PackageNotFoundError(name)
    return found(kind, name)


metadata.Distribution.from_name = classmethod(from_name)
"""
TRAINS = """
import importlib.metadata, torch, anyrank

try:
    importlib.metadata.version("anyrank")
except importlib.metadata.PackageNotFoundError:
    print("hidden")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = anyrank.ElasticLoader(torch.randn(8, 4), global_batch=4, microbatch=2, exact=True)
state = anyrank.TrainState(model, optimizer, data=loader)
with anyrank.Checkpoints("run", state) as ckpts:
    for step in ckpts.steps(epochs=1):
        for batch in step.microbatches(model):
            step.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
anyrank.convert("run", "out.safetensors")
print("steps", state.step)
"""


def test_a_run_a_check_and_the_command_line_work_from_sources(tmp_path: Path) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(HIDE, encoding="utf-8")
    (tmp_path / "train.py").write_text(TRAINS, encoding="utf-8")
    paths = f"{tmp_path / 'hide'}{os.pathsep}{SRC}"
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    outputs: list[str] = []
    for arguments in (
        ["train.py"],
        ["-m", "anyrank", "--version"],
        ["-m", "anyrank", "inspect", "run"],
        ["-m", "anyrank", "verify", "run"],
    ):
        run = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert run.returncode == 0, (arguments, run.stdout, run.stderr)
        outputs.append(run.stdout)
    assert "hidden" in outputs[0]
    assert "steps 2" in outputs[0]
