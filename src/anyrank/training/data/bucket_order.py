"""An order of microbatches of one bucket each, for buckets that are known in advance.

The samples of a bucket are shuffled, and cut into microbatches; full ones come in a shuffled order,
and then, unless they are dropped, the incomplete ones of the buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from anyrank.checks import check_type
from anyrank.tensors.hashing import derive, mix64, signed
from anyrank.training.data.order import Order

BUCKETS_NAME = "buckets-v1"


@dataclass(frozen=True)
class BucketOrder(Order):
    """The order of the microbatches of buckets.

    Attributes:
        digest: digest of the buckets.
        microbatch: samples in a full microbatch.
        short_sizes: sizes of the microbatches that are not full, in the buckets' order.
        members: int64 [n], the samples of one bucket after those of another.
        counts: counts of the samples of each bucket.
    """

    digest: str
    microbatch: int
    short_sizes: tuple[int, ...]
    members: torch.Tensor = field(compare=False, repr=False)
    counts: tuple[int, ...] = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The method, and a digest of the buckets."""
        return f"{BUCKETS_NAME} {self.digest} {super().name}"

    def arguments(self) -> dict[str, object]:
        return super().arguments() | {"keys": f"digest {self.digest}"}

    @property
    def num_full(self) -> int:
        """Number of full microbatches."""
        return sum(count // self.microbatch for count in self.counts)

    @property
    def num_blocks(self) -> int:
        return self.num_full + len(self.short_sizes)

    def cuts(self, start: int, most: int) -> tuple[int, ...]:
        full = self.num_full * self.microbatch
        number = min(most, max(0, full - start) // self.microbatch)
        cuts = [start + n * self.microbatch for n in range(number + 1)]
        ends = list(accumulate(self.short_sizes, initial=full))
        return tuple([*cuts, *(end for end in ends if end > cuts[-1])][: most + 1])

    def ids(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Return the sample ids at positions [start, stop) of an epoch, int64."""
        return _order_of_epoch(self, epoch)[start:stop]


@functools.lru_cache(maxsize=2)
def _order_of_epoch(order: BucketOrder, epoch: int) -> torch.Tensor:
    """Return the samples of an epoch, in order."""
    size, full, rest = order.microbatch, list[torch.Tensor](), list[torch.Tensor]()
    for samples in order.members.split(list(order.counts)):
        if order.shuffle:
            samples = samples[_shuffled(order, epoch, samples, "samples")]
        number = len(samples) // size * size
        full.append(samples[:number].reshape(-1, size))
        rest.append(samples[number:])
    blocks = torch.cat(full)
    firsts = blocks[:, 0]
    places = _shuffled(order, epoch, firsts, "blocks") if order.shuffle else firsts.argsort()
    return torch.cat([blocks[places].flatten(), *(rest if order.short_sizes else ())])


def _shuffled(order: Order, epoch: int, samples: torch.Tensor, what: str) -> torch.Tensor:
    """Return the positions of samples in a random order."""
    return (mix64(mix64(samples) ^ signed(derive(order.seed, epoch, what)))).argsort(stable=True)


def bucket_order(
    n: int, seed: int, shuffle: bool, microbatch: int, keys: Any, drop_last: bool
) -> BucketOrder:
    """Return the order of n samples with these buckets.

    Raises:
        TypeError: keys that cannot tell buckets apart.
        ValueError: the number of keys is not n; no microbatch is full, with drop_last.
    """
    check_type("keys", keys, (Sequence, torch.Tensor), "a list of the buckets of samples")
    values: Sequence[Hashable] = keys.tolist() if isinstance(keys, torch.Tensor) else keys
    if len(values) != n:
        raise ValueError(
            f"keys= has {len(values)} values: must have {n}, the bucket of each sample"
        )
    numbers: dict[Hashable, int] = {}
    try:
        of_samples = [numbers.setdefault(value, len(numbers)) for value in values]
    except TypeError as error:
        raise TypeError(
            f"keys= cannot identify buckets: {error}. Pass numbers, str or tuples."
        ) from None
    buckets = torch.tensor(of_samples, dtype=torch.int64, device="cpu")
    places = torch.arange(n, device="cpu")
    hashes = int(mix64(mix64(buckets) ^ places).sum())
    counts = tuple(torch.bincount(buckets, minlength=len(numbers)).tolist())
    left = () if drop_last else tuple(c % microbatch for c in counts if c % microbatch)
    if drop_last and not any(count >= microbatch for count in counts):
        raise ValueError(
            "drop_last=True leaves no samples, because no bucket fills a microbatch of "
            f"{microbatch}"
        )
    digest = f"{derive(n, hashes, microbatch, drop_last, size=4):08x}"
    members = buckets.argsort(stable=True)
    return BucketOrder(n, seed, shuffle, digest, microbatch, left, members, counts)
