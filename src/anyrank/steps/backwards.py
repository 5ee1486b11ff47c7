"""The backward passes of one pass over a step's microbatches: their weights and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import ExitStack, contextmanager
from numbers import Real
from types import NoneType
from typing import Any

import torch
from torch import nn

from anyrank.checks import as_float, check_type
from anyrank.data.schedule import MicrobatchSlot
from anyrank.world.ranks import Ranks


class Backwards:
    """What `Step.backward` was given in one pass over the microbatches, on this rank.

    Args:
        number: of the step.

    Attributes:
        is_weighted: whether weights are given; None before the first backward.
        weights: by microbatch, without copies.
        losses: of the same microbatches, with their weights.
        without: the microbatches that had no backward.
        has_others: whether a watched parameter got a gradient by another backward.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_weighted: bool | None = None
        self.weights: dict[int, float] = {}
        self.losses: list[tuple[float, torch.Tensor]] = []
        self.without: list[int] = []
        self.has_others = False
        self.is_expected = False  # a backward of a loss that was given

    @contextmanager
    def watching(self, parameters: Iterable[nn.Parameter]) -> Generator[None, None, None]:
        """Notice where parameters get gradients of other losses than those that are given."""

        def note(_: torch.Tensor) -> None:
            self.has_others = self.has_others or not self.is_expected

        with ExitStack() as hooks:
            for parameter in parameters:
                hooks.callback(parameter.register_post_accumulate_grad_hook(note).remove)
            yield

    def add(self, slot: MicrobatchSlot, loss: torch.Tensor, weight: Any, size: int) -> float:
        """Note a backward of the current microbatch, of `size` samples. Returns its weight.

        Raises:
            TypeError, ValueError: as `Step.backward`.
        """
        check_type("loss", loss, torch.Tensor, "the mean loss of a microbatch, a tensor")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: give the mean, one value")
        check_type("weight", weight, (Real, torch.Tensor, NoneType), "a number")
        own = as_float("weight", size if weight is None else weight)
        if self.is_weighted is (weight is None):
            raise ValueError(f"step {self.number}: give weight= in each backward or in none")
        self.is_weighted = weight is not None
        if not 0 <= own < math.inf or self.weights.get(slot.k, own) != own:
            raise ValueError(
                f"weight is {own}: give at least 0, and the same value throughout a microbatch"
            )
        if not slot.is_copy:
            self.weights[slot.k] = own
            self.losses.append((own, loss.detach()))
        # Before the wrapper's backward, which would wait for ranks that are elsewhere.
        self._check(self.weights, self.without)
        self.is_expected = True
        return own

    def end(self, slot: MicrobatchSlot) -> None:
        """The body of a microbatch has ended.

        Raises:
            ValueError: it had no backward, and others had one.
        """
        self.is_expected = False
        if not slot.is_copy and slot.k not in self.weights:
            self.without.append(slot.k)
        self._check(self.weights, self.without)

    def check_given(self, has_gradients: Callable[[], bool]) -> None:
        """Refuse gradients of losses that were not given, at the end of the pass.

        Raises:
            ValueError: there are some.
        """
        if self.has_others or (self.is_weighted is None and has_gradients()):
            raise ValueError(
                f"step {self.number}: gradients were computed without step.backward, so they are a "
                "sum that depends on the number of ranks: call step.backward(loss), or run "
                "backward of step.scale(loss), as in accelerator.backward(step.scale(loss)); or "
                "pass microbatches(model, own_backward=True) and weight the losses yourself"
            )

    def total(self, ranks: Ranks) -> float | None:
        """The weights of all ranks' microbatches; None if none had a backward. All ranks.

        Raises:
            ValueError: some had a backward and some had none; on all ranks.
        """
        own = list(self.weights.values()), self.without
        rows = ranks.gather(own, "comparing which microbatches had a step.backward")
        weights = [weight for row, _ in rows for weight in row]
        self._check(weights, [k for _, without in rows for k in without])
        return math.fsum(weights) if weights else None

    def _check(self, weights: Collection[object], without: Collection[int]) -> None:
        """Refuse a step in which some microbatches had a backward and some had none."""
        if weights and without:
            raise ValueError(
                f"step {self.number}: microbatch {min(without)} had no step.backward, and others "
                "had one: to leave it out, call step.backward(loss, weight=0) in it, and give the "
                "others their weight= too, as len(batch)"
            )

    def mean_loss(self, ranks: Ranks) -> float:
        """The mean loss over the microbatches of all ranks so far. All ranks.

        Raises:
            ValueError: no rank has had a backward.
        """
        own = [(weight, float(loss)) for weight, loss in self.losses]
        rows = ranks.gather((own, list(self.weights.values())), "step.loss()")
        total = math.fsum(weight for _, weights in rows for weight in weights)
        if not any(losses for losses, _ in rows):
            raise ValueError(f"step {self.number}: no loss yet, call step.backward first")
        terms = [weight * loss for losses, _ in rows for weight, loss in losses if weight]
        return math.fsum(terms) / total if total else 0.0
