"""From sample ids to batches, with random numbers that belong to the samples.

What a DataLoader hands around here are microbatches: a request names one, a worker answers it, and
the answer carries the ids back, so that the loop sees what it really got.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from anyrank.data.schedule import Schedule, StepPlan
from anyrank.data.workers import leave_to_rank
from anyrank.random_state.hashing import derive
from anyrank.random_state.streams import fingerprint, kept, reseed


@dataclass(frozen=True)
class Request:
    """One microbatch that a rank will run.

    Attributes:
        epoch: whose random numbers the samples get.
        ids: its samples, in order.
        place: of its first sample in the epoch, where an epoch may have a sample several times,
            each with random numbers of its own; else None.
    """

    epoch: int
    ids: tuple[int, ...]
    place: int | None = None


def request_for(schedule: Schedule, plan: StepPlan, k: int) -> Request:
    """The request of microbatch k of a step."""
    place = plan.bounds(k)[0] if schedule.order.repeats else None
    return Request(plan.epoch, tuple(schedule.ids(plan, k)), place)


class Answer(NamedTuple):
    """A request and its batch, a tuple, so that a DataLoader's pinning finds the batch."""

    request: Request
    batch: Any


class Samples(Dataset[Answer]):
    """The user's dataset, asked for microbatches. Lives in the workers, or in this process."""

    def __init__(
        self, dataset: Any, seed: int, collate_fn: Callable[[list[Any]], Any] | None
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate_fn = collate_fn or default_collate
        self.is_plain = True  # its __getitems__, if any, was not seen to draw random numbers

    def __getitem__(self, request: Request) -> Answer:
        where = "dataset.__getitems__"
        with kept():
            try:
                samples = self.many(request)
                for number, sample_id in enumerate(request.ids[len(samples) :]):
                    where = f"dataset[{sample_id}]"
                    again = () if request.place is None else (request.place + number,)
                    reseed(derive(self.seed, request.epoch, sample_id, "sample", *again))
                    samples.append(self.dataset[sample_id])
                where = "collate_fn"
                # A collate_fn may draw too, as the ones that mask tokens do.
                first = request.ids[0] if request.place is None else request.place
                reseed(derive(self.seed, request.epoch, first, "collate"))
                return Answer(request, self.collate_fn(samples))
            except Exception as error:
                ids = list(request.ids)
                error.add_note(f"raised by {where}, epoch {request.epoch}, microbatch {ids}")
                raise

    def many(self, request: Request) -> list[Any]:
        """The samples by the dataset's `__getitems__`, where it has that and draws nothing in it.

        None of them where it does not: each is then asked for under random numbers of its own.
        """
        ask = getattr(self.dataset, "__getitems__", None) if self.is_plain else None
        if ask is None:
            return []
        before = fingerprint()
        samples: list[Any] = list(ask(list(request.ids)))
        if fingerprint() != before:
            self.is_plain = False
            return []
        if len(samples) != len(request.ids):
            raise ValueError(
                f"dataset.__getitems__ gave {len(samples)} samples for {len(request.ids)} ids"
            )
        return samples


class Requests(Sampler[Request]):
    """The requests of whoever starts an iteration; kept so that workers outlive one.

    Args:
        upcoming: a method of the loader. Held weakly: workers should end with the loader, at once.
    """

    def __init__(self, upcoming: Callable[[], Iterator[Request]]) -> None:
        self.upcoming = weakref.WeakMethod(upcoming)

    def __iter__(self) -> Iterator[Request]:
        upcoming = self.upcoming()
        assert upcoming is not None  # it is the loader that iterates
        return upcoming()


def as_it_is(answer: Any) -> Any:
    """Collate function for what is a batch already."""
    return answer


def make_fetcher(samples: Samples, requests: Requests, **options: Any) -> DataLoader[Answer]:
    """A DataLoader from requests to answers. Iterating it moves no stream of this process."""
    private = torch.Generator().manual_seed(derive(samples.seed, "workers"))
    return DataLoader(
        samples,
        batch_size=None,
        sampler=requests,
        collate_fn=as_it_is,
        generator=private,
        worker_init_fn=leave_to_rank,
        **options,
    )
