"""The example of a trainer and a generator, on four ranks."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import run_script

EXAMPLE = Path(__file__).parents[2] / "examples/rl_sync.py"


def test_the_generator_has_the_weights_of_each_step() -> None:
    steps = run_script(4, str(EXAMPLE))[0].splitlines()
    assert len(steps) == 5
    # Each byte once: 2 generators take their parts of two matrices, and the rest whole.
    up_and_down = 2 * 32 * 128 + 128
    rest = 2 * (11 * 32 + 32 + 32 * 11 + 11)
    assert all(line.endswith(f"sent {4 * (up_and_down + rest)} bytes") for line in steps), steps
