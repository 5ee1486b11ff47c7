"""`anyrank.ElasticSampler`: the order and counts of `ElasticLoader` for any DataLoader."""

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

from anyrank.checks import check_int, check_model
from anyrank.data.fetch import length_of
from anyrank.data.order import Order
from anyrank.data.position import Position
from anyrank.data.receipts import Receipt, receipt_of
from anyrank.data.schedule import Schedule, StepPlan, Tail
from anyrank.errors import CheckpointError
from anyrank.random_state.streams import accelerators_of, own_accelerator, seeded
from anyrank.tensors.hashing import derive

DATALOADER = "torch.utils.data.dataloader"


@dataclass(frozen=True)
class Share:
    """The part of a batch in its step.

    Attributes:
        weight: factor of the batch's mean loss, so that the gradients, averaged over the ranks by
            DDP or FSDP2, are those of the mean over the global batch.
        is_last: whether this is the rank's last batch of the step.
        step: steps of the run before this batch's step.
        k: index of the microbatch in the step, from 0, independent of the rank count.
        seed: of the run.

    Example::

        sampler = anyrank.ElasticSampler(8, global_batch=8, microbatch=2)
        shares = [sampler.share(number) for number, _ in enumerate(sampler)]
        assert [share.k for share in shares] == [0, 1, 2, 3]
        assert [share.weight for share in shares] == [0.25] * 4
        with shares[0].seeded():
            loss = torch.randn(2).mean()  # the same on any rank that has this microbatch
        loss = shares[0].scale(loss)
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
        """Run the batch under the same random streams as with `ElasticLoader`.

        Within the block, the streams of Python, numpy and torch depend on (seed, step, k) alone;
        afterwards they continue as before.

        Args:
            model: the streams of its devices are seeded too; default: the rank's own device.
        """
        if model is not None:
            check_model(model)
        devices = own_accelerator() if model is None else accelerators_of(model.parameters())
        with seeded(derive(self.seed, self.step, self.k, "microbatch"), devices):
            yield


@dataclass
class _YieldedBatches:
    """The batches of one step that an iteration of a sampler has yielded.

    Attributes:
        batches: their number.
        seen: their samples, without copies and repeats.
    """

    batches: int = 0
    seen: Receipt = field(default_factory=Receipt)


class ElasticSampler(Position):
    """A batch sampler that yields this rank's microbatches of the rest of the epoch.

    For `DataLoader(dataset, batch_sampler=sampler)`. Order, steps and counts are those of
    `ElasticLoader`, on any number of ranks; random numbers, weights and gradient exchange are left
    to the caller. All ranks get the same number of batches in each step: a rank with fewer gets its
    last batch again, with weight 0.

    A step counts when `commit` is called, after the optimizer's step; batches that a DataLoader
    fetches ahead do not count. Iterating again yields the uncommitted steps again. The batches are
    already those of this rank: a wrapper that divides them among the ranks again (Accelerate's
    `prepare` of the DataLoader) would lose samples, and is refused. Batches that are dropped after
    the DataLoader (`itertools.islice`) are not noticed: train each before committing its step.

    Args:
        dataset_or_length: the dataset, or its number of samples.
        global_batch: samples of a step, on all ranks together.
        microbatch: samples of a batch.
        seed: of the order.
        shuffle: False for the dataset's own order.
        tail: as in `ElasticLoader`.
        process_group: the data-parallel ranks; default: all, or this process alone.

    Raises:
        ValueError: sizes that do not match each other or the number of ranks; an empty dataset.
        TypeError: a dataset without length; sizes that are not ints.

    Example::

        data = torch.randn(32, 4)
        sampler = anyrank.ElasticSampler(data, global_batch=16, microbatch=4)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, batch in enumerate(torch.utils.data.DataLoader(data, batch_sampler=sampler)):
            share = sampler.share(number)
            with share.seeded(model):
                share.scale(model(batch).square().mean()).backward()
            if share.is_last:
                optimizer.step()
                optimizer.zero_grad()
                sampler.commit()
        assert sampler.samples == 32
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
        super().__init__(schedule, None, process_group, None)
        self._first: StepPlan | None = None
        self._yielded = defaultdict[int, _YieldedBatches](_YieldedBatches)  # by step number

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of sample ids, for the rest of the epoch as it is now.

        Raises:
            CheckpointError: with the first list, if a wrapper is between the sampler and its
                DataLoader.
        """
        frame = inspect.currentframe()
        wrapper = _between_dataloader(frame.f_back if frame else None)
        self._first = self._next_step()
        self._yielded = defaultdict(_YieldedBatches)
        return self._batches(self._first, self._yielded, wrapper)

    def _batches(
        self, first: StepPlan, yielded: defaultdict[int, _YieldedBatches], wrapper: str | None
    ) -> Iterator[list[int]]:
        if wrapper is not None:
            raise CheckpointError(
                f"{wrapper} is between ElasticSampler and its DataLoader and selects batches, as "
                "BatchSamplerShard does after accelerator.prepare(DataLoader(...)): the batches "
                "are already those of this rank, so a second sharding loses samples. Do not pass "
                "the DataLoader to prepare(), and move the batches to the device yourself"
            )
        index, size = self._data_rank()
        for plan in self._schedule.rest(first):
            for slot in plan.slots(index, size):
                ids = self._schedule.ids(plan, slot.k)
                given = yielded[plan.number]
                given.batches += 1
                if not slot.is_copy:
                    real = ids[: max(0, plan.n - plan.bounds(slot.k)[0])]
                    given.seen += receipt_of(plan.epoch, torch.tensor(real, dtype=torch.int64))
                yield ids

    def __len__(self) -> int:
        """Number of batches in the rest of the epoch, equal on all ranks."""
        _, size = self._data_rank()
        steps = self._schedule.rest(self._next_step())
        return sum(-(-plan.num_microbatches // size) for plan in steps)

    def share(self, number: int) -> Share:
        """The part of batch `number` (from 0) of the last iteration in its step.

        Raises:
            ValueError: the epoch has no such batch, or nothing was iterated.
        """
        check_int("number", number)
        index, size = self._data_rank()
        plan = self._first
        if plan is not None and number >= 0:
            # Only the last step of an epoch is short.
            steps, left = divmod(number, -(-self._schedule.num_microbatches // size))
            start = plan.start + steps * self._schedule.global_batch
            plan = self._schedule.next_step(plan.epoch, plan.number + steps, start)
            slots = plan.slots(index, size) if plan else []
            if plan and left < len(slots):
                slot = slots[left]
                if left >= self._yielded[plan.number].batches:
                    raise ValueError(
                        f"batch {number} was not yielded by the sampler yet: ask for its share "
                        "when the DataLoader has returned it"
                    )
                weight = 0.0 if slot.is_copy else plan.size(slot.k) * size / plan.samples
                is_last = left == len(slots) - 1
                return Share(weight, is_last, plan.number, slot.k, self._schedule.order.seed)
        raise ValueError(
            f"there is no batch {number} in this iteration: count the batches from 0 in each"
        )

    def _check_complete(self) -> None:
        """Check that the next step may be counted. No collectives.

        Raises:
            CheckpointError: not all of the step's batches were yielded by the sampler.
        """
        if self._first is None or self.epoch != self._first.epoch:
            raise CheckpointError(
                f"no batch of epoch {self.epoch} was yielded: iterate the DataLoader before "
                "commit, on every rank; a DataLoader that reads on one rank for all "
                "(dispatch_batches=True of Accelerate) is not supported"
            )
        plan = self._next_step()
        taken, needed = self._yielded[plan.number].batches, len(plan.slots(*self._data_rank()))
        if taken < needed:
            raise CheckpointError(
                f"step {plan.number} has {needed} batches on this rank, and {taken} were "
                "yielded by the sampler: call commit once for each optimizer step, and without a "
                "second sharding (BatchSamplerShard of accelerator.prepare)"
            )

    def commit(self) -> None:
        """Count the next step as completed: call it after each optimizer step. No collectives.

        Raises:
            CheckpointError: not all of the step's batches were yielded by the sampler.
        """
        self._check_complete()
        plan = self._next_step()
        self._advance(plan, self._yielded.pop(plan.number).seen)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was saved, on any number of ranks. No collectives.

        Raises:
            CheckpointError: a different dataset, seed, order, microbatch, global_batch or tail.
            CorruptCheckpoint: not a state that `state_dict` returns.
        """
        super().load_state_dict(state_dict)
        self._first = None


def _between_dataloader(caller: FrameType | None) -> str | None:
    """The wrapper between a DataLoader and its sampler; None if there is none.

    Such a wrapper may skip batches, which the sampler could not count. A DataLoader calls the
    sampler's `__iter__` itself; a loop of the user's own calls it without a DataLoader.

    Args:
        caller: the frame that called `__iter__` of the sampler.
    """
    frame = caller
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module == DATALOADER:
            break
        if module.startswith("torch.utils.data."):  # the dataset of that DataLoader calls
            return None
        frame = frame.f_back
    if caller is None or frame is None or frame is caller:
        return None
    owner = type(caller.f_locals.get("self"))
    name = caller.f_code.co_qualname if owner is type(None) else owner.__qualname__
    return f"{caller.f_globals.get('__name__')}.{name}"
