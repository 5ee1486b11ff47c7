"""When a save is due."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from numbers import Integral

from anyrank.checks import check_type

TIME_PATTERN = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|sec|min|h|d)$")
UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Cadence:
    """When a save is due: each `steps` steps, or each `seconds`; never when both are None."""

    steps: int | None = None
    seconds: float | None = None

    def is_due(self, step: int, last_save: float) -> bool:
        """Whether to save after this step; `last_save` is on the monotonic clock."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and time.monotonic() - last_save >= self.seconds


def parse_cadence(every: int | str | None, name: str = "every") -> Cadence:
    """The cadence that `every=`, or an argument of another name, gives.

    Raises:
        TypeError: neither a number nor text.
        ValueError: neither a positive number of steps nor a time such as "10min".
    """
    if every is None:
        return Cadence()
    check_type(name, every, (Integral, str), "a number of steps or a time such as '10min'")
    text = str(every).strip()
    if text.isdigit() and int(text) > 0:
        return Cadence(steps=int(text))
    match = TIME_PATTERN.match(text)
    if match and float(match[1]) > 0:
        return Cadence(seconds=float(match[1]) * UNITS[match[2]])
    raise ValueError(
        f"{name}={every!r}: give a number of steps, as in {name}=500, or a time, as in '10min' "
        f"(units: {', '.join(UNITS)})"
    )
