"""What one rank writes at a save: its boxes, staged or straight from memory, into one data file."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from anyrank.files.block_sums import BlockDigester, BlockSums, sums_name
from anyrank.files.pages import use_large_pages
from anyrank.files.reader import copy_into, memory_of
from anyrank.files.storage import (
    FileRecord,
    NewFile,
    Storage,
    join_path,
    split,
    storing,
    write_file,
)
from anyrank.formats.run_folder import SavedBox
from anyrank.formats.torch_zip import ALIGN, wrap
from anyrank.state.digests import check_memory
from anyrank.tensors.box import Box
from anyrank.tensors.layout import Piece, local_pieces
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.writes import PIECE_BYTES, Write
from anyrank.world.pinned import page_locked
from anyrank.world.ranks import Ranks

MAX_PARTS = 512  # of one call; the kernel's limit is 1024
CACHED_BYTES = 1 << 20  # fits in a processor's cache


@dataclass(frozen=True)
class Item:
    """One box to write.

    Attributes:
        name, shape, dtype: of the whole tensor.
        box: the part of it.
        source: the box's elements, in memory of any device and stride.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    source: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


def items_of(
    tensors: Sequence[ShardedTensor],
    own: Sequence[ShardedTensor],
    writes: Sequence[Write],
    rank: int,
) -> list[Item]:
    """What this rank writes: its part of the plan, then what it alone holds."""
    items: list[Item] = []
    for write in writes:
        if write.writer == rank:
            held, piece = tensors[write.index], write.piece
            inside = Box(piece.local, piece.box.sizes).slices()
            source = held.local()[inside] if piece.box.numel else held.local().new_empty(held.shape)
            items.append(Item(held.name, held.shape, held.dtype, piece.box, source))
    for held in own:
        box = Box.whole(held.shape)  # one empty piece, where there is no element
        for whole in local_pieces(held.shape, None, None) or (Piece(box, box.offsets),):
            for part in whole.box.cut(PIECE_BYTES // held.dtype.itemsize):
                source = held.local()[part.slices()]
                items.append(Item(held.name, held.shape, held.dtype, part, source))
    return items


class Staging:
    """Memory of the size of a rank's share, pinned where the share is on an accelerator; reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._streams: dict[torch.device, torch.Stream] = {}

    def take(self, items: Sequence[Item], ranks: Ranks) -> list[Item]:
        """Copy every item; the copies, in the same order. The next call overwrites them.

        Raises:
            CheckpointError: a tensor's memory was released.
            AnyrankError: there is no memory to lock.
        """
        devices = {item.source.device for item in items if not item.source.is_cpu}
        self._reserve(sum(_room(item) for item in items), devices, ranks)
        for device in devices:
            stream = self._streams.setdefault(device, torch.Stream(device))
            with torch.accelerator.device_index(device.index):  # no context on the current one
                stream.wait_event(torch.accelerator.current_stream(device).record_event())
        copies: list[Item] = []
        position = 0
        for item in items:
            ranks.check()
            part = self._memory[position : position + item.nbytes]
            copy = part.view(item.dtype).view(item.box.sizes)
            check_memory(item.name, item.source)
            with self._streams.get(item.source.device, contextlib.nullcontext()):
                copy_into(copy, item.source, non_blocking=True)
            copies.append(replace(item, source=copy))
            position += _room(item)
        for device in devices:
            self._streams[device].synchronize()
        return copies

    def _reserve(self, nbytes: int, devices: set[torch.device], ranks: Ranks) -> None:
        """Have this much memory, and never twice."""
        if self._memory.numel() >= nbytes:
            return
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if devices:
            self._memory = page_locked(nbytes, min(devices, key=str))
        else:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            use_large_pages([self._memory], ranks.ranks_on_node)


def _room(item: Item) -> int:
    """Bytes that a copy of an item takes."""
    return -(-item.nbytes // ALIGN) * ALIGN


class WrittenShare(NamedTuple):
    """What a rank wrote: where its boxes lie, and the manifest's records of its files."""

    boxes: list[SavedBox]
    files: dict[str, FileRecord]


def write_share(
    store: Storage, folder: str, name: str, items: Sequence[Item], check: Callable[[], None]
) -> WrittenShare:
    """Write the items into one data file, durably, and its checksums into another.

    Raises:
        CheckpointError: the device refuses.
    """
    path = join_path(folder, name)
    boxes: list[SavedBox] = []
    with storing(path):
        output = _Output(store.create(path))
        try:
            for item in items:
                check()
                start = output.size
                length, offset = output.put(item)
                what = (item.name, item.shape, item.dtype, item.box)
                boxes.append(SavedBox(*what, name, start + offset, start, length))
            output.flush()
        except BaseException:
            output.sink.abandon()
            raise
        output.sink.finish()
    sums = sums_name(name)
    blocks = BlockSums(output.size, output.digester.finish())
    written = write_file(store, join_path(folder, sums), blocks.to_bytes())
    files = {name: FileRecord(output.size, blocks=sums), sums: written}
    return WrittenShare(boxes, files)


class _Output:
    """A data file that is written in large calls, however small the items are."""

    def __init__(self, sink: NewFile) -> None:
        self.sink = sink
        self.digester = BlockDigester()
        self.size = 0
        self.parts: list[bytes | memoryview] = []
        self.kept: list[torch.Tensor] = []  # the memory that `parts` look at
        self.waiting = 0

    def put(self, item: Item) -> tuple[int, int]:
        """Add a zip around an item; its length, and where in it the payload starts."""
        payload = item.source.detach().cpu().contiguous()
        head, tail = wrap(payload.nbytes, item.box.sizes, item.dtype)
        parts = [head, memory_of(payload), tail]
        length = sum(map(len, parts))
        self.parts += [*parts, bytes(-length % ALIGN)]
        self.kept.append(payload)
        self.size += length + -length % ALIGN
        self.waiting += length
        if self.waiting >= PIECE_BYTES or len(self.parts) >= MAX_PARTS:
            self.flush()
        return length, len(head)

    def flush(self) -> None:
        """Write what waits, so little at a time that its checksum leaves it in the cache."""
        for group in split(self.parts, itertools.repeat(CACHED_BYTES)):
            for part in group:
                self.digester.update(memoryview(part))
            self.sink.write(group)
        self.parts, self.kept, self.waiting = [], [], 0
