"""Builds the simulated device, and runs a part of the tests of devices on it in another process:
where it is registered, it is every call's accelerator. All of them: `make device`. What needs no
device runs in this session already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.device.build_sim import build, why_not

ROOT = Path(__file__).parents[2]
# A rank whose device is not the current one, two threads, more than one slot's worth of bytes.
SHARP = {"LOCAL_RANK": "1", "ANYRANK_READ_THREADS": "2", "ANYRANK_CUDA_BUFFER_BYTES": str(1 << 18)}
PART = ["tests/device", *(f"tests/gpu/test_{n}_device.py" for n in ("load", "resume", "memory"))]


@pytest.mark.builds_sim
def test_a_device_whose_copies_are_late_is_waited_for() -> None:
    if why_not():
        pytest.skip(why_not())
    build()
    assert not hasattr(torch, "sim")  # nor in the process of all other tests
    command = [sys.executable, "-m", "pytest", "-q", "--device", "sim", "-m", "gpu", *PART]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | SHARP,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) > 40
