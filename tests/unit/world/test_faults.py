"""Fault points: no-ops until armed, then exactly the failure asked for, at exactly that passage."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator

import pytest

from anyrank import faults
from anyrank.testing import Fault, InjectedFault
from anyrank.testing.fault import arm, check, disarm


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    disarm()


def ignore(fault: Fault) -> None:
    """Nobody to tell."""


def test_a_point_is_a_no_op_unless_armed() -> None:
    faults.point("here")
    arm([Fault(0, "there", "raise")], ignore)
    faults.point("here")
    with pytest.raises(InjectedFault, match="'there', passage 1"):
        faults.point("there")
    disarm()
    faults.point("there")


def test_a_fault_strikes_at_its_passage_only() -> None:
    told: list[Fault] = []
    wanted = [Fault(0, "here", "raise", nth=2), Fault(0, "here", "enospc", nth=4)]
    arm(wanted, told.append)
    faults.point("here")
    with pytest.raises(InjectedFault):
        faults.point("here")
    faults.point("here")
    assert told == wanted[:1]
    with pytest.raises(OSError, match="No space left") as caught:
        faults.point("here")
    assert caught.value.errno == errno.ENOSPC
    faults.point("here")
    assert told == wanted


@pytest.mark.parametrize(
    ("rank", "how", "nth", "message"),
    [
        (0, "explode", 1, "how='explode': must be 'raise', "),
        (0, "kill", 0, "nth must be at least 1"),
        (-1, "kill", 1, "rank at least 0"),
    ],
)
def test_a_wrong_fault_is_refused(rank: int, how: str, nth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fault(rank, "here", how, nth)  # type: ignore[arg-type]


def test_faults_that_cannot_all_strike_are_refused() -> None:
    check([Fault(1, "a", "kill"), Fault(1, "a", "kill", nth=2), Fault(0, "a", "kill")], 2)
    with pytest.raises(ValueError, match="only 2 ranks"):
        check([Fault(2, "a", "kill")], 2)
    with pytest.raises(ValueError, match="two faults have the same rank, point and nth"):
        check([Fault(1, "a", "kill"), Fault(1, "a", "raise")], 2)


def test_production_code_does_not_load_the_harness() -> None:
    code = "import sys, anyrank, anyrank.faults; sys.exit('anyrank.testing' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0
