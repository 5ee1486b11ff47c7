"""`anyrank.ElasticLoader`: the same data and the same random numbers on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.utils.data import IterableDataset

from anyrank.data.fetch import Request, Requests, Samples, make_fetcher, request_for
from anyrank.data.order import Order
from anyrank.data.position import OnBatchChange, Position
from anyrank.data.schedule import Schedule, Tail
from anyrank.data.shards import plan_shards
from anyrank.data.step import Pass, Step
from anyrank.data.weighted import weighted_order
from anyrank.data.workers import WorkerExit
from anyrank.errors import CheckpointError
from anyrank.world.ranks import open_ranks


class ElasticLoader(Position):
    """A loader of steps, whose data does not depend on how many ranks share it.

    A step is a global batch, cut into K = global_batch / microbatch microbatches. Which samples a
    microbatch has, and the random numbers that its samples and the model draw, depend on (seed,
    step, microbatch) alone; which rank runs it is all that another number of ranks changes.

    Iterating gives the steps of the rest of the current epoch; the next iteration is the next
    epoch. A step counts once `commit` is called (`Checkpoints.step_done` does), or the next one is
    asked for. Leaving the loop before that gives the same step again: call `commit` before a
    `break` behind the optimizer's step.

    All data-parallel ranks iterate together.

    Attributes:
        epoch: the epoch of the next step, from 0.
        step: completed steps of the run.
        consumed: samples of completed steps in this epoch.
        samples: samples of completed steps in the run, without repeats that pad.
        dropped: samples left over at the ends of epochs by tail="drop".
        padded: samples repeated at the ends of epochs by tail="pad".
        notes: what differs from the run that was loaded, in sentences.
        receipts: finished epochs: (epoch, samples, "exactly once").

    Args:
        dataset: with a length and `dataset[i]`; random numbers that it draws are seeded by sample.
            Its `__getitems__`, where it has that, is used as long as it draws none.
        global_batch: samples of a step, on all ranks together.
        microbatch: samples that go through the model at once.
        seed: of the order and of all random numbers.
        shuffle: False for the dataset's own order.
        num_workers: processes that fetch ahead, for each rank; 0 for this process.
        collate_fn: list of samples -> batch; default: torch's. Its random numbers are seeded too.
        tail: the samples that do not fill an epoch's last step make a "short" step, are "drop"ped,
            or the step is "pad"ded with the epoch's first ones.
        key: name or version of the dataset; a run that resumes with another one is refused.
        process_group: the data-parallel ranks; default: all, or this process alone. Ranks that
            share their data (tensor parallel) each have a group of their own.
        pin_memory: as of a DataLoader.
        prefetch_factor: as of a DataLoader.
        persistent_workers: as of a DataLoader.
        weights: of the samples, n numbers: an epoch is then n draws with replacement, the same on
            any number of ranks. A sample that comes again has other random numbers.
        on_batch_change: what `load_state_dict` does about another global_batch: "error", or
            "rescale" to go on and say so in `notes`.

    Raises:
        ValueError: sizes that do not fit each other or the number of ranks; an empty dataset.
        TypeError: a dataset without length; sizes that are no int.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        microbatch: int,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        tail: Tail = "short",
        key: str | None = None,
        process_group: Any = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        weights: Sequence[float] | torch.Tensor | None = None,
        on_batch_change: OnBatchChange = "error",
    ) -> None:
        n = length_of(dataset)
        if weights is not None and not shuffle:
            raise ValueError("weights draw samples at random: leave shuffle=False away")
        order = Order(n, seed, shuffle) if weights is None else weighted_order(n, seed, weights)
        self._start(
            order,
            dataset,
            collate_fn,
            global_batch=global_batch,
            microbatch=microbatch,
            tail=tail,
            key=key,
            process_group=process_group,
            on_batch_change=on_batch_change,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )

    @classmethod
    def from_shards(
        cls,
        shards: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        *,
        lengths: Sequence[int],
        global_batch: int,
        microbatch: int,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        tail: Tail = "short",
        key: str | None = None,
        process_group: Any = None,
    ) -> ElasticLoader:
        """A loader over shards that are read in sequence, of known lengths.

        Steps, random numbers, accounts and state are those of any `ElasticLoader`. Samples of a
        step come from K = global_batch / microbatch places of the data; shards are in another order
        in each epoch, and samples stay in the order of their shard. With workers, choose a number
        that divides the microbatches of a rank: each lane is then read by one worker only.

        Args:
            shards: what `read` takes; names or numbers, the same over the run.
            read: shard -> its samples, in the same order each time. What it draws is seeded by
                sample.
            lengths: how many samples each shard has.
            global_batch: as of `ElasticLoader`, like all that follow.
            microbatch: samples that go through the model at once.
            seed: of the order and of all random numbers.
            shuffle: False for the shards' own order.
            num_workers: processes that fetch ahead, for each rank; 0 for this process.
            collate_fn: list of samples -> batch; default: torch's.
            tail: what becomes of the samples that do not fill an epoch's last step.
            key: name or version of the data; a run that resumes with another one is refused.
            process_group: the data-parallel ranks; default: all, or this process alone.

        Raises:
            ValueError: sizes that do not fit each other, the shards or the number of ranks.
            TypeError: sizes that are no int.
        """
        order, dataset = plan_shards(
            shards,
            read,
            lengths,
            global_batch=global_batch,
            microbatch=microbatch,
            seed=seed,
            shuffle=shuffle,
        )
        loader = cls.__new__(cls)
        loader._start(
            order,
            dataset,
            collate_fn,
            global_batch=global_batch,
            microbatch=microbatch,
            tail=tail,
            key=key,
            process_group=process_group,
            on_batch_change=None,
            num_workers=num_workers,
        )
        return loader

    def _start(
        self,
        order: Order,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        global_batch: int,
        microbatch: int,
        tail: Tail,
        key: str | None,
        process_group: Any,
        on_batch_change: OnBatchChange | None,
        **options: Any,
    ) -> None:
        """What all loaders set up; `options` are those of a DataLoader."""
        schedule = Schedule(order, global_batch, microbatch, tail)
        super().__init__(schedule, key=key, group=process_group, on_batch_change=on_batch_change)
        self.current: Step | None = None
        self.num_passes = 0
        self.checked: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
        self.source = Samples(dataset, order.seed, collate_fn)
        self.fetcher = make_fetcher(self.source, Requests(self.requests), **options)
        self.workers = WorkerExit()

    def __len__(self) -> int:
        """Steps of a whole epoch, on any number of ranks, wherever the run is in it."""
        return self.schedule.steps_in_epoch

    def __iter__(self) -> Generator[Step, None, None]:
        """The steps of the rest of this epoch. All data-parallel ranks.

        Raises:
            CheckpointError: a step was left unfinished; at the epoch's end, a sample was repeated
                or lost on some rank.
        """
        index, size = self.place()
        epoch = self.epoch
        self.current = None
        self.num_passes += 1
        number = self.num_passes
        with open_ranks(self.process_group) as ranks:
            answers = self.workers.watch(lambda: iter(self.fetcher))
            within = Pass(
                ranks, self.process_group, index, size, answers, self.source, self.checked
            )
            try:
                while self.epoch == epoch:
                    step = self.current = Step(self.next_step(), self.schedule, within)
                    yield step
                    if self.num_passes != number:
                        raise CheckpointError(
                            "the loader was iterated anew or loaded a state within this loop: "
                            "leave the loop, and start another"
                        )
                    self.commit()
                self.check_receipt(ranks)
            finally:
                within.close()
                # One that is complete is as good as taken: in_step tells so, until it is committed.
                if self.num_passes == number and not (self.current and self.current.is_complete):
                    self.current = None

    @property
    def in_step(self) -> bool:
        """Whether microbatches have been taken that are not committed. No time to save."""
        return self.current is not None and self.current.is_started

    def check_complete(self) -> None:
        """Whether the current step may be counted.

        Raises:
            CheckpointError: its microbatches were not all taken.
        """
        if self.current is not None and not self.current.is_complete:
            raise CheckpointError(
                f"step {self.current.number} is not complete: run `for batch in "
                "step.microbatches(model)` to its end in each step, or leave the loop over the "
                "loader too, which gives the same step again"
            )

    def commit(self) -> None:
        """Count the current step as done. Nothing to do where it is counted already.

        Raises:
            CheckpointError: its microbatches were not all taken.
        """
        self.check_complete()
        if self.current is None:
            return
        self.advance(self.current.plan, self.current.seen)
        self.current = None

    def abandon_step(self) -> None:
        """Give up the current step, whose optimizer has not stepped: it comes again."""
        self.current = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was saved, on any number of ranks. No collectives.

        Raises:
            CheckpointError: another dataset, seed, order, microbatch or tail; another global_batch
                without on_batch_change="rescale". Nothing has changed then.
            CorruptCheckpoint: not a state that `state_dict` returns.
        """
        super().load_state_dict(state_dict)
        self.current = None
        self.num_passes += 1

    def requests(self) -> Iterator[Request]:
        """What this rank will run in the rest of the epoch, as planned now."""
        index, size = self.place()
        for plan in self.schedule.rest(self.next_step()):
            for turn in plan.turns(index, size):
                yield request_for(self.schedule, plan, turn.k)


def length_of(dataset: Any) -> int:
    """The number of samples; TypeError for a dataset that cannot be asked for sample i."""
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise TypeError(
            f"{type(dataset).__name__} has no length or no dataset[i], so no order can be "
            "planned: give a dataset with both, or its shards and their lengths to "
            "ElasticLoader.from_shards"
        )
    return len(dataset)
