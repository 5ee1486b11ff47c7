"""`anyrank.ElasticLoader`: the same data and the same random numbers on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch

from anyrank.checks import check_bool, check_int
from anyrank.errors import CheckpointError
from anyrank.training.data.batches import FetchedBatch
from anyrank.training.data.bucket_order import bucket_order
from anyrank.training.data.fetch import (
    MicrobatchDataset,
    OwnOrder,
    RequestSampler,
    length_of,
    make_fetcher,
    start_fetching,
)
from anyrank.training.data.order import Order
from anyrank.training.data.receipts import EpochVerdict
from anyrank.training.data.schedule import Schedule, Tail
from anyrank.training.data.weighted_order import weighted_order
from anyrank.training.data.worker_exit import WorkerExit
from anyrank.training.steps.position import OnBatchChange, Position
from anyrank.training.steps.step import Step
from anyrank.world.ranks import open_ranks

if TYPE_CHECKING:
    from anyrank.training.data.worker_exit import WorkerExit
    from anyrank.training.exact.run import ExactRun


class ElasticLoader:
    """A loader of steps whose data does not depend on the number of ranks.

    A step is a global batch, divided into K = global_batch / microbatch microbatches. The samples
    of a microbatch, and the random numbers of its samples and of the model, depend only on (seed,
    step, microbatch); the number of ranks only changes which rank runs it.

    Iterating yields the steps of the rest of the current epoch; the next iteration is the next
    epoch. A step counts once `commit` is called (`Checkpoints.step_done` does), or once the next
    step is requested. If the loop is left earlier, the next iteration yields the same step again:
    call `commit` before a `break` that follows the optimizer's step.

    All data-parallel ranks iterate together.

    Args:
        dataset: a dataset with a length and `dataset[i]`; its random numbers are seeded for each
            microbatch. Its `__getitems__` is used if it has that method.
        global_batch: samples of a step, on every rank together.
        microbatch: samples of one forward pass.
        seed: seed of the order and of all random numbers.
        shuffle: False for the dataset's own order.
        num_workers: processes that fetch ahead, for each rank; 0 fetches in this process.
        collate_fn: list of samples -> batch; default: torch's. Its random numbers are seeded too.
        tail: what to do with samples that do not fill the last step of an epoch: "short" (a
            smaller step) or "drop".
        key: name or version of the dataset; a resume with a different key is an error.
        process_group: the data-parallel ranks; default: all, or only this process. With tensor
            parallelism, ranks with the same data are in different groups.
        pin_memory: see torch's DataLoader.
        prefetch_factor: see torch's DataLoader.
        persistent_workers: see torch's DataLoader.
        weights: n numbers, one per sample: an epoch is then n draws with replacement, the same on
            any number of ranks. A sample that is drawn again gets different random numbers.
        transform: as for `from_shards`. The dataset is read as a stream, so its length is unknown
            unless `keys` is passed.
        keys: n values, the bucket of each sample, for a `Buckets` transform, so that the epoch is
            planned without loading samples.
        on_batch_change: when `load_state_dict` finds a different global_batch: "error", or
            "rescale" to continue with an entry in `notes`.
        exact: sum gradients in an order that does not depend on the number of ranks, so that
            weights and optimizer state have the same bits on any; see docs/exact.md.

    Raises:
        ValueError: sizes that do not match each other or the number of ranks; an empty dataset.
        TypeError: a dataset without length; sizes that are not ints; an argument of a wrong type.

    Example::

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = anyrank.ElasticLoader(torch.randn(32, 4), global_batch=16, microbatch=4)
        for step in loader:  # one epoch
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            loader.commit()  # otherwise the next step does
        assert (loader.epoch, loader.step, loader.samples) == (1, 2, 32)
        assert (loader.consumed, loader.dropped) == (0, 0)  # of the new epoch; with tail="drop"
        print(loader.receipts, loader.notes)
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
        transform: Any = None,
        keys: Sequence[Any] | torch.Tensor | None = None,
        on_batch_change: OnBatchChange = "error",
        exact: bool = False,
    ) -> None:
        if keys is None and transform is not None and not isinstance(dataset, OwnOrder):
            from anyrank.training.streams.entry import open_map_style

            dataset = open_map_style(dataset, transform, weights, tail, on_batch_change)
            on_batch_change = "error"
        n = len(dataset) if isinstance(dataset, OwnOrder) else length_of(dataset)
        check_bool(
            shuffle=shuffle,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            exact=exact,
        )
        check_int("global_batch", global_batch, 1)
        check_int("microbatch", microbatch, 1)
        check_int("num_workers", num_workers, 0)
        if prefetch_factor is not None:
            check_int("prefetch_factor", prefetch_factor, 1)
        if weights is not None and not shuffle:
            raise ValueError("weights= draw samples at random. Remove shuffle=False.")
        may_change: OnBatchChange | None = on_batch_change
        position_class: type[Position] = Position
        if isinstance(dataset, OwnOrder):
            if weights is not None:
                raise ValueError("weights= need samples by index, and shards are read in sequence.")
            order = dataset.order(seed, shuffle, global_batch, microbatch)
            may_change = None  # the lanes of an epoch depend on its global batch
            position_class = dataset.position_class or Position
        elif keys is not None:
            order = _bucket_order(n, seed, shuffle, microbatch, keys, transform, weights)
        elif weights is not None:
            order = weighted_order(n, seed, weights)
        else:
            order = Order(n, seed, shuffle)
        schedule = Schedule(order, global_batch, microbatch, tail)
        if isinstance(dataset, OwnOrder):
            dataset.max_open = schedule.num_microbatches
            samples = dataset.by_microbatch(seed, collate_fn)
        else:
            samples = MicrobatchDataset(dataset, seed, collate_fn)
        run = _exact_run() if exact else None
        self._position = position_class(
            schedule, key, process_group, may_change, samples, num_workers, run
        )
        self._fetcher = make_fetcher(
            samples,
            RequestSampler(self._position.requests),
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self._workers = WorkerExit() if num_workers else None

    @classmethod
    def from_shards(
        cls,
        shards: Sequence[Any],
        read: Callable[..., Iterable[Any]],
        *,
        lengths: Sequence[int] | None = None,
        transform: Any = None,
        window: int | None = None,
        endless: bool = False,
        **options: Any,
    ) -> ElasticLoader:
        """Make a loader over shards whose rows are read in sequence: files, row groups, archives.

        The shards of an epoch are distributed over up to K = global_batch / microbatch lanes, and
        each lane reads its shards sequentially; their order changes with the epoch. Each microbatch
        of a step is read from one lane; when that ends, from another one. Which rank runs a
        microbatch does not affect its rows.

        Without `lengths`, rows are counted as they are read. With `lengths` the order is planned,
        and `len(loader)` is known; see `anyrank.row_counts`.

        Args:
            shards: arguments of `read`; names or numbers, the same throughout the run. A resume
                with different ones is an error that names them; appended ones are used from the
                next epoch on.
            read: shard -> its rows, the same in the same order each time. If it accepts `start=`,
                a resume starts at that row, counted from 0; otherwise earlier rows are read again.
                Its random numbers depend on (seed, epoch, shard, row).
            lengths: number of rows of each shard, if they are known.
            transform: makes samples from rows: `anyrank.Pack`, `anyrank.Buckets`, or your own
                object with `feed(row)` and `end()`, which return lists of samples. Each lane has
                its own copy.
            window: size of the shuffle buffer, in rows of a shard; they are in memory, and a resume
                reads them again. Default: rows stay in the order of their shard.
            endless: no epochs and no receipts: microbatches take a block of each shard in turn, and
                a shard that ends restarts. A step is always full.
            options: other options of `ElasticLoader`, except weights and on_batch_change;
                shuffle=False keeps the order of the shards.

        Raises:
            ValueError: sizes that do not match each other, the shards or the number of ranks;
                transform or window with lengths.
            TypeError: sizes that are not ints; an argument of a wrong type.

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
        from anyrank.training.streams.entry import open_shards

        dataset = open_shards(shards, read, lengths, transform, window, endless, options)
        return cls(dataset, **options)

    @classmethod
    def from_iterable(
        cls,
        dataset: Any,
        *,
        transform: Any = None,
        window: int | None = None,
        endless: bool = False,
        mix: Mapping[str, float] | None = None,
        until: Literal["first", "all"] = "first",
        **options: Any,
    ) -> ElasticLoader:
        """Make a loader over a dataset that is divided into shards, like `from_shards` over them.

        Args:
            dataset: Hugging Face's `IterableDataset`, with `map` and `filter`, and without its own
                shuffle; or a class with `num_shards` and `shard(num_shards=, index=)`, which
                returns rows, the same each time. For a mixture a dict of such datasets.
            transform: as for `from_shards`.
            window: as for `from_shards`.
            endless: as for `from_shards`.
            mix: for a mixture, the weight of each dataset. The dataset of each microbatch is drawn
                from (seed, step, microbatch). A resume may change the weights from then on.
            until: when an epoch of a mixture ends: with the "first" exhausted dataset, or when
                "all" are exhausted (shorter ones restart).
            options: as for `from_shards`.

        Raises:
            TypeError: a dataset without shards.
            ValueError: its rows or shards are not the same each time; other errors of
                `from_shards`.

        Example::

            class Numbers:
                num_shards = 3

                def shard(self, *, num_shards, index):
                    return (torch.tensor([float(n)]) for n in range(index, 30, num_shards))

            loader = anyrank.ElasticLoader.from_iterable(Numbers(), global_batch=6, microbatch=2)
            model = torch.nn.Linear(1, 1)
            for step in loader:
                for batch in step.microbatches(model):
                    step.backward(model(batch).mean())
            text = "each row read was used once: 30 rows in 3 shards"
            assert loader.receipts[0].verdict == text
        """
        from anyrank.training.streams.entry import open_iterable

        return cls(
            open_iterable(dataset, transform, window, endless, mix, until, options), **options
        )

    @property
    def position(self) -> Position:
        """Internal; may change without notice."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self.position.epoch

    @property
    def step(self) -> int:
        """Completed steps of the run."""
        return self.position.step

    @property
    def consumed(self) -> int:
        """Samples of completed steps in this epoch."""
        return self.position.consumed

    @property
    def samples(self) -> int:
        """Samples of completed steps in the run."""
        return self.position.samples

    @property
    def dropped(self) -> int:
        """Samples dropped at the ends of epochs by tail="drop"."""
        return self.position.dropped

    @property
    def notes(self) -> list[str]:
        """Differences from the saved run, as sentences."""
        return self.position.notes

    @property
    def receipts(self) -> list[EpochVerdict]:
        """Finished epochs of the run, in order; a state keeps only the newest ten."""
        return self.position.receipts

    def state_dict(self) -> dict[str, Any]:
        """Return the position as about 400 bytes of JSON, plus 100 per lane of a stream. The same
        on every rank.
        """
        return self.position.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a saved position, on any number of ranks. Does not communicate.

        Raises:
            CheckpointError: a different dataset, seed, order, microbatch or tail; a different
                global_batch without on_batch_change="rescale"; with exact=True, a different number
                of threads. In that case nothing has changed.
            CorruptCheckpoint: not a state that `state_dict` returns.
        """
        self.position.load_state_dict(state_dict)

    def commit(self) -> None:
        """Count the current step as completed, after the optimizer's step. Does not communicate.

        Does nothing if it is already counted.

        Raises:
            CheckpointError: not all of its microbatches have run.
        """
        self.position.commit()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ElasticLoader cannot be copied or pickled. Create one in each process, and "
            "transfer the position with load_state_dict(other.state_dict())."
        )

    def __len__(self) -> int:
        """Return the steps of a whole epoch, for any number of ranks and any position of the run.

        Raises:
            TypeError: rows are counted as they are read.
        """
        return self.position.steps_in_epoch

    def __iter__(self) -> Generator[Step, None, None]:
        """Iterate over the steps of the rest of this epoch. Collective: every data-parallel rank
        must call it.

        Raises:
            CheckpointError: the loader's arguments or position differ between ranks, or the
                dataset's length has changed, before a batch is fetched; a step was not completed;
                at the epoch's end, a sample was repeated or lost on some rank.
        """
        position, exact = self.position, self.position.exact
        position.data_rank()
        position.abandon_step()
        position.num_iterations += 1
        epoch, number = position.epoch, position.num_iterations
        with ExitStack() as stack:
            ranks = stack.enter_context(open_ranks(position.group, "the loop over the loader"))
            position.check_same(ranks)
            position.check_dataset()
            if exact is not None:
                stack.enter_context(exact.watching(self.notes))
            try:
                position.begin_pass(ranks, chain.from_iterable(self._start_fetching()))
                while position.epoch == epoch and (run := position.begin_step()) is not None:
                    yield Step(run, position)
                    if position.num_iterations != number:
                        raise CheckpointError(
                            "the loader was iterated again, or loaded a state, within this loop. "
                            "Leave the loop, and start a new one."
                        )
                    position.commit()
                position.check_receipt(ranks)
            finally:
                if position.num_iterations == number:
                    position.end_pass()
                    # A complete step stays current: in_step is true until it is committed.
                    if not position.is_step_complete:
                        position.abandon_step()

    @property
    def in_step(self) -> bool:
        """True if microbatches have run that are not committed yet; a save is then refused."""
        return self.position.current is not None and bool(self.position.current.passes)

    def _start_fetching(self) -> Iterator[Iterator[FetchedBatch]]:
        """Start to fetch batches when the first is requested, because the model decides on them."""
        start = partial(start_fetching, self._fetcher)
        yield start() if self._workers is None else self._workers.watch(start)


def _bucket_order(
    n: int, seed: int, shuffle: bool, microbatch: int, keys: Any, transform: Any, weights: Any
) -> Order:
    """Return the order of samples by their buckets; raise the errors of `ElasticLoader`."""
    if not hasattr(transform, "drop_last"):
        raise ValueError(
            "keys= needs a Buckets transform. Pass transform=anyrank.Buckets(...), too."
        )
    if weights is not None:
        raise ValueError(
            "weights= draw samples with replacement, which buckets do not support. Remove one."
        )
    return bucket_order(n, seed, shuffle, microbatch, keys, transform.drop_last)


def _exact_run() -> ExactRun:
    """Make the object that orders a run's sums. A door: only runs with `exact=True` import it."""
    from anyrank.training.exact.run import ExactRun

    return ExactRun()
