"""What calls send grows with the number of ranks, and not with its square: real ranks in a network
of their own, where nothing else sends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "scale_ranks.py"
NAMESPACE = [
    "unshare",
    "--map-root-user",
    "--net",
    "sh",
    "-c",
    'ip link set lo up && exec "$@"',
    "-",
]
# From 8 to 32 ranks the tree has 31 edges for 7, 4.43 times as many. How many packets only say that
# another has come depends on when it does.
MOST = {"bytes": 4.6, "packets": 5.0}


@cache
def reason_not_to() -> str:
    """Why there is no network of its own here; "" where there is."""
    try:
        made = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "a network of its own needs unshare and iproute2"
    return f"no network of its own: {made.stderr.strip()}" if made.returncode else ""


def phases(ranks: int, job: str, tensors: int, timeout: float) -> dict[str, Any]:
    """What each phase of a job took."""
    if reason := reason_not_to():
        pytest.skip(reason)
    command = [*NAMESPACE, sys.executable, str(PROGRAM), str(ranks)]
    command += ["--job", job, "--tensors", str(tensors)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=timeout, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {line["phase"]: line for line in lines}


def test_bytes_and_packets_of_a_load_and_a_step_grow_as_the_ranks_do() -> None:
    few, many = (phases(ranks, "parts", 64, 240) for ranks in (8, 32))
    for name in ("load", "step"):
        for figure, most in MOST.items():
            assert many[name][figure] <= most * few[name][figure], (name, figure, few, many)


def test_an_agreement_of_64_ranks_is_small() -> None:
    found = phases(64, "agree", 2, 240)
    assert found["agreement"]["bytes"] < 80_000
    assert found["agreement"]["packets"] < 800


def test_256_ranks_load_their_parts() -> None:
    """Each checks its own values."""
    found = phases(256, "parts", 8, 400)
    assert found["load"]["bytes"] < 256 * 20_000
