"""The benchmarks that take a device run on the simulated one; without a device they say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script, in a process of its own."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.gpu
@pytest.mark.sim
@pytest.mark.slow
def test_every_case_runs_on_a_device() -> None:
    done = run("--sim", SIM_DEVICES="2")
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in done.stdout.splitlines() if line.startswith("seconds of ")]
    names = [line.removeprefix("seconds of ").split(":")[0] for line in said]
    assert names == ["load", "save", "sync", "exact times", "exact memory", "exact bits", "memory"]
    bits = {line[-36:] for line in done.stdout.splitlines() if line.startswith("bits, ")}
    assert len(bits) == 2  # those of float32, and those under bfloat16


def test_without_a_device_nothing_is_measured() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "torch sees no CUDA device here, so nothing is measured\n"
