"""One optimizer step: this rank's microbatches, and a backward that weighs them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anyrank.errors import CheckpointError
from anyrank.resume.data.fetch import Answer
from anyrank.resume.data.receipt import Receipt, receipt_of
from anyrank.resume.data.schedule import Schedule, StepPlan, Turn
from anyrank.resume.data.sync import GradientSync
from anyrank.resume.hashing import derive
from anyrank.resume.streams import accelerators_of, seeded
from anyrank.world.ranks import Ranks


@dataclass
class Pass:
    """What the steps of one pass over the loader share.

    Attributes:
        ranks: the data-parallel ranks; None when the pass is over.
        group: the user's process group of these ranks.
        index: this rank's place among them.
        size: how many they are.
        answers: the batches to come.
        exponent: of the power of two that stands for an ordinary `weight`, once there is one.
        has_averaged: whether gradients of a model without wrapper have been averaged.
    """

    ranks: Ranks | None
    group: Any
    index: int
    size: int
    answers: Iterator[Answer]
    exponent: int | None = None
    has_averaged: bool = False

    def close(self) -> None:
        """Let go of workers and ranks: a user may keep a step beyond its loop."""
        self.ranks, self.answers = None, iter(())


class Step:
    """One step of a run, made by iterating an `ElasticLoader`.

    Attributes:
        number: steps of the run before this one.
        epoch: from 0.
        samples: samples of the global batch, on all ranks together.
    """

    def __init__(self, plan: StepPlan, schedule: Schedule, within: Pass) -> None:
        self.number, self.epoch, self.samples = plan.number, plan.epoch, plan.samples
        self.plan = plan
        self.schedule = schedule
        self.within = within
        self.turn: Turn | None = None  # the microbatch that the loop is in
        self.sync: GradientSync | None = None
        self.is_started = self.is_complete = False
        self.is_weighted: bool | None = None
        self.weights: dict[int, float] = {}  # of this rank's own microbatches
        self.losses: list[tuple[float, torch.Tensor]] = []  # with their weights
        self.seen = Receipt()

    def microbatches(self, model: nn.Module) -> Iterator[Any]:
        """This rank's batches, each to be run forward and backward within the loop's body.

        Python's, numpy's and torch's random streams are those of (seed, step, microbatch) within
        the body, and go on as before behind it. DDP and FSDP2 exchange gradients in the last one
        only. Ranks with fewer microbatches run one a second time with weight 0. All data-parallel
        ranks, to the end; once for a step.

        Args:
            model: the wrapped model, or a container of several. What no wrapper has is averaged
                over the ranks too.

        Raises:
            CheckpointError: a worker returned other samples than the plan has.
            ValueError: a second call; a model that averages over other ranks than the loader's.
        """
        if self.is_started:
            raise ValueError(f"step {self.number}: its microbatches were taken already")
        sync = self.sync = GradientSync(model, self.ranks)
        devices = accelerators_of(model)
        turns = self.plan.turns(self.within.index, self.within.size)
        self.is_started = True
        try:
            for number, turn in enumerate(turns):
                batch = self.take(turn)
                key = derive(self.schedule.order.seed, self.number, turn.k, "microbatch")
                with seeded(key, devices), sync.on(number + 1 == len(turns)):
                    self.turn = turn
                    yield batch
                    self.turn = None
            self.finish(sync)
            self.is_complete = True
        finally:
            self.turn = self.sync = None
            if not self.is_complete:
                sync.drop_unfinished()

    def take(self, turn: Turn) -> Any:
        """The batch of a turn, compared with the plan."""
        ids = self.schedule.ids(self.plan, turn.k)
        answer = next(self.within.answers, None)
        if answer is None or list(answer.request.ids) != ids or answer.request.epoch != self.epoch:
            got = "no batch" if answer is None else f"samples {list(answer.request.ids)[:8]}"
            raise CheckpointError(
                f"step {self.number}, microbatch {turn.k}: the plan has samples {ids[:8]}, the "
                f"workers returned {got}: start a new pass over the loader"
            )
        if not turn.is_copy:
            # Positions behind the order's end pad the step, and are in no receipt.
            real = max(0, self.plan.n - self.plan.bounds(turn.k)[0])
            drawn = torch.tensor(ids[:real], dtype=torch.int64, device="cpu")
            self.seen += receipt_of(self.epoch, drawn)
        return answer.batch

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Run backward of a microbatch's mean loss, weighted.

        Behind the loop, gradients are those of the mean over the global batch: over its samples, or
        over what `weight` counts. They have to be zero or None before it. A scaled loss (of a
        GradScaler) stays as scaled as it is.

        Args:
            loss: one value, the mean over this microbatch.
            weight: what the mean is over, a number of tokens for instance; at least 0. In all of a
                step's microbatches, on all ranks, or in none.

        Raises:
            ValueError: not within `microbatches`, a loss of several values, a wrong weight.
        """
        turn, sync = self.turn, self.sync
        if turn is None or sync is None:
            raise ValueError("call step.backward within `for batch in step.microbatches(model)`")
        if loss.numel() != 1:
            raise ValueError(f"the loss has shape {list(loss.shape)}: give the mean, one value")
        if self.is_weighted is (weight is None):
            raise ValueError(f"step {self.number}: give weight= in each backward or in none")
        self.is_weighted = weight is not None
        own = float(self.plan.size(turn.k) if weight is None else weight)
        if not 0 <= own < math.inf or self.weights.get(turn.k, own) != own:
            raise ValueError(
                f"weight is {own}: give at least 0, and the same all over a microbatch"
            )
        whole = self.plan.samples if weight is None else self.provisional(own)
        if not turn.is_copy:
            self.weights[turn.k] = own
            self.losses.append((own, loss.detach()))
        (loss * (0.0 if turn.is_copy else own / whole * self.ranks.size)).backward()

    def provisional(self, own: float) -> float:
        """What weights are divided by until the step's total is known: equal on all ranks.

        An ordinary weight, as a power of two: which one it is does not change a bit of the result.
        The first call of a pass gathers.
        """
        if self.within.exponent is None:
            most = max(self.ranks.gather(own))
            self.within.exponent = round(math.log2(most)) if most else 0
        return math.ldexp(self.plan.num_microbatches, self.within.exponent)

    def finish(self, sync: GradientSync) -> None:
        """What is left to do once all gradients are there. All data-parallel ranks."""
        if self.is_weighted is None:  # the user's own backward
            return
        if self.is_weighted:
            parts = self.ranks.gather(list(self.weights.values()))
            total = math.fsum(weight for part in parts for weight in part)
            sync.scale(self.provisional(0.0) / total if total else 0.0)
        sync.average_loose(self.ranks, self.within.group, not self.within.has_averaged)
        self.within.has_averaged = True

    def loss(self) -> float:
        """The mean loss over the global batch, as far as it has come. All data-parallel ranks.

        The same number on any rank count, for the same losses. Of the losses as they were passed to
        `backward`: a GradScaler's are scaled.

        Raises:
            ValueError: no rank has called `backward` yet.
        """
        own = [(weight, float(loss)) for weight, loss in self.losses]
        rows = self.ranks.gather((own, list(self.weights.values())))
        total = math.fsum(weight for _, weights in rows for weight in weights)
        if not any(losses for losses, _ in rows):
            raise ValueError(f"step {self.number}: no loss yet, call step.backward first")
        terms = [weight * loss for losses, _ in rows for weight, loss in losses if weight]
        return math.fsum(terms) / total if total else 0.0

    @property
    def ranks(self) -> Ranks:
        """The data-parallel ranks, which stay together as long as the loop over the loader."""
        if self.within.ranks is None:
            raise ValueError(f"step {self.number}: ask within the loop over the loader")
        return self.within.ranks
