"""Bytes at rest into tensors: blocks sorted by offset, coalesced, read straight to their
destination
where dtype and layout allow, else through a small fixed buffer in which the cast happens."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyrank import faults
from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import OpenFile, read_exactly, storage_for
from anyrank.tensors.layout import local_pieces
from anyrank.tensors.plan import Block, Read, blocks, cut_dense, plan_reads
from anyrank.tensors.spec import StoredTensor

GAP_BYTES = 64 << 10  # a hole this small is cheaper to read than a second call
MOST_BUFFERS = 512  # of one preadv; the kernel's limit is 1024
MOST_DIRECT_BYTES = 32 << 20  # of one call, so that a failure elsewhere is noticed in time
CPU_SLOT_BYTES = 2 << 20  # stays in the cache between reading and casting
ALIGN = 16  # of staged blocks, so that any dtype can view them


@dataclass(frozen=True, slots=True)
class Job:
    """A read and the memory it fills: a view with the sizes of the read's box, on any device."""

    read: Read
    destination: torch.Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A byte range of one file: `direct` memory to fill, or a block to stage and copy."""

    start: int
    stop: int
    direct: memoryview | None
    block: Block | None = None
    destination: torch.Tensor | None = None


class Reader:
    """Reads jobs from the files of a listing.

    Args:
        listing: what the sources hold.
        memory: the tensors of an in-memory source, by key.
        buffer_bytes: most bytes of staging memory, over all threads.
        threads: how many threads read.
        check: called between blocks; raises to stop early.
        progress: called with the bytes of each batch.
    """

    def __init__(
        self,
        listing: Listing,
        memory: Mapping[str, Any] | None,
        *,
        buffer_bytes: int,
        threads: int = 1,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[int], None] = lambda n: None,
    ) -> None:
        self.listing = listing
        self.memory = memory or {}
        self.buffer_bytes = buffer_bytes
        self.threads = threads
        self.check = check
        self.progress = progress
        self.bytes_read = 0
        self.opened: dict[int, OpenFile] = {}
        self.lock = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self.opened.values():
            file.close()
        self.opened.clear()

    def open(self, files: Iterable[int]) -> None:
        """Open the files, each of which must be what it was when its header was read.

        Raises:
            LoadError: one is gone, may not be read, or has another size or time.
        """
        faults.point("load.open")
        for number in files:
            info = self.listing.files[number]
            if info.in_memory or number in self.opened:
                continue
            storage = storage_for(info.path)
            try:
                now = storage.info(info.path)
                self.opened[number] = storage.open(info.path)
            except OSError as error:
                raise LoadError(f"{info.path}: cannot be read: {error}") from error
            if (now.size, now.version) != (info.size, info.version):
                raise LoadError(
                    f"{info.path}: changed since its header was read ({info.size} bytes then, "
                    f"{now.size} now): something is writing to it; load again when it is done"
                )

    def run(self, jobs: Sequence[Job], first_file: int = 0) -> None:
        """Fill every job's destination from files that are open, in order from `first_file` on.

        Raises:
            LoadError: a file ends early, changed, or the device reports an error.
        """
        by_file: dict[int, list[Job]] = {}
        for job in jobs:
            number = job.read.chunk.file
            if self.listing.files[number].in_memory:
                self._copy_from_memory(job)
            else:
                by_file.setdefault(number, []).append(job)
        count = max(len(self.listing.files), 1)
        order = sorted(by_file, key=lambda number: (number - first_file) % count)
        streams = {
            device: torch.accelerator.current_stream(device)
            for device in {job.destination.device for job in jobs if not job.destination.is_cpu}
        }
        for device in streams:  # the caller's other streams may still use what is overwritten
            synchronize(device)
        slots = 2 if streams else 1
        threads = max(1, min(self.threads, len(jobs)))
        share = self.buffer_bytes // (threads * slots)
        slot = max(ALIGN, share if streams else min(share, CPU_SLOT_BYTES))
        batches = (
            (number, batch)
            for number in order
            for batch in _batches(_segments(by_file[number], slot), slot)
        )
        if by_file:
            _spread([_Worker(self, slot, slots, streams) for _ in range(threads)], batches)
        for stream in streams.values():  # every copy is in one of them, those from memory too
            stream.synchronize()

    def read_whole(self, stored: StoredTensor) -> torch.Tensor:
        """All of one tensor, in CPU memory, from files that are opened for it.

        Raises:
            LoadError: as `open` and `run`.
        """
        whole = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        self.open({chunk.file for chunk in stored.chunks})
        reads = plan_reads(stored, local_pieces(stored.shape, None, None))
        self.run([Job(read, whole[read.local_slices()]) for read in reads])
        return whole

    def _copy_from_memory(self, job: Job) -> None:
        read = job.read
        source = self.memory[self.listing.files[read.chunk.file].path].detach()
        start = source.storage_offset() + read.chunk.offset // source.element_size()
        start += read.chunk.element_offset(read.box)
        view = source.as_strided(read.box.sizes, read.chunk.strides, start)
        copy_into(job.destination, view)
        self.count(read.nbytes)

    def count(self, nbytes: int) -> None:
        """Add to the bytes read, from any thread."""
        with self.lock:
            self.bytes_read += nbytes
            self.progress(nbytes)


@dataclass(slots=True)
class _Slot:
    """Staging memory, and what must be over before it is filled again: the copies out of it."""

    scratch: torch.Tensor
    memory: memoryview
    busy: list[torch.Event]


class _Worker:
    """One thread's staging memory and its loop.

    Copies go into the streams that were current for the caller, behind what it has asked of the
    destinations. A thread's own current device is 0, and so would be the device of its events.
    """

    def __init__(
        self, reader: Reader, slot: int, slots: int, streams: Mapping[torch.device, torch.Stream]
    ) -> None:
        self.reader = reader
        self.slot, self.slots = slot, slots
        self.streams = streams
        self.buffers: Iterator[_Slot] | None = None

    def take(self, number: int, batch: list[Segment]) -> None:
        """Read one batch and put its staged blocks where they belong."""
        self.reader.check()
        faults.point("load.read")
        path = self.reader.listing.files[number].path
        views: list[memoryview] = []
        staged: list[tuple[Segment, int]] = []
        position, used = batch[0].start, 0
        slot = self._slot(batch)
        memory = slot.memory
        for segment in batch:
            if segment.start > position:
                views.append(memory[used : used + segment.start - position])
                used = _aligned(used + segment.start - position)
            if segment.direct is not None:
                views.append(segment.direct)
            else:
                staged.append((segment, used))
                views.append(memory[used : used + segment.stop - segment.start])
                used = _aligned(used + segment.stop - segment.start)
            position = segment.stop
        read_exactly(self.reader.opened[number], path, views, batch[0].start)
        for segment, offset in staged:
            _unstage(segment, slot.scratch[offset:])
        for device in {one.destination.device for one, _ in staged if one.destination is not None}:
            if device in self.streams:
                slot.busy.append(self.streams[device].record_event())
        self.reader.count(position - batch[0].start)

    def _slot(self, batch: list[Segment]) -> _Slot:
        if len(batch) == 1 and batch[0].direct is not None:
            return _NOTHING
        if self.buffers is None:
            for stream in self.streams.values():  # this thread is the worker's own then
                torch.accelerator.set_stream(stream)
            pinned = bool(self.streams)
            made = [
                torch.empty(self.slot, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                for _ in range(self.slots)
            ]
            self.buffers = itertools.cycle([_Slot(one, memory_of(one), []) for one in made])
        slot = next(self.buffers)
        while slot.busy:
            slot.busy.pop().synchronize()
        return slot


_NOTHING = _Slot(torch.empty(0, dtype=torch.uint8, device="cpu"), memoryview(bytearray()), [])


def _spread(workers: list[_Worker], batches: Iterator[tuple[int, list[Segment]]]) -> None:
    if len(workers) == 1 and not workers[0].streams:
        for number, batch in batches:
            workers[0].take(number, batch)
        return
    work: queue.Queue[tuple[int, list[Segment]] | None] = queue.Queue(2 * len(workers))
    errors: list[BaseException] = []

    def loop(worker: _Worker) -> None:
        while (item := work.get()) is not None:
            try:
                if not errors:
                    worker.take(*item)
            except BaseException as error:  # handed to the caller's thread below
                errors.append(error)

    threads = [threading.Thread(target=loop, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        for item in batches:
            if errors:
                break
            work.put(item)
    finally:
        for _ in threads:
            work.put(None)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _segments(jobs: Sequence[Job], slot: int) -> list[Segment]:
    """Byte ranges of one file's jobs, sorted by offset."""
    segments: list[Segment] = []
    for job in jobs:
        for block in blocks(job.read, slot):
            destination = _part_of(job, block)
            if block.dense and _fits(destination, block):
                segments += _direct(block, memory_of(destination))
                continue
            for small in cut_dense(block, slot) if block.dense else (block,):
                part = _part_of(job, small)
                segments.append(Segment(small.start, small.stop, None, small, part))
    segments.sort(key=lambda segment: segment.start)
    return segments


def _direct(block: Block, memory: memoryview) -> Iterator[Segment]:
    for low in range(0, len(memory), MOST_DIRECT_BYTES):
        part = memory[low : low + MOST_DIRECT_BYTES]
        yield Segment(block.start + low, block.start + low + len(part), part)


def _batches(segments: Sequence[Segment], slot: int) -> Iterator[list[Segment]]:
    """Runs of segments that one call reads: near in the file, their staged bytes inside one
    slot.
    """
    batch: list[Segment] = []
    staged = total = 0
    for segment in segments:
        gap = segment.start - batch[-1].stop if batch else 0
        size = segment.stop - segment.start
        more = (size if segment.direct is None else 0) + (gap if gap > 0 else 0) + 2 * ALIGN
        full = staged + more > slot or total + size > MOST_DIRECT_BYTES
        if batch and (gap < 0 or gap > GAP_BYTES or full or 2 * len(batch) >= MOST_BUFFERS):
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


def _fits(destination: torch.Tensor, block: Block) -> bool:
    return (
        destination.is_cpu
        and destination.dtype == block.read.stored.dtype
        and destination.is_contiguous()
    )


def _unstage(segment: Segment, scratch: torch.Tensor) -> None:
    assert segment.block is not None
    assert segment.destination is not None
    block, dtype = segment.block, segment.block.read.stored.dtype
    usable = (segment.stop - segment.start) // dtype.itemsize * dtype.itemsize
    view = scratch[:usable].view(dtype).as_strided(block.read.box.sizes, block.strides)
    copy_into(segment.destination, view)


def copy_into(
    destination: torch.Tensor, source: torch.Tensor, *, non_blocking: bool | None = None
) -> None:
    """Copy with a cast, which runs on the destination's side, in the device's current stream.

    A destination on the CPU has the values when the call returns, as the host may read it at once;
    with `non_blocking=True` (and no cast) it has them when that stream is done.
    """
    if non_blocking is None:
        non_blocking = not destination.is_cpu
    if destination.dtype == source.dtype and source.dtype.itemsize == 1:
        destination, source = destination.view(torch.uint8), source.view(torch.uint8)
    if destination.device != source.device and destination.dtype != source.dtype:
        source = source.to(destination.device, non_blocking=non_blocking)
    destination.copy_(source, non_blocking=non_blocking)


def synchronize(device: torch.device) -> None:
    """Wait for a device. Going back to the current one makes no context there."""
    with torch.accelerator.device_index(device.index):
        torch.accelerator.synchronize(device)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, writable."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def _aligned(position: int) -> int:
    return -(-position // ALIGN) * ALIGN
