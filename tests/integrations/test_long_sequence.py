"""The example trains where plain training has no room, on one rank and on two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.scripts import run_python

EXAMPLE = str(Path(__file__).parents[2] / "examples/long_sequence.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def check(printed: str) -> None:
    assert "allocate memory" in printed
    assert "plain: fits" not in printed
    line = next(line for line in printed.splitlines() if line.startswith("anyrank:"))
    losses = [float(word) for word in line.split()[1:]]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_the_example_trains_where_plain_does_not_fit() -> None:
    check(run_python(EXAMPLE, "--tokens", "2048", "--limit-mib", "336", "--steps", "4"))


@pytest.mark.slow
def test_the_example_trains_on_two_ranks_where_plain_does_not_fit() -> None:
    command = [sys.executable, *TORCHRUN, EXAMPLE, "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    check(done.stdout)
