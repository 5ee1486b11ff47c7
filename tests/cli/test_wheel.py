"""The wheel and the sdist: built, installed in a folder of its own, and used from there."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib.metadata, os, sys, torch, anyrank
assert anyrank.__file__.startswith(sys.argv[1]), anyrank.__file__
assert all(hasattr(anyrank, name) for name in anyrank.__all__)
for name in ("py.typed", "cli/finetune.py"):
    assert os.path.exists(os.path.join(os.path.dirname(anyrank.__file__), name)), name
model = torch.nn.Linear(2, 1)
with anyrank.Checkpoints("run", anyrank.TrainState(model)) as ckpts:
    ckpts.save()
    assert ckpts.resume().components["model"] == "exact"
found = importlib.metadata.distributions(name="anyrank", path=[sys.argv[1]])
print(next(iter(found)).version, anyrank.__version__)
"""


def run(*line: str, cwd: Path, **env: str) -> str:
    ended = subprocess.run(
        line,
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()


@pytest.mark.slow
def test_what_is_built_works_where_it_is_installed(tmp_path: Path) -> None:
    out, site = tmp_path / "dist", str(tmp_path / "site")
    python = sys.executable
    run(python, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=tmp_path)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"README.md", "LICENSE", "src/anyrank/__init__.py", "pyproject.toml"} <= names
    pip = (python, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site)
    run(*pip, str(wheel), cwd=tmp_path)
    version, own = run(python, "-c", PROGRAM, site, cwd=tmp_path, PYTHONPATH=site).split()
    assert version == own
    command = os.path.join(site, "bin", "anyrank")
    assert run(command, "--version", cwd=tmp_path, PYTHONPATH=site) == f"anyrank {version}"
