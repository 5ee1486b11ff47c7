"""Write one rank's share of a save into one data file, straight from the tensors' memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyrank.files.block_sums import BlockDigester, BlockSums, sums_name
from anyrank.files.reader import memory_of
from anyrank.files.storage import (
    FileRecord,
    NewFile,
    Storage,
    join_path,
    split,
    storing,
    write_file,
)
from anyrank.sources.run_step import StoredBox
from anyrank.sources.torch_zip import ALIGN, wrap
from anyrank.tensors.box import Box
from anyrank.tensors.layout import Piece, local_pieces
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
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    source: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


def make_items(
    tensors: Sequence[ShardedTensor],
    own_tensors: Sequence[ShardedTensor],
    writes: Sequence[Write],
    rank: int,
) -> list[Item]:
    """Make the boxes that this rank writes: its part of the plan, then `own_tensors` whole."""
    items: list[Item] = []
    for write in writes:
        if write.writer == rank:
            tensor, piece = tensors[write.index], write.piece
            local, slices = tensor.local(), Box(piece.local, piece.box.sizes).slices()
            source = local[slices] if piece.box.numel else local.new_empty(tensor.shape)
            items.append(Item(tensor.name, tensor.shape, tensor.dtype, piece.box, source))
    for tensor in own_tensors:
        whole = Box.whole(tensor.shape)  # a tensor without elements has one empty piece
        for piece in local_pieces(tensor.shape, None, None) or (Piece(whole, whole.offsets),):
            for box in piece.box.cut(PIECE_BYTES // tensor.dtype.itemsize):
                source = tensor.local()[box.slices()]
                items.append(Item(tensor.name, tensor.shape, tensor.dtype, box, source))
    return items


def write_share(
    store: Storage, folder: str, name: str, items: Sequence[Item]
) -> tuple[list[StoredBox], dict[str, FileRecord]]:
    """Write the items into one data file, durably, and its checksums into another.

    Returns:
        Positions of the boxes in the file, and the manifest's records of both files.

    Raises:
        CheckpointError: a write failed.
    """
    path = join_path(folder, name)
    boxes: list[StoredBox] = []
    with storing(path):
        output = _Output(store.create(path))
        try:
            for item in items:
                start = output.size
                length, offset = output.put(item)
                tensor = (item.name, item.shape, item.dtype, item.box)
                boxes.append(StoredBox(*tensor, name, start + offset, start, length))
            output.flush()
        except BaseException:
            output.sink.abandon()
            raise
        output.sink.finish()
    sums = sums_name(name)
    blocks = BlockSums(output.size, output.digester.finish())
    written = write_file(store, join_path(folder, sums), blocks.to_bytes())
    return boxes, {name: FileRecord(output.size, blocks=sums), sums: written}


class _Output:
    """A data file that is written in large calls, even if the items are small."""

    def __init__(self, sink: NewFile) -> None:
        self.sink = sink
        self.digester = BlockDigester()
        self.size = 0
        self.parts: list[bytes | memoryview] = []
        self.payloads: list[torch.Tensor] = []  # own the memory of `parts`
        self.pending_bytes = 0

    def put(self, item: Item) -> tuple[int, int]:
        """Add a zip with an item; return its length, and the offset of the payload in it."""
        payload = item.source.detach().cpu().contiguous()
        head, tail = wrap(payload.nbytes, item.box.sizes, item.dtype)
        parts = [head, memory_of(payload), tail]
        length = sum(map(len, parts))
        self.parts += [*parts, bytes(-length % ALIGN)]
        self.payloads.append(payload)
        self.size += length + -length % ALIGN
        self.pending_bytes += length
        if self.pending_bytes >= PIECE_BYTES or len(self.parts) >= MAX_PARTS:
            self.flush()
        return length, len(head)

    def flush(self) -> None:
        """Write the pending parts, in groups that stay in the cache after their checksum."""
        for group in split(self.parts, itertools.repeat(CACHED_BYTES)):
            for part in group:
                self.digester.update(memoryview(part))
            self.sink.write(group)
        self.parts, self.payloads, self.pending_bytes = [], [], 0
