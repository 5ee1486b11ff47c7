"""What a process does when a run counts a step, and around what a loader fetches ahead of one."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager

_listeners: list[Callable[[], object]] = []
_around_fetches: list[Callable[[], AbstractContextManager[None]]] = []


def on_step(call: Callable[[], object]) -> None:
    """Call this after each step that this process counts, to its end."""
    _listeners.append(call)


def tell_of_step() -> None:
    """A step was counted."""
    for call in _listeners:
        call()


def around_fetches(enter: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Enter this around each fetch of a loader that is ahead of its step; returns what ends it."""
    _around_fetches.append(enter)

    def end() -> None:
        if enter in _around_fetches:
            _around_fetches.remove(enter)

    return end


@contextmanager
def fetching_ahead() -> Generator[None]:
    """A loader fetches the first batches of the next step in here."""
    with ExitStack() as entered:
        for enter in _around_fetches:
            entered.enter_context(enter())
        yield
