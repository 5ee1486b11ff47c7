"""The progress of a step on this rank: its passes, and the agreements at their ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from numbers import Real
from types import NoneType
from typing import Any

import torch

from anyrank.checks import as_float, check_type
from anyrank.training.data.schedule import MicrobatchSlot, StepPlan
from anyrank.training.gradients.sync import GradientSync
from anyrank.training.steps.exact_sum import ExactSum
from anyrank.training.steps.step_listeners import watching_optimizers
from anyrank.training.steps.step_record import WHAT, StepRecord, check_backwards, judge
from anyrank.world.alike import Compared, digest_of
from anyrank.world.ranks import Ranks


class Pass:
    """One pass over a step's microbatches on this rank.

    Args:
        plan: the step.
        sync: the exchange of its gradients.
        ranks: the data-parallel ranks.
        is_new: whether it is unknown how the model's gradients are reduced.
        own_backward: whether the caller weights the losses.

    Attributes:
        slot: the microbatch of the loop's current body.
        is_last: whether that is the rank's last microbatch.
        is_complete: whether the pass ran to its end.
        weights: weights by microbatch, without copies.
        losses: losses of all microbatches, with their weights, which are 0 for copies.
        total: total of the weights of all ranks, once the pass has ended without own_backward.
        in_own_backward: whether the backward of a known loss is running, or is still to come.
    """

    def __init__(
        self, plan: StepPlan, sync: GradientSync, ranks: Ranks, is_new: bool, own_backward: bool
    ) -> None:
        self.plan, self.sync, self.ranks = plan, sync, ranks
        self.is_new, self.own_backward = is_new, own_backward
        self.slot: MicrobatchSlot | None = None
        self.is_last = self.is_complete = False
        self.weights: dict[int, float] = {}
        self.losses: list[tuple[float, torch.Tensor]] = []
        self.total: float | None = None
        self._is_weighted: bool | None = None  # whether weights are passed; None before a backward
        self._without: list[int] = []  # the microbatches that had no backward
        self.in_own_backward = False
        self._saw_other_backward = False
        self._kept: torch.nn.Parameter | None = None  # has a gradient since the first microbatch
        # Gradients of the training step may still exist while the model is evaluated.
        self._had_gradients = any(parameter.grad is not None for parameter in sync.parameters)

    # -- a microbatch -----------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Run the pass; a new model's parameters report gradients of unknown losses.

        Raises:
            ValueError: from an optimizer's step in a microbatch's body.
        """

        def note(_: torch.Tensor) -> None:
            self._saw_other_backward = self._saw_other_backward or not self.in_own_backward

        with self.sync.active(), ExitStack() as hooks:
            if not self.own_backward:
                hooks.enter_context(watching_optimizers(self))
            for parameter in self.sync.parameters if self.is_new and not self.own_backward else ():
                hooks.callback(parameter.register_post_accumulate_grad_hook(note).remove)
            yield

    @contextmanager
    def microbatch(self, slot: MicrobatchSlot, is_last: bool) -> Generator[None, None, None]:
        """Run the loop's body for a microbatch.

        Raises:
            ValueError: it had no backward, but others had one.
        """
        self.is_last = is_last
        try:
            with self.sync.on(slot, is_last):
                self.slot = slot
                yield
        finally:
            self.slot = None
        self.in_own_backward = False
        if not self.own_backward:
            if not is_last and self._kept is None and len(self.losses) == 1:
                self._kept = next((p for p in self.sync.parameters if p.grad is not None), None)
            if not slot.is_copy and slot.k not in self.weights:
                self._without.append(slot.k)
            check_backwards(self.plan.number, self.weights, self._without)

    def add_loss(self, slot: MicrobatchSlot, loss: torch.Tensor, weight: Any) -> float:
        """Record the loss of the current microbatch, before its backward; return its weight.

        Raises:
            TypeError, ValueError: as for `Step.backward`.
        """
        check_type("loss", loss, torch.Tensor, "the mean loss of a microbatch, a tensor")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: expected a scalar, the mean")
        check_type("weight", weight, (Real, torch.Tensor, NoneType), "a number")
        units = as_float("weight", self.plan.size(slot.k) if weight is None else weight)
        if self._is_weighted is (weight is None):
            raise ValueError(
                f"step {self.plan.number}: pass weight= in every backward of a step, or in none"
            )
        self._is_weighted = weight is not None
        if not 0 <= units < math.inf or self.weights.get(slot.k, units) != units:
            raise ValueError(
                f"weight={units}: must be at least 0, and the same for all backward calls of one "
                "microbatch"
            )
        if not slot.is_copy:
            self.weights[slot.k] = units
        self._check_kept()
        self.losses.append((0.0 if slot.is_copy else units, loss.detach()))
        # Before the wrapper's backward, which would wait for ranks that are elsewhere.
        check_backwards(self.plan.number, self.weights, self._without)
        self.in_own_backward = True
        return units

    def see_step(self, optimizer: torch.optim.Optimizer, has_stepped: bool) -> None:
        """Check that no optimizer steps while this rank has further microbatches.

        In the last body a step is allowed if the gradients were complete there. That is checked
        after the step, because a framework's own hook may end the pass before the step.
        """
        if has_stepped is not self.is_last or not self._trains(optimizer):
            return
        is_plain = not self._is_weighted and self.plan.samples == self.plan.assumed_samples
        if not (self.is_last and is_plain and self.sync.is_whole_in_last):
            raise ValueError(
                f"step {self.plan.number}: {type(optimizer).__name__}.step() was called inside the "
                "loop over microbatches(), where gradients are incomplete. Call step() and "
                "zero_grad() once, after the loop. (If you left the loop early, delete the "
                "variable that holds its iterator.)"
            )

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if an optimizer that steps in a body has parameters of this pass."""
        if self.slot is None:
            return False
        trained = {*map(id, self.sync.parameters)}
        params = (param for group in optimizer.param_groups for param in group["params"])
        return any(id(param) in trained for param in params)

    def _check_kept(self) -> None:
        """Check that the gradients of earlier microbatches were not reset.

        Those of one of several models may be: a generator's loss adds some to the discriminator.
        """
        if self._kept is None or self._kept.grad is not None or self.own_backward:
            return
        if all(parameter.grad is None for parameter in self.sync.parameters):
            raise ValueError(
                f"step {self.plan.number}: gradients of earlier microbatches were reset, probably "
                "by zero_grad() inside the loop over microbatches(). Call zero_grad() once per "
                "step, after the loop."
            )

    # -- the end ----------------------------------------------------------------------------------

    def end(self, divisor: float | None) -> bool:
        """Compare the ranks' observations, and finish the gradients. Collective over the
        data-parallel ranks.

        Args:
            divisor: divisor of the losses' weights, if they had any.

        Returns:
            True if a new model's gradients are known to be reduced once.

        Raises:
            ValueError: as for `judge`.
        """
        sync, plan = self.sync, self.plan
        record, values = self._record()
        own_states = record.states or b""
        # Without it the error is each rank's own: all make the same calls, so all raise it.
        must_compare = sync.meets or bool(self._is_weighted) or self.is_new
        if must_compare:
            record = self.ranks.reduce(WHAT, record, StepRecord.join)
        names = [*sync.summed], [*sync.exchanged]
        is_checked = judge(plan.number, record, own_states, *names, values, self.ranks)
        if self._is_weighted is not None and not self.own_backward:
            self.total = float(record.weights) if must_compare else plan.samples
        # No rank has run a backward, for example in an evaluation; a rank with only copies has
        # losses.
        if not (record.weights.count or self.losses or self.own_backward):
            sync.drop_unfinished()
            return False
        factor: float | None = None  # for the gradients, if the losses had weights
        if self._is_weighted:
            assert divisor is not None
            total = float(record.weights)
            factor = divisor / total if total else 0.0
        elif not self.own_backward and plan.samples != plan.assumed_samples:
            factor = plan.assumed_samples / plan.samples if plan.samples else 0.0
        sync.finish(record, factor)
        return is_checked

    def _record(self) -> tuple[StepRecord, dict[str, str]]:
        """Record this rank's observations; also return shape and hash of its hashed parameters."""
        sync, refusal = self.sync, None
        has_losses = self._is_weighted is not None
        is_untold = not has_losses and not self._had_gradients and sync.has_gradients()
        if not self.own_backward and (self._saw_other_backward or is_untold):
            refusal = (
                f"step {self.plan.number}: loss.backward() was called directly, so the gradient "
                "depends on the number of ranks. Use step.backward(loss), or "
                "step.scale(loss).backward(), as in accelerator.backward(step.scale(loss)); to "
                "weight the losses yourself, pass own_backward=True to microbatches()."
            )
        losses = [float(loss) for _, loss in self.losses] if self.is_new else []
        values = sync.values() if self.is_new and self.ranks.size > 1 else {}
        rank = self.ranks.rank
        record = StepRecord(
            ranks=1,
            weights=ExactSum.of_values(self.weights.values()),
            without=min(self._without, default=None),
            losses=Compared(digest_of(losses), rank),
            refusal=refusal,
            values=Compared(digest_of(values.items()), rank),
        )
        # Gradients that an evaluation finds are those of the training, already reduced.
        has_exchanged = has_losses or self.own_backward
        return sync.complete(record, self.is_new and has_exchanged), values


@dataclass
class StepRun:
    """One step on this rank.

    Attributes:
        plan: the step.
        seen: ids of the samples that this rank has run, without copies and repeats.
        passes: passes over its microbatches; all but the last ran to their ends.
        batches: returns the iterator of the last pass, or None if it no longer exists: held
            weakly, so that leaving the loop ends the pass.
    """

    plan: StepPlan
    seen: list[Any] = field(default_factory=list[Any])
    passes: list[Pass] = field(default_factory=list[Pass])
    batches: Callable[[], Generator[Any] | None] = lambda: None

    @property
    def is_complete(self) -> bool:
        """Return True if the last pass ran to its end."""
        return bool(self.passes) and self.passes[-1].is_complete

    def leave(self) -> None:
        """End a pass whose loop was left, and whose iterator is kept, for example by a traceback.

        Later it would restore the random generators in the middle of another step.
        """
        batches = self.batches()
        if batches is not None and self.passes and self.passes[-1].slot is not None:
            batches.close()
