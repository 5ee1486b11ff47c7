"""`anyrank.ElasticSampler`: the order and counts of `ElasticLoader` for any DataLoader."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from anyrank.checks import check_int, check_model
from anyrank.data.fetch import length_of
from anyrank.data.order import Order
from anyrank.data.position import ElasticData, Position
from anyrank.data.schedule import MicrobatchSlot, Schedule, StepPlan, Tail
from anyrank.errors import CheckpointError
from anyrank.random_state.streams import accelerators_of, own_accelerator, seeded
from anyrank.tensors.hashing import derive


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


class SamplerPosition(Position):
    """Where a run is in the data of an `ElasticSampler`, which yields batches ahead of their steps.

    Attributes:
        first: the step that the last iteration began with.
        yielded: how many batches of each step it has yielded, by the step's number, and the
            ids of their samples, copies apart.
    """

    owner = "ElasticSampler"

    def __init__(self, schedule: Schedule, group: Any) -> None:
        super().__init__(schedule, None, group, None)
        self.first: StepPlan | None = None
        self.yielded: dict[int, tuple[int, list[int]]] = {}

    def slots(self, plan: StepPlan) -> list[MicrobatchSlot]:
        """The microbatches of a step that this rank runs."""
        return plan.slots(*self.data_rank())

    def batches(self) -> Iterator[list[int]]:
        """The sample ids of this rank's batches in the rest of the epoch, as it is now."""
        self.first = self.next_step()
        self.yielded = {}
        return self._batches(self.first, self.yielded)

    def _batches(
        self, first: StepPlan, yielded: dict[int, tuple[int, list[int]]]
    ) -> Iterator[list[int]]:
        for plan in self.schedule.rest(first):
            for slot in self.slots(plan):
                num_batches, seen = yielded.get(plan.number, (0, []))
                ids = self.schedule.ids(plan, slot.k)
                yielded[plan.number] = num_batches + 1, seen if slot.is_copy else [*seen, *ids]
                yield ids

    def num_yielded(self, plan: StepPlan) -> int:
        """How many batches of a step were yielded."""
        return self.yielded.get(plan.number, (0, []))[0]

    def check_complete(self) -> None:
        if self.first is None or self.epoch != self.first.epoch:
            raise CheckpointError(
                f"no batch of epoch {self.epoch} was yielded: iterate the DataLoader before "
                "commit, on every rank; a DataLoader that reads on one rank for all "
                "(dispatch_batches=True of Accelerate) is not supported"
            )
        plan = self.next_step()
        num_batches, needed = self.num_yielded(plan), len(self.slots(plan))
        if num_batches < needed:
            raise CheckpointError(
                f"step {plan.number} has {needed} batches on this rank, and {num_batches} were "
                "yielded by the sampler: call commit once for each optimizer step, and without a "
                "second sharding (BatchSamplerShard of accelerator.prepare)"
            )

    def commit(self) -> None:
        self.check_complete()
        plan = self.next_step()
        self.advance(plan, self.yielded.pop(plan.number)[1])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.first = None


class ElasticSampler(ElasticData):
    """A batch sampler that yields this rank's microbatches of the rest of the epoch.

    For `DataLoader(dataset, batch_sampler=sampler)`. Order, steps and counts are those of
    `ElasticLoader`, on any number of ranks; random numbers, weights and gradient exchange are left
    to the caller. All ranks get the same number of batches in each step: a rank with fewer gets its
    last batch again, with weight 0.

    A step counts when `commit` is called, after the optimizer's step; batches that a DataLoader
    fetches ahead do not count. Iterating again yields the uncommitted steps again. The batches are
    already those of this rank: Accelerate's `prepare` of the DataLoader would divide them among the
    ranks again, and is refused. Other wrappers that select batches, and batches that are dropped
    after the DataLoader (`itertools.islice`), are not noticed: train each before committing its
    step.

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
        self._position = SamplerPosition(schedule, process_group)

    @property
    def position(self) -> SamplerPosition:
        """Its place in the data, and the verification of it. For anyrank's own use: may change."""
        return self._position

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of sample ids, for the rest of the epoch as it is now."""
        return self.position.batches()

    def __len__(self) -> int:
        """Number of batches in the rest of the epoch, equal on all ranks."""
        steps = self.position.schedule.rest(self.position.next_step())
        return sum(len(self.position.slots(plan)) for plan in steps)

    def __getattr__(self, name: str) -> NoReturn:
        # What Accelerate asks a batch sampler for before it gives each process some of its batches.
        if name == "batch_size" and "accelerate" in sys.modules:
            raise CheckpointError(
                "accelerator.prepare() would share an ElasticSampler's batches out among the "
                "processes again (BatchSamplerShard), and the batches are already those of this "
                "rank, so samples would be lost: do not pass the DataLoader to prepare(), and move "
                "the batches to the device yourself"
            )
        raise AttributeError(f"ElasticSampler has no attribute {name!r}", name=name, obj=self)

    def share(self, number: int) -> Share:
        """The part of batch `number` (from 0) of the last iteration in its step.

        Raises:
            ValueError: the epoch has no such batch, or nothing was iterated.
        """
        check_int("number", number)
        position = self.position
        schedule, plan = position.schedule, position.first
        _, size = position.data_rank()
        if plan is not None and number >= 0:
            # Only the last step of an epoch is short.
            steps, left = divmod(number, -(-schedule.num_microbatches // size))
            start = plan.start + steps * schedule.global_batch
            plan = schedule.next_step(plan.epoch, plan.number + steps, start)
            slots = position.slots(plan) if plan else []
            if plan and left < len(slots):
                slot = slots[left]
                if left >= position.num_yielded(plan):
                    raise ValueError(
                        f"batch {number} was not yielded by the sampler yet: ask for its share "
                        "when the DataLoader has returned it"
                    )
                weight = 0.0 if slot.is_copy else plan.size(slot.k) * size / plan.samples
                is_last = left == len(slots) - 1
                return Share(weight, is_last, plan.number, slot.k, schedule.order.seed)
        raise ValueError(
            f"there is no batch {number} in this iteration: count the batches from 0 in each"
        )
