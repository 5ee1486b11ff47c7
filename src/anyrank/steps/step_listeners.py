"""Calls to make when a run counts a step, in `Checkpoints.steps` or by `step_done`."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[], object]] = []


def on_step(call: Callable[[], object]) -> None:
    """Call this after each step that this process counts, to its end."""
    _listeners.append(call)


def tell_of_step() -> None:
    """A step was counted."""
    for call in _listeners:
        call()
