"""The example of a trainer and a generator, as torchrun starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/rl_sync.py"


@pytest.mark.slow
def test_the_generator_has_the_weights_of_each_step() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", str(EXAMPLE)]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    steps = [line for line in run.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 5
    # Each byte once: 2 generators take their parts of two matrices, and the rest whole.
    up_and_down = 2 * 32 * 128 + 128
    rest = 2 * (11 * 32 + 32 + 32 * 11 + 11)
    assert all(line.endswith(f"sent {4 * (up_and_down + rest)} bytes") for line in steps), steps
