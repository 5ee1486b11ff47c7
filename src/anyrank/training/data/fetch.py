"""From sample ids to batches, with random numbers that depend only on the microbatch.

The items of the DataLoader used here are microbatches: the sampler yields requests, and the dataset
returns each request with its batch, so that the loop can check which samples it got.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from anyrank.checks import check_function
from anyrank.errors import CheckpointError
from anyrank.tensors.hashing import derive
from anyrank.training.data.batches import FetchedBatch
from anyrank.training.data.order import Order
from anyrank.training.data.schedule import Schedule, StepPlan
from anyrank.training.data.worker_exit import leave_to_rank
from anyrank.training.random_state.generators import reseed


@dataclass(frozen=True)
class MicrobatchRequest:
    """The samples of one microbatch.

    Attributes:
        epoch: counted from 0.
        start: position of the first sample in the epoch's order; with the epoch it seeds the random
            numbers of the samples.
        ids: sample ids, in order.
    """

    epoch: int
    start: int
    ids: tuple[int, ...]
    is_empty: ClassVar[bool] = False  # if True, its batch is a copy of another's

    def __str__(self) -> str:
        return f"epoch {self.epoch}, microbatch {list(self.ids)}"


def request_for(schedule: Schedule, plan: StepPlan, k: int) -> MicrobatchRequest:
    """Return the request of microbatch k of a step."""
    return MicrobatchRequest(plan.epoch, plan.bounds(k)[0], tuple(schedule.ids(plan, k)))


def samples_of(dataset: Any, ids: Sequence[int], context: object) -> list[Any]:
    """Return samples of the user's dataset.

    Args:
        dataset: has `dataset[i]`, and perhaps `__getitems__`.
        ids: ids of the samples.
        context: what the note on an error adds, such as the epoch.

    Raises:
        ValueError: `__getitems__` returned a different number of samples.
        Exception: the dataset's own errors, with a note.
    """
    where, samples = "dataset.__getitems__", list[Any]()
    try:
        get_items = getattr(dataset, "__getitems__", None)
        if get_items is not None:
            samples += get_items(list(ids))
        else:
            for sample_id in ids:
                where = f"dataset[{sample_id}]"
                samples.append(dataset[sample_id])
        if len(samples) != len(ids):
            raise ValueError(f"{where} returned {len(samples)} samples for {len(ids)} ids")
    except Exception as error:
        raise_noted(error, f"raised by {where}, {context}")
    return samples


def raise_noted(error: Exception, note: str) -> NoReturn:
    """Raise an error that is being handled again, with a note."""
    if isinstance(error, StopIteration):  # a DataLoader takes it for the end of the data
        raise RuntimeError(f"StopIteration, {note}") from error
    error.add_note(note)
    raise error


class MicrobatchDataset(Dataset[FetchedBatch]):
    """The user's dataset, indexed by microbatch. Used in the workers, or in this process.

    It seeds the random generators, and does not restore them: its caller does.
    """

    def __init__(
        self, dataset: Any, seed: int, collate_fn: Callable[[list[Any]], Any] | None
    ) -> None:
        if collate_fn is not None:
            check_function("collate_fn", collate_fn)
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = collate_fn or default_collate

    def __getitem__(self, request: Any) -> FetchedBatch:
        # For the samples and for the collate_fn, which may draw too, for example to mask tokens.
        self.reseed(request)
        return self.collate(request, samples_of(self.dataset, request.ids, request))

    def reseed(self, request: MicrobatchRequest) -> None:
        """Set the random generators of a microbatch."""
        reseed(derive(self.seed, request.epoch, request.start, "samples"))

    def collate(self, request: MicrobatchRequest, samples: list[Any]) -> FetchedBatch:
        """Return the batch of some samples; its errors get a note."""
        try:
            batch = self.collate_fn(samples)
        except Exception as error:
            raise_noted(error, f"raised by collate_fn, {request}")
        # default_collate allocates shared memory in workers, but nothing else maps it.
        return FetchedBatch(request, batch, self.collate_fn is default_collate)


class OwnOrder:
    """A dataset with its own order, for a loader's `from_shards` and `from_iterable`."""

    position_class: Any = None  # its own class of positions
    max_open = 1  # positions in it that are read at a time

    def __len__(self) -> int:
        """Return the number of samples, or of shards if their samples are not known."""
        raise NotImplementedError

    def order(self, seed: int, shuffle: bool, global_batch: int, microbatch: int) -> Order:
        """Return the order of the samples, for steps of these sizes."""
        raise NotImplementedError

    def by_microbatch(
        self, seed: int, collate_fn: Callable[[list[Any]], Any] | None
    ) -> MicrobatchDataset:
        """Return the dataset that the workers index by requests."""
        return MicrobatchDataset(self, seed, collate_fn)


class RequestSampler(Sampler[Any]):
    """Yields a loader's requests. One object for all iterations, so that workers can persist.

    Args:
        upcoming: a method of the loader's position, referenced weakly: workers end with the loader.
    """

    def __init__(self, upcoming: Callable[[], Iterator[Any]]) -> None:
        self.upcoming = weakref.WeakMethod(upcoming)

    def __iter__(self) -> Iterator[Any]:
        upcoming = self.upcoming()
        assert upcoming is not None  # the loader itself iterates
        return upcoming()


def unchanged(batch: Any) -> Any:
    """Return items that are already batches; used as a collate function."""
    return batch


def make_fetcher(
    samples: MicrobatchDataset, requests: RequestSampler, num_workers: int, **options: Any
) -> DataLoader[FetchedBatch]:
    """Make a DataLoader from requests to batches. Iterating it draws no random numbers here."""
    if num_workers:
        options["worker_init_fn"] = leave_to_rank
    private = torch.Generator().manual_seed(derive(samples.seed, "workers"))
    return DataLoader(
        samples,
        batch_size=None,
        sampler=requests,
        collate_fn=unchanged,
        generator=private,
        num_workers=num_workers,
        **options,
    )


def start_fetching(fetcher: DataLoader[FetchedBatch]) -> Iterator[FetchedBatch]:
    """Yield the batches of all requests; in this process without a DataLoader, which takes 10 us
    for each.
    """
    if fetcher.num_workers or fetcher.pin_memory:
        return iter(fetcher)
    return map(fetcher.dataset.__getitem__, fetcher.sampler)


def check_length(dataset: Any, planned: int) -> None:
    """Check that a dataset has the length for which its order was planned.

    Raises:
        CheckpointError: the lengths differ; the error names both.
    """
    if (now := len(dataset)) != planned:
        raise CheckpointError(
            f"the dataset had {planned} samples when the loader was created, and has {now} now. "
            "Its length must not change during a run. Keep it, or start a new run from the weights "
            "with the new length."
        )


def length_of(dataset: Any) -> int:
    """Return the number of samples; raise TypeError if the dataset cannot return sample i."""
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise TypeError(
            f"{type(dataset).__name__} has no len() or no __getitem__(i), so its order cannot be "
            "planned. Pass a map-style dataset; for an IterableDataset with shards use "
            "ElasticLoader.from_iterable, for your own reader ElasticLoader.from_shards."
        )
    return len(dataset)
