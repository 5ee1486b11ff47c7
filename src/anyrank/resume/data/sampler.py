"""`anyrank.ElasticSampler`: the loader's order and accounting for the user's own DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from anyrank.errors import CheckpointError
from anyrank.resume.data.elastic import length_of
from anyrank.resume.data.permutation import Order
from anyrank.resume.data.position import Position
from anyrank.resume.data.receipt import Receipt, receipt_of
from anyrank.resume.data.schedule import Schedule, StepPlan, Tail


class Share(NamedTuple):
    """What a batch is in its step.

    Attributes:
        weight: what to multiply the batch's mean loss with, so that the gradients, averaged over
            the ranks as DDP and FSDP2 do it, are those of the mean over the global batch.
        is_last: whether it is this rank's last one of the step.
    """

    weight: float
    is_last: bool


class ElasticSampler(Position):
    """A batch sampler that gives this rank's microbatches of the rest of the epoch.

    For `DataLoader(dataset, batch_sampler=sampler)`. Order, steps and accounting are those of
    `ElasticLoader`, on any number of ranks; random numbers, weights and gradient exchange are the
    caller's. All ranks get equally many batches of each step: one that would have fewer gets its
    last one again, with a weight of 0.

    A step counts when `commit` is called, behind the optimizer's step; what a DataLoader fetches
    ahead does not count. Iterating again gives the uncommitted steps again.

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

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of sample ids, for the rest of the epoch as it is now."""
        index, size = self.place()
        self.first = self.next_step()
        return (
            self.schedule.ids(plan, turn.k)
            for plan in self.schedule.rest(self.first)
            for turn in plan.turns(index, size)
        )

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
                weight = 0.0 if turn.is_copy else plan.size(turn.k) * size / plan.samples
                return Share(weight, left == len(turns) - 1)
        raise ValueError(f"there is no batch {number} in this iteration")

    def commit(self) -> None:
        """Count the next step as done: call it once behind each optimizer's step. No collectives.

        Raises:
            CheckpointError: the epoch that was iterated has no further step.
        """
        if self.first is None or self.epoch != self.first.epoch:
            raise CheckpointError(
                f"no step of epoch {self.epoch} was given out: iterate the DataLoader before commit"
            )
        plan = self.next_step()
        index, size = self.place()
        seen = Receipt()
        for turn in plan.turns(index, size):
            if not turn.is_copy:
                start, stop = plan.bounds(turn.k)
                ids = self.schedule.order.ids(plan.epoch, start, max(start, min(stop, plan.n)))
                seen += receipt_of(plan.epoch, ids)
        self.advance(plan, seen)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was saved, on any number of ranks. No collectives.

        Raises:
            CheckpointError: another dataset, seed, order, microbatch, global_batch or tail.
            CorruptCheckpoint: not a state that `state_dict` returns.
        """
        super().load_state_dict(state_dict)
        self.first = None
