"""Listeners of a process: when a run counts a step, when an optimizer steps, and around fetches
of a loader for the next step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol
from weakref import ref

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_listeners: list[Callable[[], object]] = []
_around_fetches: list[Callable[[], AbstractContextManager[None]]] = []


class _OptimizerWatcher(Protocol):
    """The interface to observe the steps of the process's optimizers, in any thread."""

    def see_step(self, optimizer: Optimizer, has_stepped: bool) -> None:
        """Called before and after each step; an exception is raised from the optimizer's `step`."""
        ...


# Held weakly: a watcher holds a model, which may hold the loop that has the watcher.
_watchers: list[ref[_OptimizerWatcher]] = []


def on_step(call: Callable[[], object]) -> None:
    """Register a function to call after each step that this process counts, until it ends."""
    _listeners.append(call)


def tell_of_step() -> None:
    """Notify the listeners of a counted step."""
    for call in _listeners:
        call()


def around_fetches(enter: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Register a context for fetches ahead of a loader's step; return the function that ends it."""
    _around_fetches.append(enter)

    def end() -> None:
        if enter in _around_fetches:
            _around_fetches.remove(enter)

    return end


@contextmanager
def fetching_ahead() -> Generator[None]:
    """A context in which a loader fetches the first batches of the next step."""
    with ExitStack() as entered:
        for enter in _around_fetches:
            entered.enter_context(enter())
        yield


@contextmanager
def watching_optimizers(watcher: _OptimizerWatcher) -> Generator[None]:
    """A context in which a watcher is notified of the optimizers' steps."""
    _hook_optimizers()
    entry = ref(watcher)
    _watchers.append(entry)
    try:
        yield
    finally:
        _watchers.remove(entry)


@functools.cache
def _hook_optimizers() -> None:
    """Hook all optimizers' steps from now on, once in a process.

    Hooks that come and go with each pass would change a dict over which an optimizer in another
    thread may be iterating, which raises there.
    """

    def tell(has_stepped: bool, optimizer: Optimizer, *_: Any) -> None:
        for entry in [*_watchers]:  # a copy, because another thread may start and end passes
            if (watcher := entry()) is not None:
                watcher.see_step(optimizer, has_stepped)

    register_optimizer_step_pre_hook(functools.partial(tell, False))
    register_optimizer_step_post_hook(functools.partial(tell, True))
