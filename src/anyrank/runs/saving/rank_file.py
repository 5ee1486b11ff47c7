"""Write one rank's share of a save into one data file, directly from the tensors' memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyrank.files.block_sums import BlockDigester, BlockSums, sums_name
from anyrank.files.manifest import RankFiles, data_name, index_name
from anyrank.files.reader import memory_of
from anyrank.files.storage import (
    NewFile,
    Storage,
    join_path,
    split,
    storing,
    write_file,
)
from anyrank.sources.rank_index import OwnTensor, Placed, RankIndex
from anyrank.sources.torch_zip import place_zip, wrap
from anyrank.tensors.box import Box
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.writes import PIECE_BYTES, Write

MAX_PARTS = 512  # in one write; the kernel's limit is 1024
CACHED_BYTES = 1 << 20  # fits into a processor's cache


@dataclass(frozen=True)
class Item:
    """One box to write.

    Attributes:
        name, shape, dtype: those of the whole tensor.
        box: part of it to write.
        source: elements of the box, in memory of any device and stride.
        number: number of the tensor in the step's index; None for one that only this rank has.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    source: torch.Tensor
    number: int | None

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


def make_items(tensors: Sequence[ShardedTensor], writes: Iterable[Write]) -> list[Item]:
    """Make the boxes that this rank writes of the tensors that the ranks hold together."""
    items: list[Item] = []
    for number, piece in writes:
        tensor, box = tensors[number], piece.box
        local = tensor.local()
        source = local[piece.local_slices()] if box.numel else local.new_empty(tensor.shape)
        items.append(Item(tensor.name, tensor.shape, tensor.dtype, box, source, number))
    return items


def make_own_items(tensors: Iterable[ShardedTensor], numbers: Mapping[str, int]) -> Iterator[Item]:
    """Make the boxes of tensors that this rank writes whole.

    Args:
        tensors: tensors that this rank holds.
        numbers: name -> number in the step's index, for those that are identical on every rank.
    """
    for tensor in tensors:
        # A tensor without elements is one empty box, so that its dtype and shape are kept.
        for box in Box.whole(tensor.shape).cut(PIECE_BYTES // tensor.dtype.itemsize):
            source, number = tensor.local()[box.slices()], numbers.get(tensor.name)
            yield Item(tensor.name, tensor.shape, tensor.dtype, box, source, number)


def write_share(
    store: Storage,
    folder: str,
    rank: int,
    items: Sequence[Item],
    parts: Mapping[str, Any],
    generators: Mapping[str, Any],
) -> RankFiles:
    """Write the items into one data file, durably, and next to it its checksums and its index.

    Args:
        store: where the folder is.
        folder: folder of the step.
        rank: index of this one among those that save.
        items: items to write.
        parts, generators: see `RankIndex`.

    Raises:
        CheckpointError: a write failed.
    """
    path = join_path(folder, data_name(rank))
    index = _Index()
    with storing(path):
        output = _Output(store.create(path))
        try:
            for item in items:
                index.add(item, output.put(item))
            output.flush()
        except BaseException:
            output.sink.abandon()
            raise
        output.sink.finish()
    blocks = BlockSums(output.size, output.digester.finish())
    write_file(store, join_path(folder, sums_name(data_name(rank))), blocks.to_bytes())
    data = RankIndex(index.placed, index.own_tensors, parts, generators).to_bytes()
    return RankFiles(output.size, write_file(store, join_path(folder, index_name(rank)), data))


class _Index:
    """The rank's index of the items written so far."""

    def __init__(self) -> None:
        self.placed: dict[int, list[Placed]] = {}
        self.own_tensors: dict[str, OwnTensor] = {}
        self._own_boxes: dict[str, list[Placed]] = {}

    def add(self, item: Item, offset: int) -> None:
        """Record the offset of an item's first element in the file."""
        placed = Placed(item.box, offset)
        if item.number is not None:
            self.placed.setdefault(item.number, []).append(placed)
            return
        boxes = self._own_boxes.setdefault(item.name, [])
        boxes.append(placed)
        self.own_tensors[item.name] = OwnTensor(item.shape, item.dtype, boxes)


class _Output:
    """A data file that is written in large calls, even if the items are small."""

    def __init__(self, sink: NewFile) -> None:
        self.sink = sink
        self.digester = BlockDigester()
        self.size = 0
        self.parts: list[bytes | memoryview] = []
        self.payloads: list[torch.Tensor] = []  # own the memory of `parts`
        self.pending_bytes = 0

    def put(self, item: Item) -> int:
        """Add a zip with an item; return the offset of its payload."""
        payload = item.source.detach().cpu().contiguous()
        span = place_zip(item.box.sizes, item.dtype, self.size)
        head, tail = wrap(payload.nbytes, item.box.sizes, item.dtype)
        padding = bytes(span.next - span.start - span.length)
        self.parts += [head, memory_of(payload), tail, padding]
        self.payloads.append(payload)
        self.size = span.next
        self.pending_bytes += span.length
        if self.pending_bytes >= PIECE_BYTES or len(self.parts) >= MAX_PARTS:
            self.flush()
        return span.payload

    def flush(self) -> None:
        """Write the pending parts, in groups that stay in the cache after their checksum."""
        for group in split(self.parts, itertools.repeat(CACHED_BYTES)):
            for part in group:
                self.digester.update(memoryview(part))
            self.sink.write(group)
        self.parts, self.payloads, self.pending_bytes = [], [], 0
