"""Reads a map-style dataset as a stream, for transforms that form batches from the samples.

Its samples come in the epoch's order, which is divided into as many shards as a step has
microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from anyrank.tensors.hashing import derive
from anyrank.training.data.fetch import check_length, length_of, samples_of
from anyrank.training.data.order import BLOCK, Order
from anyrank.training.random_state.generators import reseed
from anyrank.training.streams.sources import Stream


class MapStyleStream(Stream):
    """The samples of a dataset.

    Args:
        dataset: has a length and `dataset[i]`.
        transform: transform of the loader.
    """

    def __init__(self, dataset: Any, transform: Any) -> None:
        self.dataset, self._length = dataset, length_of(dataset)
        if not self._length:
            raise ValueError("the dataset is empty, so there is nothing to train on")
        super().__init__([0], iter, transform, None, self._length)
        self.has_start = True

    def begin(self, seed: int, shuffle: bool, global_batch: int, microbatch: int) -> None:
        """Take over the loader's settings."""
        super().begin(seed, shuffle, global_batch, microbatch)
        count = max(1, min(global_batch // microbatch, self._length))
        parts = range(count)
        self.shards: Sequence[Any] = [f"part {n} of {self._length} samples" for n in parts]

    def open(self, pass_id: int, shard: int, row: int) -> Iterator[Any]:
        """Yield the ids of a shard's samples from one on."""
        check_length(self.dataset, self._length)
        bounds = [n * self._length // len(self.shards) for n in (shard, shard + 1)]
        order, first = Order(self._length, self.seed, self.shuffle), bounds[0] + row
        blocks = (
            (start, min(start + BLOCK, bounds[1])) for start in range(first, bounds[1], BLOCK)
        )
        return chain.from_iterable(order.ids(pass_id, *block).tolist() for block in blocks)

    def read_piece(self, rows: Iterator[Any], pass_id: int, shard: int, row: int) -> list[Any]:
        """Return the next samples, under their random generators."""
        reseed(derive(self.seed, pass_id, shard, row, "rows"))
        ids = list(islice(rows, self.piece))
        return samples_of(self.dataset, ids, self.shards[shard])
