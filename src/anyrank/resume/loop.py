"""The loop over the steps of a run: where it ends, and whether a step that was left counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from anyrank.data.loader import ElasticLoader, abandon_step
from anyrank.data.position import Position
from anyrank.data.step import Step, is_complete
from anyrank.resume.background import innermost
from anyrank.resume.state import TrainState, run_parts

POP_OPCODES = ("POP_TOP", "POP_ITER")  # the names up to CPython 3.14, and from 3.15 on
YIELD_OPCODES = ("YIELD_VALUE", "RESUME")  # where a generator is closed, by version of CPython


class Loop:
    """What a `for` goes over: each `for` begins where the run is.

    Only the `for` holds the iterator, so that leaving the loop closes it, even where the loop
    itself is kept in a variable.
    """

    def __init__(self, begin: Callable[[], Iterator[Step]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Step]:
        return self._begin()


class StepHooks:
    """Whether an optimizer of a state has stepped, as its own hook shows.

    Attributes:
        stepped: set by any of the optimizers; reset by the loop before each body.
    """

    def __init__(self, state: TrainState) -> None:
        self.stepped = False
        optimizers = map(innermost, run_parts(state).optimizers())
        self._handles = [one.register_step_post_hook(self._note) for one in optimizers]

    def _note(self, *_: Any) -> None:
        self.stepped = True

    def __enter__(self) -> StepHooks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()


class StepCounter:
    """Counts the steps that a process completes, however the loop's body is left.

    Each rank counts by itself, and nothing here communicates.

    Attributes:
        completed: steps that were counted.
        was_broken_off: whether an exception left the body of the last loop.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._body: tuple[Step, StepHooks] | None = None  # that the loop is in
        self.completed = 0
        self.was_broken_off = False

    def enter_body(self, step: Step, hooks: StepHooks) -> None:
        """The loop's body begins."""
        hooks.stepped = False
        self._body = step, hooks

    def end_body(self) -> None:
        """The body ran to its end."""
        self._body = None

    def leave_body(self, on_purpose: bool) -> None:
        """Account for a body that did not run to its end. Raises nothing."""
        if self._body is None:
            return
        (step, hooks), self._body = self._body, None
        self.was_broken_off = not on_purpose
        if not hooks.stepped:
            abandon_step(loader_of(self._state))  # the weights are those of the step before
        elif on_purpose and is_complete(step):
            self.count()
        else:
            run_parts(self._state).unusable = lost_step(step, on_purpose)

    def count(self) -> None:
        """Count a step whose optimizer has stepped."""
        state = self._state
        if isinstance(state.data, Position):
            state.data.commit()
            state.samples = state.data.samples
        state.step += 1
        self.completed += 1


def loader_of(state: TrainState) -> ElasticLoader:
    """The loader whose steps a loop goes over.

    Raises:
        TypeError: the state has none that iterates over steps.
    """
    if not isinstance(state.data, ElasticLoader):
        given = "no data" if state.data is None else f"a {type(state.data).__name__} as data"
        raise TypeError(
            f"steps() goes over the steps of an ElasticLoader, and the state has {given}: give "
            "TrainState(data=ElasticLoader(...)), or call step_done() in a loop of your own"
        )
    return state.data


def stop_condition(state: TrainState, until: int | None, epochs: int | None) -> Callable[[], bool]:
    """Whether a run is finished: at `until` optimizer steps, or after `epochs` epochs.

    Raises:
        ValueError: none or both were given, or a negative number.
        TypeError: a number that is no int.
    """
    if (until is None) == (epochs is None):
        raise ValueError("steps() ends in one way: give until= (optimizer steps) or epochs=")
    name, limit = ("until", until) if epochs is None else ("epochs", epochs)
    if type(limit) is not int:
        raise TypeError(f"{name}={limit!r}: give an int, counted over the whole run")
    if limit < 0:
        raise ValueError(f"{name}={limit}: give 0 or more, counted over the whole run")
    if epochs is None:
        return lambda: state.step >= limit
    return lambda: state.epoch >= limit


def lost_step(step: Step, on_purpose: bool) -> str:
    """What is wrong with a state that a step moved without being counted."""
    why = (
        "the optimizer stepped before all of its microbatches were run"
        if on_purpose
        else "an exception left it after the optimizer's step"
    )
    return f"step {step.number} does not count, and moved the weights: {why}"


def left_by_break() -> bool:
    """Whether the generator that calls this is closed by a `break` or `return` in its loop.

    Python tells a generator only that it is closed, not why. CPython drops a loop's iterator in
    the instruction that pops it where the loop is left on purpose; an exception drops it from the
    instruction that raised. A generator between the two, as of a progress bar, is closed at its
    `yield` by the loop that left it. Anything else, on other interpreters too, is taken for an
    exception.
    """
    frame = inspect.currentframe()
    for _ in range(2):  # the generator, and the loop
        frame = None if frame is None else frame.f_back
    while frame is not None and _opcode_of(frame) in YIELD_OPCODES:
        frame = frame.f_back
    return frame is not None and _opcode_of(frame) in POP_OPCODES


def _opcode_of(frame: FrameType) -> str:
    """The name of the instruction that a frame is in."""
    import opcode  # only a loop that is left needs it

    return opcode.opname[frame.f_code.co_code[frame.f_lasti]]
