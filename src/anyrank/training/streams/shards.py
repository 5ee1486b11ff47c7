"""`ElasticLoader.from_shards(lengths=)`: data that is read from the start of a shard on.

The shards of an epoch, concatenated in the epoch's order, are divided into K lanes of equal length,
one for each microbatch of a step. A step takes the next samples of every lane, so the worker of
microbatch k reads one lane in sequence, and opens a shard only at the end of the previous one. This
is an order like any other: steps, counts, state and receipts are those of `ElasticLoader`.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import default_collate

from anyrank.checks import check_type
from anyrank.errors import CheckpointError
from anyrank.tensors.hashing import derive
from anyrank.training.data.batches import FetchedBatch
from anyrank.training.data.fetch import (
    MicrobatchDataset,
    MicrobatchRequest,
    OwnOrder,
    samples_of,
)
from anyrank.training.data.order import Order
from anyrank.training.streams.sources import Stream, hide_worker_info
from anyrank.wording import count

log = logging.getLogger("anyrank.data")

SHARDS_NAME = "shards-v1"
END = object()


@dataclass(frozen=True)
class ShardOrder(Order):
    """The order of samples in shards. A sample's id is its position in the concatenated shards.

    Attributes:
        digest: digest of the shards' names and lengths.
        lengths: number of samples of each shard.
        global_batch: number of samples of a step.
        microbatch: number of samples of a lane that a step takes.
    """

    digest: int
    lengths: tuple[int, ...] = field(compare=False, repr=False)  # to hash many takes long
    global_batch: int
    microbatch: int

    @property
    def name(self) -> str:
        """The method, the shards and their lengths."""
        return f"{SHARDS_NAME} {self.digest:08x} {super().name}"

    def arguments(self) -> dict[str, object]:
        return super().arguments() | {"shards": f"{len(self.lengths)}, digest {self.name}"}

    def ids(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Return the sample ids at positions [start, stop) of an epoch, int64."""
        places = torch.arange(start, stop, device="cpu")
        steps = self.n // self.global_batch  # full steps; the samples after them have no lanes
        lane = places % self.global_batch // self.microbatch
        offset = places // self.global_batch * self.microbatch + places % self.microbatch
        in_lanes = lane * (steps * self.microbatch) + offset
        places = torch.where(places < steps * self.global_batch, in_lanes, places)
        shard_ids, ends, starts = _layout_of_epoch(self, epoch)
        number = torch.searchsorted(ends, places, right=True)
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        return starts[shard_ids[number]] + places - begins[number]


@functools.lru_cache(maxsize=4)  # a step's ids are computed several times
def _layout_of_epoch(
    order: ShardOrder, epoch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return shards in the epoch's order, the position where each ends, and each one's first id."""
    lengths = torch.tensor(order.lengths, device="cpu")
    shards = Order(len(lengths), order.seed, order.shuffle).ids(epoch, 0, len(lengths))
    return shards, lengths[shards].cumsum(0), lengths.cumsum(0) - lengths


class Shards(OwnOrder):
    """A dataset of the samples in shards, optimized for consecutive ids. Runs in the
    workers.

    Args:
        shards: arguments of `read`.
        read: returns the samples of a shard; with `start=`, those from one on.
        lengths: number of samples of each shard.

    Attributes:
        max_open: number of iterators that are kept open: one for each lane.

    Raises:
        TypeError: shards or lengths are not a list, or `read` is not a function.
        ValueError: there is no shard, or a length is not an int of at least 0.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[..., Iterable[Any]],
        lengths: Sequence[int],
    ) -> None:
        self.stream = Stream(shards, read, None, None)
        self.lengths = _check_lengths(shards, lengths)
        self.ends = torch.tensor(self.lengths, dtype=torch.int64, device="cpu").cumsum(0)
        self.max_open, self.epoch = 1, 0
        # (shard, number of the next sample) -> the rest of the shard
        self.open: OrderedDict[tuple[int, int], Iterator[Any]] = OrderedDict()

    def __len__(self) -> int:
        return sum(self.lengths)

    def order(self, seed: int, shuffle: bool, global_batch: int, microbatch: int) -> ShardOrder:
        """Return the order of the samples, with a lane for each microbatch of a step."""
        self.stream.begin(seed, shuffle, global_batch, microbatch)
        names = derive(*(repr(shard) for shard in self.stream.shards))
        digest = derive(names, str(self.lengths), size=4)
        return ShardOrder(len(self), seed, shuffle, digest, self.lengths, global_batch, microbatch)

    def by_microbatch(
        self, seed: int, collate_fn: Callable[[list[Any]], Any] | None
    ) -> MicrobatchDataset:
        num_shards = sum(length > 0 for length in self.lengths)
        if num_shards < self.max_open and not self.stream.has_start:
            log.warning(
                "%s with rows for %s, the microbatches of a step: several lanes read "
                "the same shard, each from the start. Accept a start= argument in read(), pass "
                "more, smaller shards, or omit lengths=, which reads each shard once.",
                count(num_shards, "shard"),
                count(self.max_open, "lane"),
            )
        return _ShardReader(self, seed, collate_fn)

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch, with its own random numbers for samples."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.open.clear()

    def __getitem__(self, sample_id: int) -> Any:
        shard = int(torch.searchsorted(self.ends, sample_id, right=True))
        number = sample_id - int(self.ends[shard]) + self.lengths[shard]
        rest = self.open.pop((shard, number), None)
        if rest is None:
            start, rest = self.nearest(shard, number)
            for _ in range(start, number):
                self.require_sample(next(rest, END), shard)
        sample = self.require_sample(next(rest, END), shard)
        if number + 1 < self.lengths[shard]:
            self.open[shard, number + 1] = rest
            if len(self.open) > self.max_open:
                self.open.popitem(last=False)
        elif next(rest, END) is not END:
            raise self.length_error(shard, "more")
        return sample

    def nearest(self, shard: int, number: int) -> tuple[int, Iterator[Any]]:
        """Return the open iterator of a shard that is closest before a sample, or a new one."""
        if self.stream.has_start:  # another lane's iterator is not used
            first = number // self.stream.piece * self.stream.piece
            return first, self.rows(shard, first)
        starts = [start for opened, start in self.open if opened == shard and start <= number]
        if not starts:
            return 0, self.rows(shard, 0)
        return max(starts), self.open.pop((shard, max(starts)))

    def rows(self, shard: int, first: int) -> Iterator[Any]:
        """Read the samples of a shard from one on, which starts a piece; whole pieces are read."""
        rest = self.stream.open(self.epoch, shard, first)
        while True:
            piece = self.stream.read_piece(rest, self.epoch, shard, first)
            yield from piece
            first += len(piece)
            if len(piece) < self.stream.piece:
                return

    def require_sample(self, sample: Any, shard: int) -> Any:
        """Return a sample; raise an error at the end of the shard."""
        if sample is END:
            raise self.length_error(shard, "fewer")
        return sample

    def length_error(self, shard: int, how: str) -> CheckpointError:
        """Make the error for a shard whose length differs."""
        return CheckpointError(
            f"shard {self.stream.shards[shard]!r} has {how} than {self.lengths[shard]} samples. "
            "Pass its actual length, which must not change during a run."
        )


class _ShardReader(MicrobatchDataset):
    """Reads samples, which have random numbers of their own; seeds only for the collate_fn."""

    def __getitem__(self, request: MicrobatchRequest) -> FetchedBatch:
        hide_worker_info()
        self.dataset.begin_epoch(request.epoch)
        samples = samples_of(self.dataset, request.ids, request)
        if self.collate_fn is not default_collate:  # which draws nothing
            self.reseed(request)
        return self.collate(request, samples)


def _check_lengths(shards: Sequence[Any], lengths: Sequence[int]) -> tuple[int, ...]:
    """Check the lengths of shards, and return them.

    Raises:
        TypeError: they are not a list.
        ValueError: there is not an int of at least 0 for each shard.
    """
    check_type("lengths", lengths, Sequence, "a list of numbers of samples")
    sizes = tuple(lengths)
    if len(sizes) != len(shards) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError(
            f"lengths= has {list(sizes)[:8]} for {len(shards)} shards: must be the number of "
            "samples of each shard"
        )
    return sizes
