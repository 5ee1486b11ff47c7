"""One optimizer step: this rank's microbatches, and a backward that weighs them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from anyrank.data.agreed import Agreed
from anyrank.data.fetch import Answer, Samples, request_for
from anyrank.data.gradient_sync import GradientSync
from anyrank.data.receipts import Receipt, receipt_of
from anyrank.data.schedule import Schedule, StepPlan, Turn
from anyrank.errors import CheckpointError
from anyrank.random_state.hashing import derive
from anyrank.random_state.streams import accelerators_of, seeded
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
        samples: makes a batch a second time.
        checked: models whose gradients were seen to be exchanged as they should, by id.
        exponent: of the power of two that stands for an ordinary `weight`, once there is one.
    """

    ranks: Ranks | None
    group: Any
    index: int
    size: int
    answers: Iterator[Answer]
    samples: Samples
    checked: WeakValueDictionary[int, nn.Module]
    exponent: int | None = None

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
        self.num_passes = 0
        self.is_started = self.is_complete = False
        self.is_weighted: bool | None = None
        self.weights: dict[int, float] = {}  # of this rank's own microbatches
        self.losses: list[tuple[float, torch.Tensor]] = []  # with their weights
        self.seen = Receipt()

    @property
    def k(self) -> int:
        """Which of the step's microbatches the loop's body is in, from 0, on any rank count.

        Raises:
            ValueError: not within `microbatches`.
        """
        return self._in_body().k

    def microbatches(self, model: nn.Module, *, own_backward: bool = False) -> Iterator[Any]:
        """This rank's batches, each to be run forward and backward within the loop's body.

        Python's, numpy's and torch's random streams are those of (seed, step, microbatch) within
        the body, and go on as before after it. DDP and FSDP2 exchange gradients in the last one
        only. Ranks with fewer microbatches run one a second time with weight 0. All data-parallel
        ranks, to the end.

        A batch is run when all ranks have theirs: what a dataset raises on one rank, all raise.

        Once it has ended, it can be called again for another pass over the same batches (the
        generator's turn, after the discriminator's step): with other random numbers in the body,
        and `loss()` of its own. The batches are fetched anew, in this process.

        Args:
            model: the wrapped model, or a container of several. What no wrapper has is averaged
                over the ranks too.
            own_backward: allow backward passes of your own, without `backward` or `scale`. Their
                weights are yours then: the sum over a rank's microbatches is averaged over ranks.

        Raises:
            CheckpointError: a worker returned other samples than the plan has.
            RankError: the dataset raised on some of several ranks, named with sample and cause; on
                one rank alone, its own exception comes.
            ValueError: a second call before the first has ended; a model that averages over other
                ranks than the loader's; a backward that bypassed `step.backward`; a forward that
                bypassed the wrapper, noticed in a model's first step.
        """
        if self.is_started and not self.is_complete:
            raise ValueError(f"step {self.number}: its microbatches were taken already")
        sync = GradientSync(model, self.ranks)
        devices = accelerators_of(model)
        turns = self.plan.turns(self.within.index, self.within.size)
        again = (self.num_passes,) if self.num_passes else ()
        self.num_passes += 1
        self.is_started, self.is_complete = True, False
        self.is_weighted, self.weights, self.losses = None, {}, []
        try:
            for number, (turn, batch) in enumerate(zip(turns, self.fetched(turns), strict=True)):
                seed = self.schedule.order.seed
                key = derive(seed, self.number, turn.k, "microbatch", *again)
                with seeded(key, devices), sync.on(number + 1 == len(turns)):
                    self.turn = turn
                    yield batch
                    self.turn = None
            self.finish(model, sync, own_backward)
            self.is_complete = True
        finally:
            self.turn = None
            if not self.is_complete:
                sync.drop_unfinished()

    def fetched(self, turns: Sequence[Turn]) -> Iterator[Any]:
        """The batches of turns, each once all ranks have theirs. All data-parallel ranks.

        Fetches one ahead, so that no rank waits for another longer than a batch takes.
        """
        take = self.take if self.num_passes == 1 else self.take_again
        ahead = Agreed(self.ranks, "fetching a batch", lambda: take(turns[0]))
        for number in range(1, len(turns) + 1):
            batch = ahead.get()
            if number < len(turns):
                turn = turns[number]
                ahead = Agreed(self.ranks, "fetching a batch", lambda turn=turn: take(turn))
            yield batch

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
            # Positions beyond the order's end pad the step, and are in no receipt.
            real = max(0, self.plan.n - self.plan.bounds(turn.k)[0])
            drawn = torch.tensor(ids[:real], dtype=torch.int64, device="cpu")
            self.seen += receipt_of(self.epoch, drawn)
        return answer.batch

    def take_again(self, turn: Turn) -> Any:
        """The batch of a turn for a further pass: it is in the receipt already."""
        return self.within.samples[request_for(self.schedule, self.plan, turn.k)].batch

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
        self.scale(loss, weight).backward()

    def scale(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> torch.Tensor:
        """What `backward` runs backward of, for those who have to do that themselves.

        `accelerator.backward(step.scale(loss))` is as right as `step.backward(loss)`. Arguments and
        errors are those of `backward`. Run backward of each result once.
        """
        turn = self._in_body()
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
        return loss * (0.0 if turn.is_copy else own / whole * self.ranks.size)

    def _in_body(self) -> Turn:
        if self.turn is None:
            raise ValueError("call step.backward within `for batch in step.microbatches(model)`")
        return self.turn

    def provisional(self, own: float) -> float:
        """What weights are divided by until the step's total is known: equal on all ranks.

        An ordinary weight, as a power of two: which one it is does not change a bit of the result.
        The first call of a pass gathers.
        """
        if self.within.exponent is None:
            most = max(self.ranks.gather(own))
            self.within.exponent = round(math.log2(most)) if most else 0
        return math.ldexp(self.plan.num_microbatches, self.within.exponent)

    def finish(self, model: nn.Module, sync: GradientSync, own_backward: bool) -> None:
        """What is left to do once all gradients are there. All data-parallel ranks."""
        if self.is_weighted is None and not own_backward:
            if sync.has_gradients():
                raise ValueError(
                    f"step {self.number}: a backward of your own ran in step.microbatches, so its "
                    "gradients are a sum that depends on the number of ranks: call "
                    "step.backward(loss), or run backward of step.scale(loss), as in "
                    "accelerator.backward(step.scale(loss)); or give microbatches(model, "
                    "own_backward=True) and weigh the losses yourself"
                )
            return
        if self.is_weighted:
            parts = self.ranks.gather(list(self.weights.values()))
            total = math.fsum(weight for part in parts for weight in part)
            sync.scale(self.provisional(0.0) / total if total else 0.0)
        is_new = id(model) not in self.within.checked
        sync.average_loose(self.ranks, self.within.group, is_new)
        if is_new and sync.check_exchanged(self.ranks):
            self.within.checked[id(model)] = model

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
