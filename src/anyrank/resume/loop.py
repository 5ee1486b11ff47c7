"""The loop over the steps of a run: where it ends, and whether a step that was left counts."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from types import CodeType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from anyrank.checks import check_int
from anyrank.data.position import Position, check_complete
from anyrank.errors import CheckpointError
from anyrank.resume.run_writer import Due, RunWriter
from anyrank.saving.background import innermost
from anyrank.state.train_state import TrainState, run_parts
from anyrank.steps.loader import ElasticLoader, abandon_step
from anyrank.steps.step import Step, is_complete
from anyrank.tensors.sharded_tensor import version_of
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")

EARLY_STEP = "the optimizer stepped before all of its microbatches were run"
POP_OPCODES = ("POP_TOP", "POP_ITER")  # of `break` and `return`; the second from CPython 3.15 on
YIELD_OPCODES = ("YIELD_VALUE", "RESUME")  # where a generator is closed, by version of CPython


class BoundaryReport(NamedTuple):
    """What a rank tells the others at the end of a step.

    Attributes:
        save_failed: whether a background save has ended without a checkpoint.
        signal: SIGTERM or SIGUSR1, if it got one.
        due: what it would save now; the first rank's counts.
    """

    save_failed: bool
    signal: int | None
    due: Due


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
        parts = run_parts(state).parts.values()
        self._has_scaler = any(isinstance(part, torch.amp.GradScaler) for part in parts)
        self._optimizers = [innermost(one) for one in run_parts(state).optimizers()]
        self._handles = [one.register_step_post_hook(self._note) for one in self._optimizers]

    def missed_gradients(self) -> bool:
        """Whether no optimizer has stepped, and there are gradients; a GradScaler may do so."""
        if self.stepped or self._has_scaler:
            return False
        groups = [group for one in self._optimizers for group in one.param_groups]
        return any(param.grad is not None for group in groups for param in group["params"])

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

    Each rank counts by itself; only `has_whole_steps` talks to the others.

    Attributes:
        completed: steps that were counted.
        was_broken_off: whether an exception left the body of the last loop.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._body: tuple[Step, StepHooks] | None = None  # that the loop is in
        self._consumers: dict[int, CodeType] = {}  # what runs it, by the ids of frames
        self._writes = 0  # to the parameters, when the body began
        self._is_told = False  # of a step without an optimizer's
        self.completed = 0
        self.was_broken_off = False

    def check_countable(self) -> None:
        """Refuse to count a step that is not complete, or that the loop itself counts.

        Raises:
            CheckpointError: microbatches are left, the body of `steps()` runs, or the state is
                half restored.
        """
        if self._body is not None:
            raise CheckpointError(
                "step_done() in the body of steps(), which counts the step itself at the body's "
                "end: leave step_done() out, or go over the ElasticLoader in a loop of your own"
            )
        run_parts(self._state).check_usable()
        if isinstance(self._state.data, Position):
            check_complete(self._state.data)

    def enter_body(self, step: Step, hooks: StepHooks) -> None:
        """The loop's body begins."""
        hooks.stepped = False
        self._body = step, hooks
        self._consumers = _consumers_of_loop()
        self._writes = _writes_to(self._state)

    def end_body(self, step: Step) -> None:
        """The body ran to its end.

        Raises:
            CheckpointError: the loop was left meanwhile, and this step is accounted for.
        """
        if self._body is None or self._body[0] is not step:
            raise CheckpointError(
                f"the loop over steps() was left at step {step.number}, when the run was closed or "
                "another loop began, and its iterator was kept: go over steps() anew"
            )
        (_, hooks), self._body = self._body, None
        if not self._is_told and hooks.missed_gradients():
            self._is_told = True
            log.warning(
                "step %d: no optimizer of the state has stepped, and there are gradients: the step "
                "counts, and a checkpoint does not hold them: for larger batches raise "
                "global_batch, for an optimizer of another kind call step_done() in your own loop",
                step.number,
            )

    def leave_body(self, by_break: bool = False) -> None:
        """Account for a body that did not run to its end, if there is one. Raises nothing."""
        if self._body is None:
            return
        (step, hooks), self._body = self._body, None
        on_purpose = by_break or not _left_by_exception(self._consumers)
        self.was_broken_off = not on_purpose
        has_moved = hooks.stepped or _writes_to(self._state) != self._writes
        if not has_moved:
            abandon_step(loader_of(self._state))  # the weights are those of the step before
        elif on_purpose and is_complete(step):
            self.count()
        else:
            why = EARLY_STEP if on_purpose else "an exception left it after the optimizer's step"
            run_parts(self._state).unusable = _lost_step(step.number, why)

    @contextlib.contextmanager
    def at_boundary(self) -> Generator[None]:
        """What is interrupted in here (Ctrl-C) leaves a step that moved the state, uncounted."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            why = "it was interrupted while it was counted"
            run_parts(self._state).unusable = _lost_step(self._state.step, why)
            raise

    def count(self) -> None:
        """Count a step whose optimizer has stepped."""
        state = self._state
        if isinstance(state.data, Position):
            state.data.commit()
            state.samples = state.data.samples
        state.step += 1
        self.completed += 1

    def has_whole_steps(self, ranks: Ranks, writer: RunWriter) -> bool:
        """Whether leaving the run saves its last step, as no rank has moved the state since.

        All ranks.

        Raises:
            CheckpointError: a step moved the state of some rank, and does not count.
        """

        def here() -> tuple[bool, bool]:
            if not self.was_broken_off:
                run_parts(self._state).check_usable()
            return self.completed > 0, self.was_broken_off or writer.is_within_step

        flags = ranks.together("leaving the loop", here)
        if any(is_broken for _, is_broken in flags):
            log.warning(
                "step %d was begun and not completed, so nothing is saved on leaving: the newest "
                "checkpoint stays the one before",
                self._state.step,
            )
            return False
        return any(has_counted for has_counted, _ in flags)


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
        TypeError: a number that is not an int.
    """
    if (until is None) == (epochs is None):
        raise ValueError("steps() ends in one way: give until= (optimizer steps) or epochs=")
    name, limit = ("until", until) if epochs is None else ("epochs", epochs)
    last = check_int(name, limit, 0)  # counted over the whole run
    return lambda: (state.step if epochs is None else state.epoch) >= last


def _lost_step(number: int, why: str) -> str:
    """What is wrong with a state that a step moved without being counted."""
    return f"step {number} does not count, and moved the weights: {why}"


def _writes_to(state: TrainState) -> int:
    """torch's count of writes to what is trained, also by optimizers that are no part of it."""
    modules = [part for part in run_parts(state).parts.values() if isinstance(part, nn.Module)]
    return sum(version_of(p) for m in modules for p in m.parameters() if p.requires_grad)


def _consumers_of_loop() -> dict[int, CodeType]:
    """What the steps go to: generators on the way, and the function that runs the `for`.

    For the loop's generator, which asks before it hands out a step. By the ids of their frames: a
    reference to a frame would keep the loop's iterator alive after a `break`.
    """
    frame = inspect.currentframe()
    for _ in range(3):  # this function, its caller, and the loop's generator
        frame = None if frame is None else frame.f_back
    found: dict[int, CodeType] = {}
    while frame is not None:
        found[id(frame)] = code = frame.f_code
        if not (code.co_flags & inspect.CO_GENERATOR or code.co_name == "__next__"):
            break
        frame = frame.f_back
    return found


def left_by_break() -> bool:
    """Whether the generator that calls this is closed by a `break` or `return` in its loop.

    CPython drops the loop's iterator in the instruction that pops it then. A generator between the
    two, as of a progress bar, is closed at its `yield`.
    """
    frame = inspect.currentframe()
    for _ in range(2):  # this function, and the loop's generator
        frame = None if frame is None else frame.f_back
    while frame is not None and _opcode(frame.f_code, frame.f_lasti) in YIELD_OPCODES:
        frame = frame.f_back
    return frame is not None and _opcode(frame.f_code, frame.f_lasti) in POP_OPCODES


def _left_by_exception(consumers: Mapping[int, CodeType]) -> bool:
    """Whether an exception has passed through the consumers of a loop.

    Python tells a generator only that it is closed, not why: the end of an `itertools.islice` and
    an exception look alike. But an exception that unwinds a frame has left a traceback that refers
    to it before it drops the frame's iterators; one from a `yield` is how generators are closed.
    """
    return any(
        type(thing) is TracebackType  # isinstance() would ask objects that warn
        and consumers.get(id(thing.tb_frame)) is thing.tb_frame.f_code
        and _opcode(thing.tb_frame.f_code, thing.tb_lasti) not in YIELD_OPCODES
        for thing in gc.get_objects()
    )


def _opcode(code: CodeType, index: int) -> str:
    """The name of an instruction."""
    import opcode  # only a loop that is left needs it

    return opcode.opname[code.co_code[index]]
