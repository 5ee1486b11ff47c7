"""`anyrank.ElasticLoader`: the same data and the same random numbers on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import nn

from anyrank.checks import check_bool, check_function, check_int
from anyrank.data.fetch import (
    FetchedBatch,
    MicrobatchDataset,
    MicrobatchRequest,
    RequestSampler,
    check_length,
    length_of,
    make_fetcher,
    request_for,
)
from anyrank.data.order import Order
from anyrank.data.position import OnBatchChange, Position, check_same_on_ranks
from anyrank.data.receipts import Receipt, receipt_of
from anyrank.data.schedule import Schedule, Tail
from anyrank.data.shards import ShardOrder, Shards, check_lengths, names_digest
from anyrank.data.weighted import weighted_order
from anyrank.data.workers import WorkerExit
from anyrank.errors import CheckpointError
from anyrank.steps.step import Step
from anyrank.steps.step_state import LoaderPass, StepProgress
from anyrank.world.ranks import open_ranks

if TYPE_CHECKING:
    from anyrank.exact.run import ExactRun


class ElasticLoader(Position):
    """A loader of steps whose data does not depend on the number of ranks.

    A step is a global batch, divided into K = global_batch / microbatch microbatches. The samples
    of a microbatch, and the random numbers of its samples and of the model, depend on (seed, step,
    microbatch) alone; the number of ranks only changes which rank runs it.

    Iterating returns the steps of the rest of the current epoch; the next iteration is the next
    epoch. A step counts once `commit` is called (`Checkpoints.step_done` does), or once the next
    step is requested. If the loop is left before that, the next iteration returns the same step
    again: call `commit` before a `break` that follows the optimizer's step.

    All data-parallel ranks iterate together.

    Attributes:
        epoch: the epoch of the next step, from 0.
        step: completed steps of the run.
        consumed: samples of completed steps in this epoch.
        samples: samples of completed steps in the run, without repeats that pad.
        dropped: samples left out at the ends of epochs by tail="drop".
        padded: samples repeated at the ends of epochs by tail="pad".
        notes: differences from the run that was loaded, as sentences.
        receipts: finished epochs: (epoch, samples, "exactly once").

    Args:
        dataset: with a length and `dataset[i]`; its random numbers are seeded for each sample. Its
            `__getitems__` is used if it has that method, and draws no random numbers there.
        global_batch: samples of a step, on all ranks together.
        microbatch: samples of one forward pass.
        seed: of the order and of all random numbers.
        shuffle: False for the dataset's own order.
        num_workers: processes that fetch ahead, for each rank; 0 fetches in this process.
        collate_fn: list of samples -> batch; default: torch's. Its random numbers are seeded too.
        tail: the samples that do not fill an epoch's last step make a "short" step, are "drop"ped,
            or the step is "pad"ded with the first samples of the epoch.
        key: name or version of the dataset; a resume with a different key is refused.
        process_group: the data-parallel ranks; default: all, or this process alone. With tensor
            parallelism, ranks with the same data are in different groups.
        pin_memory: as in a DataLoader.
        prefetch_factor: as in a DataLoader.
        persistent_workers: as in a DataLoader.
        weights: of the samples, n numbers: an epoch is then n draws with replacement, the same on
            any number of ranks. A sample that is drawn again gets different random numbers.
        on_batch_change: when `load_state_dict` finds a different global_batch: "error", or
            "rescale" to continue with an entry in `notes`.
        exact: sum gradients in an order that does not depend on the number of ranks, so that
            weights and optimizer state have the same bits on any; see docs/exact.md.

    Raises:
        ValueError: sizes that do not match each other or the number of ranks; an empty dataset.
        TypeError: a dataset without length; sizes that are not ints; an argument of another type.

    Example::

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = anyrank.ElasticLoader(torch.randn(32, 4), global_batch=16, microbatch=4)
        for step in loader:  # one epoch
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert (loader.epoch, loader.step, loader.samples) == (1, 2, 32)
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
        exact: bool = False,
    ) -> None:
        n = length_of(dataset)
        check_bool(shuffle=shuffle, pin_memory=pin_memory, persistent_workers=persistent_workers)
        if prefetch_factor is not None:
            check_int("prefetch_factor", prefetch_factor, 1)
        if weights is not None and not shuffle:
            raise ValueError("weights draw samples at random: remove shuffle=False")
        order = Order(n, seed, shuffle) if weights is None else weighted_order(n, seed, weights)
        schedule = Schedule(order, global_batch, microbatch, tail)
        super().__init__(schedule, key, process_group, on_batch_change)
        self._fetch_from(
            MicrobatchDataset(dataset, seed, collate_fn),
            exact,
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
        exact: bool = False,
    ) -> ElasticLoader:
        """A loader over shards of known lengths that are read in sequence.

        Steps, random numbers, counts and state are those of any `ElasticLoader`. The samples of a
        step come from K = global_batch / microbatch places in the data; the order of the shards
        changes with the epoch, and samples keep the order of their shard. Choose `num_workers` as a
        divisor of a rank's number of microbatches: each place is then read by one worker only.

        Args:
            shards: arguments of `read`; names or numbers, the same throughout the run.
            read: shard -> its samples, in the same order each time. Its random numbers are seeded
                for each sample.
            lengths: number of samples of each shard.
            global_batch: as in `ElasticLoader`, like all arguments that follow.
            microbatch: samples of one forward pass.
            seed: of the order and of all random numbers.
            shuffle: False for the shards' own order.
            num_workers: processes that fetch ahead, for each rank; 0 fetches in this process.
            collate_fn: list of samples -> batch; default: torch's.
            tail: "short", "drop" or "pad", for the samples that do not fill an epoch's last step.
            key: name or version of the data; a resume with a different key is refused.
            process_group: the data-parallel ranks; default: all, or this process alone.
            exact: sum gradients in an order that does not depend on the number of ranks.

        Raises:
            ValueError: sizes that do not match each other, the shards or the number of ranks.
            TypeError: sizes that are not ints; an argument of another type.

        Example::

            loader = anyrank.ElasticLoader.from_shards(
                ["a", "b", "c"],
                read=lambda name: (torch.full((2,), float(ord(name))) for _ in range(8)),
                lengths=[8, 8, 8],
                global_batch=12,
                microbatch=4,
            )
            assert len(loader) == 2
        """
        loader = cls.__new__(cls)
        sizes = check_lengths(shards, lengths)
        check_function("read", read)
        order = ShardOrder(
            sum(sizes), seed, shuffle, sizes, names_digest(shards), global_batch, microbatch
        )
        schedule = Schedule(order, global_batch, microbatch, tail)
        dataset = Shards(shards, read, sizes, max_open=schedule.num_microbatches)
        Position.__init__(loader, schedule, key, process_group, None)
        samples = MicrobatchDataset(dataset, seed, collate_fn)
        loader._fetch_from(samples, exact, num_workers=num_workers)
        return loader

    def _fetch_from(self, dataset: MicrobatchDataset, exact: bool, **options: Any) -> None:
        """Set up the fetching of batches; `options` are those of a DataLoader."""
        check_bool(exact=exact)
        check_int("num_workers", options["num_workers"], 0)
        self._exact = _open_exact() if exact else None
        self._current: StepProgress | None = None
        self._was_left = False  # whether a step was begun that is not counted
        self._num_passes = 0
        self._checked_models: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
        self._dataset = dataset
        self._fetcher = make_fetcher(dataset, RequestSampler(self._requests), **options)
        self._workers = WorkerExit()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ElasticLoader is neither copied nor pickled: make one where it is used, and take "
            "the position over with load_state_dict(other.state_dict())"
        )

    def __len__(self) -> int:
        """Steps of a whole epoch, on any number of ranks, at any position of the run."""
        return self._schedule.steps_in_epoch

    def __iter__(self) -> Generator[Step, None, None]:
        """The steps of the rest of this epoch. All data-parallel ranks.

        Raises:
            CheckpointError: the loader's arguments or position differ between ranks, or the dataset
                has got another length, before a batch is fetched; a step was not completed; at the
                epoch's end, a sample was repeated or lost on some rank.
        """
        index, size = self._data_rank()
        epoch = self.epoch
        self._current = None
        self._num_passes += 1
        number = self._num_passes
        with ExitStack() as stack:
            ranks = stack.enter_context(open_ranks(self._process_group, "the loop over the loader"))
            check_same_on_ranks(self, ranks)
            check_length(self._dataset.dataset, self._schedule.order.n)
            if self._exact is not None:
                stack.enter_context(self._exact.watching(self.notes))
            this_pass = LoaderPass(
                ranks=ranks,
                group=self._process_group,
                index=index,
                size=size,
                batches=chain.from_iterable(self._start_fetching()),
                dataset=self._dataset,
                checked=self._checked_models,
                exact=self._exact,
                notes=self.notes,
            )
            try:
                while self.epoch == epoch:
                    self._current = StepProgress(self._next_step(), self._was_left)
                    self._was_left = True
                    yield Step(self._current, self._schedule, this_pass)
                    if self._num_passes != number:
                        raise CheckpointError(
                            "the loader was iterated again, or loaded a state, within this loop: "
                            "leave the loop, and start a new one"
                        )
                    self.commit()
                self._check_receipt(ranks)
            finally:
                this_pass.close()
                # A complete step stays current, so that in_step is true until it is committed.
                if self._num_passes == number and not (self._current and self._current.is_complete):
                    self._current = None

    def _arguments(self) -> dict[str, object]:
        return super()._arguments() | {
            "exact": self._exact is not None,
            "len(dataset)": len(self._dataset.dataset),
        }

    @property
    def in_step(self) -> bool:
        """Whether microbatches were run that are not committed: a save is refused then."""
        return self._current is not None and self._current.is_started

    def _check_complete(self) -> None:
        """Check that the current step may be counted.

        Raises:
            CheckpointError: not all of its microbatches were run.
        """
        if self._current is not None and not self._current.is_complete:
            raise CheckpointError(
                f"step {self._current.plan.number} is not complete: run `for batch in "
                "step.microbatches(model)` to its end in each step, or leave the loop over the "
                "loader: the next iteration returns the same step again"
            )

    def commit(self) -> None:
        """Count the current step as completed. Does nothing if it is counted already.

        Raises:
            CheckpointError: not all of its microbatches were run.

        Example::

            loader = anyrank.ElasticLoader(torch.randn(8, 4), global_batch=4, microbatch=2)
            for step in loader:
                list(step.microbatches(torch.nn.Linear(4, 1)))
                loader.commit()  # else the next step does
        """
        self._check_complete()
        if self._current is None:
            return
        plan, seen = self._current.plan, self._current.seen
        drawn = torch.tensor(seen, dtype=torch.int64, device="cpu")
        self._advance(plan, receipt_of(plan.epoch, drawn))
        self._current, self._was_left = None, False

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was saved, on any number of ranks. No collectives.

        Raises:
            CheckpointError: a different dataset, seed, order, microbatch or tail; a different
                global_batch without on_batch_change="rescale". Nothing has changed then.
            CorruptCheckpoint: not a state that `state_dict` returns.
        """
        super().load_state_dict(state_dict)
        saved = state_dict.get("exact")
        if self._exact is not None:
            self.notes += self._exact.load(saved, self.step)
            self._checked_models.clear()
        elif saved is not None:
            self.notes.append(
                f"exact=True ends at step {self.step}: from here on, bits depend on the ranks"
            )
        self._current = None
        self._num_passes += 1

    def state_dict(self) -> dict[str, Any]:
        """About 400 bytes of JSON values, equal on all ranks. No collectives."""
        exact = {} if self._exact is None else {"exact": dict(self._exact.record)}
        return super().state_dict() | exact

    def _check_state_dict(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[dict[str, int], Receipt, str | None]:
        found = super()._check_state_dict(state_dict)
        if self._exact is not None:
            self._exact.check_saved(state_dict.get("exact"))
        return found

    def _start_fetching(self) -> Iterator[Iterator[FetchedBatch]]:
        """The batches of `_requests`, from the first one asked for: the model decides on those."""
        yield self._workers.watch(lambda: iter(self._fetcher))

    def _requests(self) -> Iterator[MicrobatchRequest]:
        """This rank's microbatches for the rest of the epoch."""
        index, size = self._data_rank()
        is_interleaved = self._exact is not None and bool(self._exact.is_interleaved)
        for plan in self._schedule.rest(self._next_step()):
            for slot in plan.slots(index, size, is_interleaved):
                yield request_for(self._schedule, plan, slot.k)


def _open_exact() -> ExactRun:
    """The door to `anyrank.exact`, which no other run loads."""
    from anyrank.exact.run import ExactRun

    return ExactRun()


def abandon_step(loader: ElasticLoader) -> None:
    """Forget the current step, whose optimizer has not stepped: it will be repeated."""
    loader._current = None  # pyright: ignore[reportPrivateUsage]


def is_exact(loader: ElasticLoader) -> bool:
    """Whether its gradients are summed in an order that does not depend on the ranks."""
    return loader._exact is not None  # pyright: ignore[reportPrivateUsage]
