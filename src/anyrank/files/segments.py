"""A reader's work on one file: jobs as byte ranges, batched for one read call each."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from anyrank.files.block_sums import BLOCK_BYTES
from anyrank.tensors.box import Box
from anyrank.tensors.layout import Piece
from anyrank.tensors.reads import GAP_BYTES, Block, Read, blocks, cut_dense, plan_reads
from anyrank.tensors.spec import StoredTensor

MAX_BUFFERS = 512  # per preadv; the kernel's limit is 1024
ALIGN = 16  # alignment of staged blocks, so that any dtype can view them


@dataclass(slots=True)
class Job:
    """A read and the memory to fill: a view with the sizes of the read's box, on any device."""

    read: Read
    destination: torch.Tensor


def jobs_of(stored: StoredTensor, box: Box, memory: torch.Tensor) -> list[Job]:
    """Return the jobs that read a box of a stored tensor into `memory`, of the box's sizes."""
    if not box.numel:
        return []
    reads = plan_reads(stored, [Piece(box, (0,) * len(box.sizes))])
    return [Job(read, read.view_of(memory)) for read in reads]


@dataclass(slots=True)
class Segment:
    """A byte range of one file: `direct` memory to fill, or bytes to stage and copy.

    Attributes:
        dtype, strides: dtype and strides of the elements in the staged bytes.
        destination: the view to copy the elements to, of any layout and dtype.
        mapped: the memory to fill, if the elements are copied out of a mapping of the file.
    """

    start: int
    stop: int
    direct: memoryview | None
    dtype: torch.dtype | None = None
    strides: tuple[int, ...] = ()
    destination: torch.Tensor | None = None
    mapped: Job | None = None


def segments_of(
    jobs: Sequence[Job], slot: int, most: int, *, by_block: bool = False, may_map: bool = False
) -> list[Segment]:
    """Return the byte ranges of one file's jobs, sorted by offset.

    Args:
        jobs: the jobs of the file.
        slot: maximum number of bytes of a staged range.
        most: maximum number of bytes of a range that goes straight to its destination, or is
            mapped.
        by_block: whether to cut dense ranges at the ends of the checksums' blocks.
        may_map: whether elements with gaps between them, such as columns of a matrix, may be copied
            from a mapping of the file, without reading the gaps.
    """
    segments: list[Segment] = []
    for job in jobs:
        dtype = job.read.stored.dtype
        is_aligned = job.read.chunk.offset % dtype.itemsize == 0
        maps = may_map and is_aligned and not by_block and job.destination.is_cpu
        longest, gap_bytes = (most, most) if maps else (slot, GAP_BYTES)
        for block in blocks(job.read, longest, gap_bytes):
            destination = _part_of(job, block)
            if block.dense and _fits(destination, block.read):
                memory = memory_of(destination)
                if len(memory) <= most and not by_block:  # as most tensors of a model are
                    segments.append(Segment(block.start, block.stop, memory))
                    continue
                for low, high in _ranges(block, most, 1, by_block):
                    part = memory[low - block.start : high - block.start]
                    segments.append(Segment(low, high, part))
            elif block.dense and destination.is_contiguous():
                flat, size = destination.view(-1), dtype.itemsize
                for low, high in _ranges(block, slot, size, by_block):
                    part = flat[(low - block.start) // size : (high - block.start) // size]
                    segments.append(Segment(low, high, None, dtype, (1,), part))
            else:
                for small in cut_dense(block, slot) if block.dense else (block,):
                    # A short range is read along with its gaps, in one call with its neighbors.
                    is_long = small.stop - small.start > min(GAP_BYTES, slot)
                    inner = Job(small.read, _part_of(job, small))
                    mapped = inner if maps and is_long and not block.dense else None
                    staged = (None, dtype, small.strides, inner.destination, mapped)
                    segments.append(Segment(small.start, small.stop, *staged))
    segments.sort(key=lambda segment: segment.start)
    return segments


def _ranges(block: Block, most: int, size: int, by_block: bool) -> Iterator[tuple[int, int]]:
    """Cut a dense block into ranges of at most `most` bytes, of whole elements of `size` bytes."""
    low = block.start
    while low < block.stop:
        high = min(block.stop, low + max(size, most // size * size))
        cut = high - high % BLOCK_BYTES
        if by_block and high < block.stop and cut > low and (cut - low) % size == 0:
            high = cut
        yield low, high
        low = high


def batches_of(segments: Sequence[Segment], slot: int, most: int) -> Iterator[list[Segment]]:
    """Group segments for one call each: near in the file and staged in one slot, or one mapped."""
    batch: list[Segment] = []
    staged = total = 0
    for segment in segments:
        if segment.mapped is not None:
            if batch:
                yield batch
            yield [segment]
            batch, staged, total = [], 0, 0
            continue
        gap = segment.start - batch[-1].stop if batch else 0
        size = segment.stop - segment.start
        more = (size if segment.direct is None else 0) + (gap if gap > 0 else 0) + 2 * ALIGN
        full = staged + more > slot or total + size > most
        if batch and (gap < 0 or gap > GAP_BYTES or full or 2 * len(batch) >= MAX_BUFFERS):
            yield batch
            batch, staged, total = [], 0, 0
            more -= gap if gap > 0 else 0
        batch.append(segment)
        staged, total = staged + more, total + size
    if batch:
        yield batch


def _part_of(job: Job, block: Block) -> torch.Tensor:
    if block.read.box is job.read.box:
        return job.destination
    inside = block.read.box.relative_to(job.read.box.offsets)
    return job.destination[inside.slices()]


def _fits(destination: torch.Tensor, read: Read) -> bool:
    return (
        destination.is_cpu
        and destination.dtype == read.stored.dtype
        and destination.is_contiguous()
    )


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any dtype, writable."""
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
