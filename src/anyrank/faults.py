"""Named points in the code at which a test can make a rank fail; no-ops unless armed.

`anyrank.testing` arms them; production code only calls `point`.
"""

from __future__ import annotations

from collections.abc import Callable

armed: dict[str, Callable[[], None]] = {}


def point(name: str) -> None:
    """Run the action that a test armed for the point `name`, if any."""
    if armed:
        action = armed.get(name)
        if action is not None:
            action()
