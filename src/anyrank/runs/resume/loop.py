"""The loop over the steps of a run: where it ends, and which of its steps count.

A step counts if its microbatches have run and an optimizer of the state has stepped, no matter how
its body was left.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from anyrank.checks import check_int
from anyrank.errors import CheckpointError
from anyrank.runs.saving.collect import is_within_step
from anyrank.runs.state.accelerate_wrappers import innermost
from anyrank.runs.state.train_state import TrainState
from anyrank.training.steps.agreed_batches import Ahead, OwnBatches
from anyrank.training.steps.loader import ElasticLoader
from anyrank.training.steps.step import Step
from anyrank.training.steps.step_listeners import tell_of_step
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")

EARLY_STEP = "the optimizer stepped before all of its microbatches had run"


BoundaryRow: TypeAlias = "tuple[Any, ...]"


class BoundaryReport(NamedTuple):
    """The report of one or more ranks at the end of a step; sent as a plain tuple.

    Attributes:
        save_failed: whether a background save has failed.
        signals: SIGTERM and SIGUSR1, if a rank got one.
        save_is_due: whether a save in files is due; the first rank's clock decides.
        ahead: report on the first batches of the next step, if they were fetched.
        news: reports of the run's listeners, in their order.
        has_foreign_gradients: see `StepHooks`.
    """

    save_failed: bool
    signals: tuple[int, ...]
    save_is_due: bool
    ahead: Ahead | None
    news: Sequence[Any]
    has_foreign_gradients: bool

    @property
    def row(self) -> BoundaryRow:
        """Return the tuple to send, without a class name, which would be larger than the rest."""
        return tuple(self)


def join_reports(
    join_news: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    row: BoundaryRow,
    other_row: BoundaryRow,
) -> BoundaryRow:
    """Merge the reports of ranks at the end of a step; the first rank's report comes first."""
    report, other = BoundaryReport(*row), BoundaryReport(*other_row)
    ahead = report.ahead or other.ahead
    if report.ahead is not None and other.ahead is not None:
        ahead = report.ahead.join(other.ahead)
    return BoundaryReport(
        save_failed=report.save_failed or other.save_failed,
        signals=join_signals(report.signals, other.signals),
        save_is_due=report.save_is_due,
        ahead=ahead,
        news=join_news(report.news, other.news),
        has_foreign_gradients=report.has_foreign_gradients or other.has_foreign_gradients,
    ).row


def join_signals(signals: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Merge the signals that ranks have received."""
    return tuple(sorted({*signals, *others}))


class Loop(Iterator[Step]):
    """The iterator that `Checkpoints.steps` returns: each `for` starts at the run's current step.

    Each `for` has its own iterator, so that leaving the loop closes it, even if this object is kept
    in a variable. `next()` uses another iterator.
    """

    def __init__(self, begin: Callable[[], Iterator[Step]]) -> None:
        self._begin = begin
        self._iterator: Iterator[Step] | None = None

    def __iter__(self) -> Iterator[Step]:
        return self._begin()

    def __next__(self) -> Step:
        self._iterator = self._iterator or self._begin()
        return next(self._iterator)


class StepHooks:
    """Hooks on a state's optimizers that record whether one has stepped.

    Attributes:
        optimizers: optimizers of the state that accept hooks.
        handles: handles of the hooks.
        stepped: set by any of the hooks; reset when a step counts, and before each body.
        has_foreign_gradients: whether an optimizer made its first step with gradients of parameters
            that `microbatches()` did not get: these are only this rank's, unless the script has
            reduced them itself.
    """

    def __init__(self, state: TrainState) -> None:
        self.stepped = self.has_foreign_gradients = False
        self._loaders = state.parts.loaders()
        self._looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        parts = state.parts.by_name.values()
        self._has_scaler = any(isinstance(part, torch.amp.GradScaler) for part in parts)
        self.optimizers: list[Optimizer] = []
        self.handles: list[RemovableHandle] = []
        for optimizer in map(innermost, state.parts.optimizers()):
            # A wrapper that torch's __init__ did not make has no attribute for hooks.
            with contextlib.suppress(AttributeError):
                self.handles.append(optimizer.register_step_post_hook(self._on_step))
                self.optimizers.append(optimizer)

    def missed_gradients(self) -> bool:
        """Return True if an optimizer left gradients unused; False with a GradScaler."""
        if self.stepped or self._has_scaler:
            return False
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return any(param.grad is not None for group in groups for param in group["params"])

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepped = True
        begun = [sync for loader in self._loaders for sync in loader.position.begun]
        if begun and optimizer not in self._looked_at:  # only once, because each check costs time
            self._looked_at.add(optimizer)
            known = {id(param) for sync in begun for param in sync.parameters}
            params = (param for group in optimizer.param_groups for param in group["params"])
            strangers = (p for p in params if p.grad is not None and id(p) not in known)
            self.has_foreign_gradients |= any(True for _ in strangers)


class StepCounter:
    """Counts the steps that a process completes, inside and outside the loop of `steps()`.

    Attributes:
        completed: number of counted steps.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._hooks = StepHooks(state)
        # It takes the handles, which hold no optimizer: one may have hooks that hold this run.
        for handle in self._hooks.handles:
            weakref.finalize(self, handle.remove).atexit = False
        self._body: Step | None = None  # the step whose body is running
        self._has_warned = False  # about a step in which no optimizer stepped
        self.completed = 0

    def check_countable(self) -> None:
        """Check that a step may be counted: it is complete, and `steps()` does not count it itself.

        Raises:
            CheckpointError: microbatches have not run, the body of `steps()` is running, or the
                state is only partly restored.
        """
        if self._body is not None:
            raise CheckpointError(
                "do not call step_done() inside the loop over steps(), which counts each step "
                "itself. Remove the call, or iterate over the ElasticLoader instead."
            )
        self._state.parts.check_usable()
        for loader in self._begun_loaders:
            loader.position.check_complete()

    @property
    def _begun_loaders(self) -> list[ElasticLoader]:
        """Return `data`, and other loaders with a microbatch that has run and not been counted."""
        data = self._state.data
        return [
            loader for loader in self._state.parts.loaders() if loader is data or loader.in_step
        ]

    def go_over(
        self,
        loader: ElasticLoader,
        is_finished: Callable[[], bool],
        step_done: Callable[[], object],
    ) -> Generator[Step]:
        """Yield the steps of the loader, epoch after epoch; call `step_done` after each body."""
        while not is_finished():
            for step in loader:
                self.forget_steps()
                self._body = step
                try:
                    yield step
                except GeneratorExit:
                    self.leave_body()
                    raise
                self._end_body(step)
                step_done()
                if is_finished():
                    break

    def _end_body(self, step: Step) -> None:
        """Handle the end of a body.

        Raises:
            CheckpointError: the loop was left meanwhile, and this step was handled then.
        """
        if self._body is not step:
            raise CheckpointError(
                "the iterator of steps() is no longer valid: the run was closed, or a new loop was "
                f"started, at step {step.number}. Call steps() again."
            )
        self._body = None
        if not self._has_warned and self._hooks.missed_gradients():
            self._has_warned = True
            log.warning(
                "step %d: gradients were computed, but no optimizer in the TrainState stepped. The "
                "step counts, and gradients are not saved. To accumulate over more samples, raise "
                "global_batch; if your optimizer is not a torch optimizer, call step_done() in "
                "your own loop.",
                step.number,
            )

    def leave_body(self) -> None:
        """Handle a body that did not run to its end, if any. Never raises."""
        if self._body is not None:
            self._body = None
            self._leave_step()

    def leave_step(self) -> None:
        """Handle the current step, in a body or in the user's own loop.

        Without a known optimizer only the user's loop knows whether its step is complete, so the
        step is left as it is.
        """
        loaders = self._state.parts.loaders()
        if self._body is not None:
            self.leave_body()
        elif not loaders:
            if self._hooks.stepped:
                self.count()
        elif any(loader.in_step for loader in loaders) and self._hooks.optimizers:
            self._leave_step()

    def _leave_step(self) -> None:
        hooks = self._hooks
        begun = [
            loader.position for loader in self._state.parts.loaders() if loader.position.current
        ]
        is_complete = bool(begun) and all(position.is_step_complete for position in begun)
        if is_complete and (hooks.stepped or not hooks.optimizers):
            self.count()
        elif hooks.stepped:
            self._state.parts.unusable = _lost_step_text(self._state.step, EARLY_STEP)
        else:
            for position in begun:
                position.abandon_step()  # the weights are those of the previous step

    def forget_steps(self) -> None:
        """Forget the optimizers' steps so far: they do not belong to the next step."""
        self._hooks.stepped = self._hooks.has_foreign_gradients = False

    @contextlib.contextmanager
    def guard_boundary(self) -> Generator[None]:
        """Mark the state as unusable if Ctrl-C interrupts the block before the step counts."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            reason = "it was interrupted while it was counted"
            self._state.parts.unusable = _lost_step_text(self._state.step, reason)
            raise

    @property
    def has_uncounted_step(self) -> bool:
        """True if an optimizer has stepped since the last counted step."""
        return self._hooks.stepped

    @property
    def _ahead(self) -> OwnBatches | None:
        """The first batches of the next step, if they were fetched."""
        data = self._state.data
        return data.position.ahead if isinstance(data, ElasticLoader) else None

    @property
    def has_foreign_gradients(self) -> bool:
        """True if the current step has foreign gradients; see `StepHooks`."""
        return self._hooks.has_foreign_gradients

    def ahead(self, rank: int) -> Ahead | None:
        """Return this rank's report on the next step's batches; None if there are none."""
        ahead = None if self._ahead is None else self._ahead.ahead(rank)
        return ahead if ahead is not None and (ahead.failed or ahead.report) else None

    def learn_ahead(self, ranks: Ranks, ahead: Ahead | None) -> None:
        """Record from the ranks' reports which of them could not fetch batches of the next step."""
        if self._ahead is not None:
            self._ahead.learn(ranks, ahead or Ahead({}, 0, []))

    def has_whole_steps(self, ranks: Ranks) -> bool:
        """Return True if steps were counted and none is incomplete: then leaving saves. Collective.

        Raises:
            CheckpointError: a step that was not counted has changed the state of a rank.
        """

        def report() -> tuple[bool, bool]:
            self._state.parts.check_usable()
            return self.completed > 0, is_within_step(self._state)

        _, (has_counted, is_within) = ranks.run_and_reduce(
            "leaving the loop",
            lambda: (None, report()),
            lambda some, others: (some[0] or others[0], some[1] or others[1]),
        )
        if is_within:
            log.warning(
                "step %d was not completed, so nothing is saved at exit; the newest checkpoint is "
                "unchanged",
                self._state.step,
            )
            return False
        return has_counted

    def count(self) -> None:
        """Count a step whose optimizer has stepped."""
        state = self._state
        for loader in self._begun_loaders:
            loader.commit()
        samples = state.parts.num_samples()
        state.samples = state.samples if samples is None else samples
        state.step += 1
        self.completed += 1
        self.forget_steps()
        tell_of_step()


def require_loader(state: TrainState) -> ElasticLoader:
    """Return the state's ElasticLoader.

    Raises:
        TypeError: the state has none.
    """
    if not isinstance(state.data, ElasticLoader):
        data = "no data" if state.data is None else f"a {type(state.data).__name__} as data"
        raise TypeError(
            f"steps() needs an ElasticLoader; the TrainState has {data}. Pass "
            "TrainState(data=ElasticLoader(...)), or call step_done() in your own loop."
        )
    return state.data


def stop_condition(state: TrainState, until: int | None, epochs: int | None) -> Callable[[], bool]:
    """Return a function that returns True once the run has `until` steps, or `epochs` epochs.

    Raises:
        ValueError: neither or both were passed, or a negative number; epochs of an endless
            stream.
        TypeError: a number is not an int.
    """
    if (until is None) == (epochs is None):
        raise ValueError("steps() needs exactly one limit: until= (optimizer steps) or epochs=")
    if epochs is not None and any(loader.position.is_endless for loader in state.parts.loaders()):
        raise ValueError("with endless=True there are no epochs; pass until= (optimizer steps)")
    name, limit = ("until", until) if epochs is None else ("epochs", epochs)
    last = check_int(name, limit, 0)  # counted over the whole run
    return lambda: (state.step if epochs is None else state.epoch) >= last


def _lost_step_text(number: int, reason: str) -> str:
    """Return the reason why a state is unusable after a step changed it and did not count."""
    return f"step {number} was not counted but has already changed the weights: {reason}"
