"""The example trains where plain training has no room, on one rank and on two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = str(Path(__file__).parents[2] / "examples/long_sequence.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("start", [[], TORCHRUN], ids=["python", "torchrun"])
def test_the_example_trains_where_plain_does_not_fit(start: list[str]) -> None:
    command = [sys.executable, *start, EXAMPLE, "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "allocate memory" in done.stdout
    assert "plain: fits" not in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("anyrank:"))
    losses = [float(word) for word in line.split()[1:]]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
