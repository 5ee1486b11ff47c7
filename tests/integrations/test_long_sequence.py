"""The example trains where plain training has no room, on one rank and on two."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from tests.scripts import TORCHRUN, job_alone, job_script

from anyrank.testing import run_ranks

EXAMPLE = str(Path(__file__).parents[2] / "examples/long_sequence.py")
# Half of the length that the example has by itself, so that a step takes a second.
ARGUMENTS = ("--tokens", "2048", "--limit-mib", "288", "--steps", "3")


def job(is_launched: bool) -> tuple[int, str]:
    """Run the example in this rank, which has its memory back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        return (job_script if is_launched else job_alone)(EXAMPLE, ARGUMENTS)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2], ids=["python", "torchrun"])
def test_the_example_trains_where_plain_does_not_fit(ranks: int) -> None:
    for code, said in run_ranks(ranks, job, ranks > 1, init=False, env=TORCHRUN):
        assert code == 0, said
        assert "allocate memory" in said
        assert "plain: fits" not in said
        assert "offload: 9 MiB went to the host" in said
        line = next(line for line in said.splitlines() if line.startswith("anyrank:"))
        losses = [float(word) for word in line.split()[1:]]
        assert len(losses) == 3
        assert losses[-1] < losses[0]
