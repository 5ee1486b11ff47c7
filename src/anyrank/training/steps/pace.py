"""Finds the slow rank, and the slow part of its step: each rank's time until it waits for others.

Torch's hooks divide a rank's time, from one step of its optimizer to the next: loader, up to the
model's forward; forward, up to the first gradient; backward, up to the last; then it waits. The
loader's part also includes fetching for the next step. Waits in anyrank's agreements belong to no
part, so that a part is long on a slow rank, and the end is long on those that wait for it. After
every twenty steps a rank reports its medians: a rank whose median stands out from the others', and
from chance, is the one that they wait for.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anyrank.training.steps.step_listeners import around_fetches
from anyrank.world.waits import Wait

log = logging.getLogger("anyrank.steps")

PARTS = ("loader", "forward", "backward", "step")  # the last: everything, if no forward is seen
WINDOW = 20  # steps
LEAST_SEC, LEAST_SHARE = 0.01, 0.02  # of a step: smaller differences are not reported
SPREADS = 1.5  # between the quartiles: six times what medians of twenty differ by chance
ENDS = 2  # parameters at either end of a model whose gradients count as the first and last

# For one part of a step over a window: its median, and the distance of its quartiles, in seconds.
Spent = tuple[float, float]


class Pace:
    """Measures where this rank's time goes in each step. One at a time in a process.

    The model's hook is a function of the module, so that a copied or pickled model does not include
    this object.

    Args:
        model: the model that is trained.
        optimizers: its optimizers.
        on_first: called once the first window is full.

    Attributes:
        waited_sec: seconds in which this rank has waited for others and exchanged with them.
        warned: ranks that were reported as slow, with the part: each is reported once.
    """

    running: Pace | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        on_first: Callable[[], object] = lambda: None,
    ) -> None:
        self.waited_sec = 0.0
        self.warned: set[tuple[int, str]] = set()
        self._on_first = on_first
        self._times: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._rows: list[list[float]] = []
        self._spent: list[Spent] = []
        self._in_forward = self._has_gradient = self._sees_forward = False
        self._last, self._agreed_sec = time.perf_counter(), Wait.spent_sec
        # FSDP2 sets the gradients of its parameters itself, and calls no hook.
        trained = [p for p in model.parameters() if p.requires_grad and type(p) is nn.Parameter]
        ends = {id(p): p for p in (*trained[:ENDS], *trained[-ENDS:])}
        self._handles: list[Any] = [model.register_forward_pre_hook(_begin_forward)]
        for parameter in ends.values():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient))
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        self._end_fetches = around_fetches(self.loading)
        Pace.running = self

    def begin_forward(self) -> None:
        """Record a call of the model, or another one if nothing has had a gradient since."""
        self._add("forward" if self._in_forward else "loader")
        self._in_forward = self._sees_forward = True

    def _gradient(self, parameter: torch.Tensor) -> None:
        """Record that one of the first or last parameters has its gradient."""
        if torch.compiler.is_compiling():
            return
        part = "forward" if self._in_forward else "backward"
        self._add(part if self._sees_forward else "step")
        self._in_forward, self._has_gradient = False, True

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record that an optimizer is about to step: shared work is over."""
        self._end_wait()
        self._has_gradient = self._in_forward = False

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record that an optimizer has stepped."""
        self.pause()
        if any(self._times.values()):
            self._rows.append([*self._times.values()])
            self._times = dict.fromkeys(PARTS, 0.0)
        if len(self._rows) == WINDOW:
            self._spent = [_spent(part) for part in zip(*self._rows, strict=True)]
            self._rows.clear()
            self._on_first()
            self._on_first = lambda: None

    def pause(self) -> None:
        """Count the time since the last event to no part of a step."""
        self._agreements()
        self._last = time.perf_counter()

    @contextlib.contextmanager
    def loading(self) -> Generator[None, None, None]:
        """Count the time inside as the loader's, although the step's last gradient came before."""
        self._end_wait()
        yield
        self._add("loader")

    def _end_wait(self) -> None:
        """Count the time since the last gradient as a wait, except for agreements."""
        if self._has_gradient:
            self.waited_sec += time.perf_counter() - self._last - self._agreements()
        self.pause()

    @property
    def has_window(self) -> bool:
        """True if `take_window` has a result."""
        return bool(self._spent)

    def take_window(self) -> list[Spent]:
        """Return the times of each part over the last window, once; empty until the next is
        full."""
        spent, self._spent = self._spent, []
        return spent

    def warn_of_slow(self, ranks: Sequence[int], spent: Sequence[Sequence[Spent]]) -> None:
        """Name the slow rank once, on the first rank, from the reports of all ranks."""
        slow = slow_rank(spent)
        if slow is None or (ranks[slow[0]], slow[1]) in self.warned:
            return
        index, part, seconds = slow
        self.warned.add((ranks[index], part))
        log.warning(
            "rank %d is slow: other ranks wait %.0f ms per step for it (%s)",
            ranks[index],
            seconds * 1000,
            part,
        )

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if Pace.running is self:
            Pace.running = None
        self._end_fetches()

    def _add(self, part: str) -> None:
        """Count the time since the last event for a part, except for agreements."""
        now = time.perf_counter()
        self._times[part] += now - self._last - self._agreements()
        self._last = now

    def _agreements(self) -> float:
        """Return the seconds spent in anyrank's agreements since the last event."""
        before, self._agreed_sec = self._agreed_sec, Wait.spent_sec
        self.waited_sec += self._agreed_sec - before
        return self._agreed_sec - before


def slow_rank(spent: Sequence[Sequence[Spent]]) -> tuple[int, str, float] | None:
    """Find the rank that the others wait for: its index, the part of its step, and the excess.

    The first part in which a rank stands out counts, because others may wait for it in later parts,
    for example in the forward under FSDP2.

    Args:
        spent: times of each rank, for each part.
    """
    # Imported here: a run's first save imports this module, and would wait for all its imports.
    import statistics

    if len(spent) < 2:
        return None
    step = max(sum(median for median, _ in parts) for parts in spent)
    for number, part in enumerate(PARTS):
        medians = [parts[number][0] for parts in spent]
        chance = SPREADS * max(parts[number][1] for parts in spent)
        index = max(range(len(medians)), key=medians.__getitem__)
        others = statistics.median(medians[:index] + medians[index + 1 :])
        excess = medians[index] - others
        if excess > max(LEAST_SEC, LEAST_SHARE * step, chance):
            return index, part, excess
    return None


def _spent(seconds: Sequence[float]) -> Spent:
    import statistics

    low, median, high = statistics.quantiles(seconds, n=4)
    return median, high - low


def _begin_forward(module: nn.Module, args: Any) -> None:
    """Record the start of the model's forward, for its hook."""
    if torch.compiler.is_compiling():
        return
    if Pace.running is not None and torch.is_grad_enabled():
        Pace.running.begin_forward()
