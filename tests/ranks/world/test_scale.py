"""What calls send grows with the number of ranks, and not with its square: real ranks in a network
of their own, where nothing else sends.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.crowded

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
# From 8 to 32 ranks the tree has 31 edges for 7, 4.43 times as many, and what the first rank
# collects goes over two of them; where every rank tells every other one, it is 16 times as many.
# Ranks that wait long, as on a busy machine, look into the store, which adds to it: up to 4.7 times
# as many on a quiet machine, 5.1 beside a load of 30.
MOST = 6.0
FIGURES = ("bytes", "packets")
TRIES = 4  # of which the least counts


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


def check_growth(job: str, tensors: int, names: Sequence[str]) -> None:
    """Refuse a job whose phases send more than `MOST` times as much on 32 ranks as on 8."""
    least: dict[tuple[str, str, int], int] = {}
    too_much: list[str] = []
    for _ in range(TRIES):
        for ranks in (8, 32):
            found = phases(ranks, job, tensors, 240)
            for name, figure in itertools.product(names, FIGURES):
                key = name, figure, ranks
                least[key] = min(found[name][figure], least.get(key, sys.maxsize))
        too_much = [
            f"{name}: {few} {figure} on 8 ranks, {many} on 32, {many / few:.2f} times as many"
            for name, figure in itertools.product(names, FIGURES)
            for few, many in [(least[name, figure, 8], least[name, figure, 32])]
            if many > MOST * few
        ]
        if not too_much:
            return
    raise AssertionError("\n".join(too_much))


def test_bytes_and_packets_of_a_load_and_a_step_grow_as_the_ranks_do() -> None:
    check_growth("parts", 64, ["load", "step"])


def test_bytes_and_packets_of_a_run_grow_as_the_ranks_do() -> None:
    """Each checks the values that it resumes and loads."""
    check_growth("runs", 64, ["save", "resume", "load of the run"])


def test_an_agreement_of_64_ranks_is_small() -> None:
    found = phases(64, "agree", 2, 240)
    assert found["agreement"]["bytes"] < 80_000
    assert found["agreement"]["packets"] < 800


def test_96_ranks_load_their_parts() -> None:
    """Each checks its own values. `make scale` has 256 and 1,024, which leave no core to others."""
    found = phases(96, "parts", 8, 240)
    assert found["load"]["bytes"] < 96 * 20_000
