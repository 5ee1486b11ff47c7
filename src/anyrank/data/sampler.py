"""`anyrank.ElasticSampler`: the loader's order and accounting for the user's own DataLoader."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from anyrank.data.loader import length_of
from anyrank.data.order import Order
from anyrank.data.position import Position
from anyrank.data.receipts import Receipt, receipt_of
from anyrank.data.schedule import Schedule, StepPlan, Tail
from anyrank.errors import CheckpointError
from anyrank.random_state.hashing import derive
from anyrank.random_state.streams import accelerators_of, own_accelerator, seeded

DATALOADER = "torch.utils.data.dataloader"


@dataclass(frozen=True)
class Share:
    """What a batch is in its step.

    Attributes:
        weight: what to multiply the batch's mean loss with, so that the gradients, averaged over
            the ranks as DDP and FSDP2 do it, are those of the mean over the global batch.
        is_last: whether it is this rank's last one of the step.
        step: steps of the run before this batch's.
        k: which of the step's microbatches it is, from 0, on any rank count.
        seed: of the run.
    """

    weight: float
    is_last: bool
    step: int
    k: int
    seed: int

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The batch's mean loss, weighted: run backward of it."""
        return loss * self.weight

    @contextmanager
    def seeded(self, model: nn.Module | None = None) -> Generator[None, None, None]:
        """Run the batch under the random streams that `ElasticLoader` gives it.

        Python's, numpy's and torch's streams are those of (seed, step, k) within the block, and go
        on as before after it.

        Args:
            model: whose devices' streams are meant; default: the rank's own device.
        """
        devices = own_accelerator() if model is None else accelerators_of(model)
        with seeded(derive(self.seed, self.step, self.k, "microbatch"), devices):
            yield


@dataclass
class HandedOut:
    """The batches of one step that one iteration of a sampler has handed out.

    Attributes:
        batches: how many.
        seen: their samples, without copies and repeats.
    """

    batches: int = 0
    seen: Receipt = field(default_factory=Receipt)


class ElasticSampler(Position):
    """A batch sampler that gives this rank's microbatches of the rest of the epoch.

    For `DataLoader(dataset, batch_sampler=sampler)`. Order, steps and accounting are those of
    `ElasticLoader`, on any number of ranks; random numbers, weights and gradient exchange are the
    caller's. All ranks get equally many batches of each step: one that would have fewer gets its
    last one again, with a weight of 0.

    A step counts when `commit` is called, after the optimizer's step; what a DataLoader fetches
    ahead does not count. Iterating again gives the uncommitted steps again. The batches are this
    rank's already: a wrapper that shares them among the ranks once more (Accelerate's `prepare` of
    the DataLoader) would lose samples, and is refused.

    Args:
        dataset_or_length: the dataset, or how many samples it has.
        global_batch: samples of a step, on all ranks together.
        microbatch: samples of a batch.
        seed: of the order.
        shuffle: False for the dataset's own order.
        tail: as of `ElasticLoader`.
        process_group: the data-parallel ranks; default: all, or this process alone.

    Raises:
        ValueError: sizes that do not fit each other or the number of ranks; an empty dataset.
        TypeError: a dataset without length; sizes that are no int.
    """

    def __init__(
        self,
        dataset_or_length: Any,
        *,
        global_batch: int,
        microbatch: int,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail = "short",
        process_group: Any = None,
    ) -> None:
        is_length = type(dataset_or_length) is int
        n = dataset_or_length if is_length else length_of(dataset_or_length)
        schedule = Schedule(Order(n, seed, shuffle), global_batch, microbatch, tail)
        super().__init__(schedule, key=None, group=process_group, on_batch_change=None)
        self.first: StepPlan | None = None
        self.handed_out = defaultdict[int, HandedOut](HandedOut)  # by the number of the step

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of sample ids, for the rest of the epoch as it is now.

        Raises:
            CheckpointError: with the first list, when something between the sampler and its
                DataLoader asks for it.
        """
        frame = inspect.currentframe()
        wrapper = between_dataloader(frame.f_back if frame else None)
        self.first = self.next_step()
        self.handed_out = defaultdict(HandedOut)
        return self._batches(self.first, self.handed_out, wrapper)

    def _batches(
        self, first: StepPlan, handed_out: defaultdict[int, HandedOut], wrapper: str | None
    ) -> Iterator[list[int]]:
        if wrapper is not None:
            raise CheckpointError(
                f"{wrapper} stands between ElasticSampler and its DataLoader and decides which "
                "batches are used, as BatchSamplerShard does after accelerator.prepare(DataLoader("
                "...)): these batches are this rank's alone, so a second sharding loses samples. "
                "Leave the DataLoader out of prepare(), and move the batches to the device yourself"
            )
        index, size = self.place()
        for plan in self.schedule.rest(first):
            for turn in plan.turns(index, size):
                ids = self.schedule.ids(plan, turn.k)
                given = handed_out[plan.number]
                given.batches += 1
                if not turn.is_copy:
                    real = ids[: max(0, plan.n - plan.bounds(turn.k)[0])]
                    given.seen += receipt_of(plan.epoch, torch.tensor(real, dtype=torch.int64))
                yield ids

    def __len__(self) -> int:
        """Number of batches that are left of the epoch for this rank, as for every other."""
        _, size = self.place()
        steps = self.schedule.rest(self.next_step())
        return sum(-(-plan.num_microbatches // size) for plan in steps)

    def share(self, number: int) -> Share:
        """What batch `number` (from 0) of the last iteration is in its step.

        Raises:
            ValueError: the epoch has no such batch, or nothing was iterated.
        """
        index, size = self.place()
        plan = self.first
        if plan is not None and number >= 0:
            # Only the last step of an epoch is short.
            steps, left = divmod(number, -(-self.schedule.num_microbatches // size))
            start = plan.start + steps * self.schedule.global_batch
            plan = self.schedule.next_step(plan.epoch, plan.number + steps, start)
            turns = plan.turns(index, size) if plan else []
            if plan and left < len(turns):
                turn = turns[left]
                if left >= self.handed_out[plan.number].batches:
                    raise ValueError(f"batch {number} was not taken from the sampler yet")
                weight = 0.0 if turn.is_copy else plan.size(turn.k) * size / plan.samples
                is_last = left == len(turns) - 1
                return Share(weight, is_last, plan.number, turn.k, self.schedule.order.seed)
        raise ValueError(f"there is no batch {number} in this iteration")

    def check_complete(self) -> None:
        """Whether the next step may be counted. No collectives.

        Raises:
            CheckpointError: not all of the step's batches were taken from the sampler.
        """
        if self.first is None or self.epoch != self.first.epoch:
            raise CheckpointError(
                f"no step of epoch {self.epoch} was given out: iterate the DataLoader before "
                "commit, on every rank; one that reads on one rank for all (dispatch_batches=True "
                "of Accelerate) cannot be used"
            )
        plan = self.next_step()
        taken, needed = self.handed_out[plan.number].batches, len(plan.turns(*self.place()))
        if taken < needed:
            raise CheckpointError(
                f"step {plan.number} has {needed} batches on this rank, and {taken} were "
                "taken from the sampler: call commit once for each optimizer step, and let no "
                "second sharding (BatchSamplerShard of accelerator.prepare) choose among them"
            )

    def commit(self) -> None:
        """Count the next step as done: call it once after each optimizer's step. No collectives.

        Raises:
            CheckpointError: not all of the step's batches were taken from the sampler.
        """
        self.check_complete()
        plan = self.next_step()
        self.advance(plan, self.handed_out.pop(plan.number).seen)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was saved, on any number of ranks. No collectives.

        Raises:
            CheckpointError: another dataset, seed, order, microbatch, global_batch or tail.
            CorruptCheckpoint: not a state that `state_dict` returns.
        """
        super().load_state_dict(state_dict)
        self.first = None


def between_dataloader(caller: FrameType | None) -> str | None:
    """What stands between a DataLoader and the sampler that it draws from; None for nothing.

    Such a wrapper may leave batches out, and nobody could count those. A DataLoader asks for the
    sampler's iterator itself; a loop of the user's own asks without any DataLoader.

    Args:
        caller: whoever asks the sampler for an iterator.
    """
    frame = caller
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module == DATALOADER:
            break
        if module.startswith("torch.utils.data."):  # the dataset of that DataLoader asks
            return None
        frame = frame.f_back
    if caller is None or frame is None or frame is caller:
        return None
    owner = type(caller.f_locals.get("self"))
    name = caller.f_code.co_qualname if owner is type(None) else owner.__qualname__
    return f"{caller.f_globals.get('__name__')}.{name}"
