"""The order of an epoch: a permutation of [0, n) that needs no list of n numbers.

A Feistel network permutes the numbers of a few bits; results outside [0, n) are permuted again
until they are inside (cycle walking). The round function is the finalizer of splitmix64. Computing
a part of the order costs time in proportion to its length, on any process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from anyrank.checks import check_bool, check_int
from anyrank.tensors.hashing import derive, mix64, signed

ORDER_NAME = "feistel-v1"
IDENTITY_NAME = "identity"
BLOCK = 4096  # positions computed at a time
ROUNDS = 8  # even, so that halves of different widths end where they started


@dataclass(frozen=True)
class Order:
    """The order of the samples in the epochs of a run.

    Attributes:
        n: number of samples.
        seed: seed of the run.
        shuffle: False for 0, 1, 2 and so on in every epoch.
    """

    n: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", check_int("seed", self.seed))
        check_bool(shuffle=self.shuffle)

    @property
    def name(self) -> str:
        """The method, by its name in checkpoints. A different method needs a different name."""
        return ORDER_NAME if self.shuffle else IDENTITY_NAME

    def arguments(self) -> dict[str, object]:
        """Return the inputs of the order, in a short form by the loader's argument, to compare."""
        return {
            "dataset": f"{self.n} samples",
            "seed": self.seed,
            "shuffle": self.shuffle,
            "weights": None,
            "keys": None,
            "shards": None,
        }

    @property
    def repeats(self) -> bool:
        """Return True if an epoch may contain a sample several times, and others not at all."""
        return False

    @property
    def num_blocks(self) -> int | None:
        """The number of microbatches of an epoch; None if each but the last is full."""
        return None

    def cuts(self, start: int, most: int) -> tuple[int, ...]:
        """Return the ends of at most `most` microbatches from a position on, if `num_blocks` is
        set."""
        raise NotImplementedError

    def ids(self, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Return the sample ids at positions [start, stop) of an epoch, int64."""
        parts: list[torch.Tensor] = []
        while start < stop:
            block, first = _ids_of_block(self, epoch, start // BLOCK), start % BLOCK
            parts.append(block[first : first + stop - start])
            start += len(parts[-1])
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


# A step's ids are computed several times, and part of a block costs as much as all of it.
@functools.lru_cache(maxsize=8)
def _ids_of_block(order: Order, epoch: int, number: int) -> torch.Tensor:
    """Return the sample ids at the positions of one block, fewer than BLOCK in the last."""
    stop = min((number + 1) * BLOCK, order.n)
    places = torch.arange(number * BLOCK, stop, device="cpu")
    if not order.shuffle:
        return places
    bits = max(2, (order.n - 1).bit_length())
    keys = [derive(order.seed, epoch, ORDER_NAME, number) for number in range(ROUNDS)]
    ids = feistel(places, bits, keys)
    while (outside := ids >= order.n).any():
        ids[outside] = feistel(ids[outside], bits, keys)
    return ids


def feistel(values: torch.Tensor, bits: int, keys: list[int]) -> torch.Tensor:
    """Return a permutation of the numbers of `bits` bits, one round for each key.

    Args:
        values: int64, any shape, each in [0, 2 ** bits).
        bits: 2 to 62.
        keys: an even number of 64-bit numbers.
    """
    low, high = bits // 2, bits - bits // 2
    left, right = values >> low, values & ((1 << low) - 1)
    for key in keys:
        left, right = right, left ^ (mix64(right ^ signed(key)) & ((1 << high) - 1))
        low, high = high, low
    return (left << low) | right
