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
        is_new: whether it must be found out how the model's gradients are exchanged.
        own_backward: whether the caller weights the losses.

    Attributes:
        slot: the microbatch of the loop's current body.
        is_last: whether that is the rank's last microbatch.
        is_complete: whether the pass ran to its end.
        weights: weights by microbatch, without copies.
        losses: losses of all microbatches, with their weights, which are 0 for copies.
        total: total of the weights of all ranks, once the pass has ended without own_backward.
        in_own_backward: whether a backward of a given loss is running, or is to come.
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
        self._is_weighted: bool | None = None  # whether weights are given; None before a backward
        self._without: list[int] = []  # the microbatches that had no backward
        self.in_own_backward = False
        self._saw_other_backward = False
        self._kept: torch.nn.Parameter | None = None  # has a gradient since the first microbatch
        # Gradients of the training step may still be there while the model is evaluated.
        self._had_gradients = any(parameter.grad is not None for parameter in sync.parameters)

    # -- a microbatch -----------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Run the pass; a new model's parameters report gradients of losses not given.

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
            ValueError: it had no backward, and others had one.
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
        """Note the loss of the current microbatch, before its backward; return its weight.

        Raises:
            TypeError, ValueError: as for `Step.backward`.
        """
        check_type("loss", loss, torch.Tensor, "the mean loss of a microbatch, a tensor")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: give the mean, one value")
        check_type("weight", weight, (Real, torch.Tensor, NoneType), "a number")
        units = as_float("weight", self.plan.size(slot.k) if weight is None else weight)
        if self._is_weighted is (weight is None):
            raise ValueError(f"step {self.plan.number}: give weight= in each backward or in none")
        self._is_weighted = weight is not None
        if not 0 <= units < math.inf or self.weights.get(slot.k, units) != units:
            raise ValueError(
                f"weight is {units}: give at least 0, and the same value throughout a microbatch"
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
        """Refuse an optimizer's step while microbatches of this rank are to come.

        Also refuse one in the last body, unless the gradients were whole there. That is checked
        after the step, because a framework's own hook may end the pass before the step.
        """
        if has_stepped is not self.is_last or not self._trains(optimizer):
            return
        is_plain = not self._is_weighted and self.plan.samples == self.plan.assumed_samples
        if not (self.is_last and is_plain and self.sync.is_whole_in_last):
            raise ValueError(
                f"step {self.plan.number}: {type(optimizer).__name__}.step() in the loop over "
                "microbatches(), where the gradients are those of a part of the step: call step() "
                "and zero_grad() once, after the loop; if that was left and a variable keeps its "
                "iterator, drop it"
            )

    def _trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer that steps in a body has parameters of this pass."""
        if self.slot is None:
            return False
        trained = {*map(id, self.sync.parameters)}
        params = (param for group in optimizer.param_groups for param in group["params"])
        return any(id(param) in trained for param in params)

    def _check_kept(self) -> None:
        """Refuse to go on if the gradients of earlier microbatches were reset.

        Those of one of several models may be: a generator's loss gives the discriminator some.
        """
        if self._kept is None or self._kept.grad is not None or self.own_backward:
            return
        if all(parameter.grad is None for parameter in self.sync.parameters):
            raise ValueError(
                f"step {self.plan.number}: the gradients of the microbatches before are gone, as "
                "zero_grad() in the loop over microbatches() leaves them: call it after the loop, "
                "once in a step"
            )

    # -- the end ----------------------------------------------------------------------------------

    def end(self, divisor: float | None) -> bool:
        """Compare the ranks' observations, and finish the gradients. All data-parallel ranks.

        Args:
            divisor: divisor of the losses' weights, if they had any.

        Returns:
            Whether a new model's gradients are known to be exchanged once.

        Raises:
            ValueError: as for `judge`.
        """
        sync, plan = self.sync, self.plan
        record, values = self._record()
        own_states = record.states or b""
        # Without it a refusal is each rank's own: all make the same calls, so all refuse.
        must_compare = sync.meets or bool(self._is_weighted) or self.is_new
        if must_compare:
            record = self.ranks.reduce(WHAT, record, StepRecord.join)
        names = [*sync.summed], [*sync.exchanged]
        is_checked = judge(plan.number, record, own_states, *names, values, self.ranks)
        if self._is_weighted is not None and not self.own_backward:
            self.total = float(record.weights) if must_compare else plan.samples
        # No rank has run a backward, as in an evaluation; a rank with copies alone has losses.
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
        """Record what this rank has seen; also return shape and hash of its hashed parameters."""
        sync, refusal = self.sync, None
        has_losses = self._is_weighted is not None
        is_untold = not has_losses and not self._had_gradients and sync.has_gradients()
        if not self.own_backward and (self._saw_other_backward or is_untold):
            refusal = (
                f"step {self.plan.number}: gradients were computed without step.backward, so they "
                "are a sum that depends on the number of ranks: call step.backward(loss), or run "
                "backward of step.scale(loss), as in accelerator.backward(step.scale(loss)); or "
                "pass microbatches(model, own_backward=True) and weight the losses yourself"
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
        # Gradients that an evaluation finds are those of the training, exchanged already.
        has_exchanged = has_losses or self.own_backward
        return sync.complete(record, self.is_new and has_exchanged), values


@dataclass
class StepRun:
    """One step on this rank.

    Attributes:
        plan: the step.
        seen: ids of the samples that this rank has run, without copies and repeats.
        passes: passes over its microbatches; all but the last ran to their ends.
        batches: returns the iterator of the last pass, or None if nobody has it any more: held
            weakly, so that leaving the loop ends the pass.
    """

    plan: StepPlan
    seen: list[Any] = field(default_factory=list[Any])
    passes: list[Pass] = field(default_factory=list[Pass])
    batches: Callable[[], Generator[Any] | None] = lambda: None

    @property
    def is_complete(self) -> bool:
        """Return whether the last pass ran to its end."""
        return bool(self.passes) and self.passes[-1].is_complete

    def leave(self) -> None:
        """End a pass whose loop was left, and whose iterator is kept, for example by a traceback.

        Later it would restore the random generators in the middle of another step.
        """
        batches = self.batches()
        if batches is not None and self.passes and self.passes[-1].slot is not None:
            batches.close()
