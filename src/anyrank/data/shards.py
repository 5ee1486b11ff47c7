"""`ElasticLoader.from_shards`: data that can only be read from the start of a shard on.

The shards of an epoch, one behind the other in an order of their own, are cut into K lanes of equal
length, one for each microbatch of a step. A step takes the next samples of every lane, so whoever
runs microbatch k reads one lane through, and opens another shard only where one ends. That is an
order like any other: steps, accounts, state and receipts are those of `ElasticLoader`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyrank.data.order import Order
from anyrank.errors import CheckpointError
from anyrank.random_state.hashing import derive
from anyrank.random_state.streams import kept

SHARDS_NAME = "shards-v1"
END = object()


@dataclass(frozen=True)
class ShardOrder(Order):
    """The order of samples that lie in shards. A sample's id is its place in all shards as given.

    Attributes:
        lengths: samples of each shard.
        shards: digest of the shards' names.
        global_batch: samples of a step.
        microbatch: samples of a lane that a step takes.
    """

    lengths: tuple[int, ...]
    shards: int
    global_batch: int
    microbatch: int

    @property
    def name(self) -> str:
        """The method, the shards and their lengths."""
        digest = derive(self.shards, str(self.lengths), size=4)
        return f"{SHARDS_NAME} {digest:08x} {super().name}"

    def ids(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Sample ids at positions [start, stop) of an epoch, int64. Position n is position 0."""
        places = torch.arange(start, stop, device="cpu") % self.n
        steps = self.n // self.global_batch  # full ones; the samples behind them have no lanes
        lane = places % self.global_batch // self.microbatch
        offset = places // self.global_batch * self.microbatch + places % self.microbatch
        in_lanes = lane * (steps * self.microbatch) + offset
        places = torch.where(places < steps * self.global_batch, in_lanes, places)
        shard_ids, ends, starts = layout_of_epoch(self, epoch)
        number = torch.searchsorted(ends, places, right=True)
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        return starts[shard_ids[number]] + places - begins[number]


@functools.lru_cache(maxsize=4)  # a step is asked for by several
def layout_of_epoch(
    order: ShardOrder, epoch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shards in the order of an epoch, where each ends in it, and each shard's first sample id."""
    lengths = torch.tensor(order.lengths, device="cpu")
    shards = Order(len(lengths), order.seed, order.shuffle).ids(epoch, 0, len(lengths))
    return shards, lengths[shards].cumsum(0), lengths.cumsum(0) - lengths


class Shards:
    """Samples of shards by their ids; quick where they are asked for one behind the other.

    Lives in the workers. Keeps one open iterator for each lane.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        lengths: tuple[int, ...],
        most_open: int,
    ) -> None:
        self.shards = shards
        self.read = read
        self.ends = torch.tensor(lengths, device="cpu").cumsum(0)
        self.lengths = lengths
        self.most_open = most_open
        # (shard, number of the next sample) -> the rest of the shard
        self.open: OrderedDict[tuple[int, int], Iterator[Any]] = OrderedDict()

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, sample_id: int) -> Any:
        shard = int(torch.searchsorted(self.ends, sample_id, right=True))
        number = sample_id - int(self.ends[shard]) + self.lengths[shard]
        rest = self.open.pop((shard, number), None)
        if rest is None:
            with kept():  # what is skipped must not move the sample's own random numbers
                place, rest = self.nearest(shard, number)
                for _ in range(place, number):
                    self.checked(next(rest, END), shard)
        sample = self.checked(next(rest, END), shard)
        if number + 1 < self.lengths[shard]:
            self.open[shard, number + 1] = rest
            if len(self.open) > self.most_open:
                self.open.popitem(last=False)
        elif next(rest, END) is not END:
            raise self.wrong(shard, "more")
        return sample

    def nearest(self, shard: int, number: int) -> tuple[int, Iterator[Any]]:
        """An open iterator of a shard that is not beyond a sample, or a new one."""
        places = [place for one, place in self.open if one == shard and place <= number]
        if not places:
            return 0, iter(self.read(self.shards[shard]))
        return max(places), self.open.pop((shard, max(places)))

    def checked(self, sample: Any, shard: int) -> Any:
        """A sample, which has to be there."""
        if sample is END:
            raise self.wrong(shard, "fewer")
        return sample

    def wrong(self, shard: int, how: str) -> CheckpointError:
        """The error for a shard of another length."""
        return CheckpointError(
            f"shard {self.shards[shard]!r} has {how} than {self.lengths[shard]} samples: give its "
            "real length, which has to stay the same over a run"
        )


def plan_shards(
    shards: Sequence[Any],
    read: Callable[[Any], Iterable[Any]],
    lengths: Sequence[int],
    *,
    global_batch: int,
    microbatch: int,
    seed: int,
    shuffle: bool,
) -> tuple[ShardOrder, Shards]:
    """The order of samples in shards, and the dataset that they make.

    Raises:
        ValueError: lengths that do not fit the shards.
    """
    sizes = tuple(lengths)
    if len(sizes) != len(shards) or any(type(one) is not int or one < 0 for one in sizes):
        raise ValueError(
            f"lengths are {list(sizes)[:8]} for {len(shards)} shards: give each shard's number "
            "of samples"
        )
    names = derive(*(repr(one) for one in shards))
    order = ShardOrder(sum(sizes), seed, shuffle, sizes, names, global_batch, microbatch)
    most_open = max(1, global_batch // max(1, microbatch))
    return order, Shards(shards, read, sizes, most_open)
