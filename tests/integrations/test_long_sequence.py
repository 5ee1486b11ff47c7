"""The example trains where plain training has no room, on one rank and on two.

The limits are twice what it takes and half of what plain takes: how much of its memory a process
loses to fragments depends on what it did before.
"""

from __future__ import annotations

from pathlib import Path

from tests.scripts import run_python, run_script

EXAMPLE = str(Path(__file__).parents[2] / "examples/long_sequence.py")


def check(printed: str) -> None:
    assert "allocate memory" in printed
    assert "plain: fits" not in printed
    line = next(line for line in printed.splitlines() if line.startswith("anyrank:"))
    losses = [float(word) for word in line.split()[1:]]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_the_example_trains_where_plain_does_not_fit() -> None:
    check(run_python(EXAMPLE, "--tokens", "2048", "--limit-mib", "400", "--steps", "4"))


def test_the_example_trains_on_two_ranks_where_plain_does_not_fit() -> None:
    for printed in run_script(2, EXAMPLE):
        check(printed)
