"""How far a step has come on this rank: the state of a `Step`."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from numbers import Real
from types import NoneType
from typing import Any

import torch
from torch import nn

from anyrank.checks import as_float, check_type
from anyrank.data.schedule import MicrobatchSlot, StepPlan
from anyrank.steps.gradient_sync import GradientSync
from anyrank.steps.step_record import check_backwards
from anyrank.world.ranks import Ranks


@dataclass
class StepRun:
    """One step on this rank.

    Attributes:
        plan: the step.
        seen: ids of the samples that this rank has run, without copies and repeats.
        num_passes: calls of `microbatches`.
        is_complete: whether the last pass ran to its end.
        divisor: of weights until their total is known, once a weight is given.
        sync: the exchange of gradients; this and the following are of the last pass.
        slot: the microbatch of the loop's current body.
        is_last: whether it is the rank's last.
        is_weighted: whether weights are given; None before the first backward.
        weights: by microbatch, without copies.
        losses: of all microbatches, with their weights, which are 0 for copies.
        total: of the weights of all ranks, once the pass has ended without own_backward.
        without: the microbatches that had no backward.
        in_own_backward: whether a backward of a loss that was given runs, or is to come.
        saw_other_backward: whether a watched parameter got a gradient of another loss.
    """

    plan: StepPlan
    seen: list[Any] = field(default_factory=list[Any])
    num_passes: int = 0
    is_complete: bool = False
    divisor: float | None = None
    sync: GradientSync | None = None
    slot: MicrobatchSlot | None = None
    is_last: bool = False
    is_weighted: bool | None = None
    weights: dict[int, float] = field(default_factory=dict[int, float])
    losses: list[tuple[float, torch.Tensor]] = field(
        default_factory=list[tuple[float, torch.Tensor]]
    )
    total: float | None = None
    without: list[int] = field(default_factory=list[int])
    in_own_backward: bool = False
    saw_other_backward: bool = False

    def begin_pass(self, sync: GradientSync) -> None:
        """A pass over the microbatches begins."""
        self.num_passes += 1
        self.is_complete, self.sync = False, sync
        self.is_weighted, self.weights, self.losses, self.without = None, {}, [], []
        self.total = None
        self.in_own_backward = self.saw_other_backward = False

    @contextmanager
    def watching(self, parameters: Iterable[nn.Parameter]) -> Generator[None, None, None]:
        """Notice where parameters get gradients of other losses than those that are given."""

        def note(_: torch.Tensor) -> None:
            self.saw_other_backward = self.saw_other_backward or not self.in_own_backward

        with ExitStack() as hooks:
            for parameter in parameters:
                hooks.callback(parameter.register_post_accumulate_grad_hook(note).remove)
            yield

    def add_loss(self, slot: MicrobatchSlot, loss: torch.Tensor, weight: Any) -> float:
        """Note the loss of the current microbatch, whose backward comes. Returns its weight.

        Raises:
            TypeError, ValueError: as `Step.backward`.
        """
        check_type("loss", loss, torch.Tensor, "the mean loss of a microbatch, a tensor")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: give the mean, one value")
        check_type("weight", weight, (Real, torch.Tensor, NoneType), "a number")
        units = as_float("weight", self.plan.size(slot.k) if weight is None else weight)
        if self.is_weighted is (weight is None):
            raise ValueError(f"step {self.plan.number}: give weight= in each backward or in none")
        self.is_weighted = weight is not None
        if not 0 <= units < math.inf or self.weights.get(slot.k, units) != units:
            raise ValueError(
                f"weight is {units}: give at least 0, and the same value throughout a microbatch"
            )
        if not slot.is_copy:
            self.weights[slot.k] = units
        self.losses.append((0.0 if slot.is_copy else units, loss.detach()))
        # Before the wrapper's backward, which would wait for ranks that are elsewhere.
        check_backwards(self.plan.number, self.weights, self.without)
        self.in_own_backward = True
        return units

    def end_microbatch(self, slot: MicrobatchSlot) -> None:
        """The body of a microbatch has ended.

        Raises:
            ValueError: it had no backward, and others had one.
        """
        self.in_own_backward = False
        if not slot.is_copy and slot.k not in self.weights:
            self.without.append(slot.k)
        check_backwards(self.plan.number, self.weights, self.without)

    def mean_loss(self, ranks: Ranks) -> float:
        """The mean loss over the microbatches of all ranks so far. All ranks.

        Raises:
            ValueError: no rank has had a backward.
        """
        terms = [weight * float(loss) for weight, loss in self.losses if weight]
        rows = ranks.gather((terms, list(self.weights.values())), "step.loss()")
        weights = [weight for _, row in rows for weight in row]
        if not weights:
            raise ValueError(f"step {self.plan.number}: no loss yet, call step.backward first")
        total = math.fsum(weights)
        return math.fsum(term for row, _ in rows for term in row) / total if total else 0.0

    def rank_loss(self, size: int) -> torch.Tensor:
        """This rank's part of the mean loss, whose mean over all `size` ranks is that.

        Raises:
            ValueError: the pass has not ended, had no backward, or was one with own_backward.
        """
        if not self.is_complete or self.total is None:
            raise ValueError(
                f"step {self.plan.number}: call rank_loss() after the loop over microbatches(), "
                "with a step.backward in each of them, and without own_backward=True"
            )
        _, first = self.losses[0]
        # In at least float32, so that a sum of many loses nothing.
        total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
        for weight, loss in self.losses:
            if weight:
                total += weight * size / self.total * loss
        return total.reshape(())
