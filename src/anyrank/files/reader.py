"""Reads stored bytes into tensors.

Reads are sorted by offset and coalesced. They go straight to their destination if dtype and layout
allow it, otherwise through a small fixed buffer in which the cast happens.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyrank import faults
from anyrank.errors import LoadError
from anyrank.files.block_sums import READ_BYTES, BlockSums, read_sums, read_verified
from anyrank.files.fingerprints import fingerprint
from anyrank.files.listing import Computed, FileInfo, Listing
from anyrank.files.local import LocalFile
from anyrank.files.segments import ALIGN, Job, Segment, batches_of, jobs_of, memory_of, segments_of
from anyrank.files.storage import OpenFile, read_exactly, storage_for
from anyrank.files.threads import spread
from anyrank.tensors.box import Box
from anyrank.tensors.spec import StoredTensor

MAX_DIRECT_BYTES = 32 << 20  # per batch, so that a failure elsewhere is noticed in time
MAX_REQUESTS = 16  # at a time, to a remote storage, which is slow to respond
CPU_SLOT_BYTES = 2 << 20  # stays in the cache between reading and casting
DEVICE_SLOTS = 3  # per thread: one is filled while the others are copied to the device


class Reader:
    """Reads jobs from the files of a listing.

    Args:
        listing: the files and tensors of the sources.
        buffer_bytes: limit of the staging memory of all threads, in bytes.
        threads: how many threads read.
        progress: called with the bytes of each batch.
        verify: whether to compare the bytes read with the checksums of their blocks.
    """

    def __init__(
        self,
        listing: Listing,
        *,
        buffer_bytes: int,
        threads: int = 1,
        progress: Callable[[int], None] = lambda n: None,
        verify: bool = False,
    ) -> None:
        self.listing = listing
        self.buffer_bytes = buffer_bytes
        self.threads = threads
        self.progress = progress
        self.verify = verify
        self.bytes_read = 0
        self.opened: dict[int, OpenFile] = {}
        self.sums: dict[int, BlockSums] = {}
        self.lock = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self.opened.values():
            file.close()
        self.opened.clear()

    def open(self, files: Iterable[int]) -> None:
        """Open the files, and check that each is unchanged since its header was read.

        Raises:
            LoadError: a file is missing or cannot be read, or its size or time has changed.
            CorruptCheckpoint: the checksums of a file are corrupt.
        """
        faults.point("load.open")
        for number in files:
            info = self.listing.files[number]
            if info.in_memory or number in self.opened:
                continue
            if info.computed is not None:
                self.open({part.chunks[0].file for part in info.computed.parts})
                self.opened[number] = info.computed.open(info.path, self.fetch)
                continue
            try:
                file = storage_for(info.path).open(info.path)
                self.opened[number], now = file, file.info
                if self.verify and number in self.listing.sums:
                    self.sums[number] = read_sums(self.listing, number)
            except OSError as error:
                raise LoadError(f"{info.path}: cannot be read: {error}") from error
            if _is_listed(now, info):
                continue
            if now.location != info.location:
                raise LoadError(
                    f"{info.path}: differs from the file whose header was read on another rank "
                    f"({now.size} bytes here, expected {info.size}; or the content differs). Make "
                    "the same file visible on every rank."
                )
            raise LoadError(
                f"{info.path}: changed after its header was read ({info.size} bytes then, "
                f"{now.size} now), so another process is writing it. Load again when it has "
                "finished."
            )

    def check_unchanged(self) -> None:
        """Check that the open files are unchanged since they were opened.

        Called after the last byte was read, because an earlier write to a file gives a mixture of
        versions.

        Raises:
            LoadError: the size or time of a file has changed.
        """

        def check(number: int) -> None:
            info = self.listing.files[number]
            if info.computed is not None:
                return  # computed from other files, which are open too
            file: Any = self.opened[number]
            try:
                now = file.stat()
            except OSError as error:
                raise LoadError(f"{info.path}: cannot be read: {error}") from error
            if (now.size, now.version) != (file.info.size, file.info.version):
                raise LoadError(
                    f"{info.path}: changed while it was read ({file.info.size} bytes before, "
                    f"{now.size} now), so another process is writing it. Load again when it has "
                    "finished."
                )

        local = [n for n in self.opened if "://" not in self.listing.files[n].path]
        for number in local:
            check(number)
        if remote := self.opened.keys() - local:
            spread(remote, [check] * min(len(remote), MAX_REQUESTS))

    def run(self, jobs: Sequence[Job], first_file: int = 0) -> None:
        """Fill every job's destination from open files, in file order, starting with `first_file`.

        Raises:
            LoadError: a file ends early or has changed, or the device reports an error.
            CorruptCheckpoint: bytes do not match their checksums.
        """
        streams = {
            device: torch.accelerator.current_stream(device)
            for device in {job.destination.device for job in jobs if not job.destination.is_cpu}
        }
        # Other streams of the caller may still use the destinations, or write the sources.
        for device in {*streams, *self._source_devices(jobs)}:
            synchronize(device)
        by_file: dict[int, list[Job]] = {}
        for job in jobs:
            number = job.read.chunk.file
            if self.listing.files[number].in_memory:
                self._copy_from_memory(job)
            else:
                by_file.setdefault(number, []).append(job)
        count = max(len(self.listing.files), 1)
        order = sorted(by_file, key=lambda number: (number - first_file) % count)
        slots = DEVICE_SLOTS if streams else 1
        # A large tensor keeps several threads busy.
        pieces = (1 + job.read.nbytes // MAX_DIRECT_BYTES for job in jobs[: self.threads])
        threads = max(1, min(self.threads, sum(pieces)))
        share = self.buffer_bytes // (threads * slots)
        if streams and share:  # torch rounds page-locked memory up to a power of two
            share = 1 << (share.bit_length() - 1)
        # The longer a verified read is, the fewer blocks are read twice at its ends.
        is_long = bool(streams) or self.verify
        slot = max(ALIGN, share if is_long else min(share, CPU_SLOT_BYTES))
        batches = (
            (number, batch)
            for number in order
            for batch in batches_of(
                segments_of(
                    by_file[number],
                    slot,
                    MAX_DIRECT_BYTES,
                    by_block=number in self.sums,
                    may_map=self.listing.files[number].is_cached,
                ),
                slot,
                MAX_DIRECT_BYTES,
            )
        )
        if by_file:
            workers = [_Worker(self, slot, slots, streams) for _ in range(threads)]
            if threads == 1 and not streams:  # a worker sets the streams of its own thread
                for batch in batches:
                    workers[0].take(batch)
            else:
                spread(batches, [worker.take for worker in workers])
        for (
            stream
        ) in streams.values():  # every copy runs in one of them, including copies from memory
            stream.synchronize()

    def read(self, stored: StoredTensor, box: Box | None = None) -> torch.Tensor:
        """Read a box of one tensor, or all of it, into CPU memory, opening the files that it needs.

        Raises:
            LoadError: as for `open` and `run`.
        """
        box = Box.whole(stored.shape) if box is None else box
        memory = torch.empty(box.sizes, dtype=stored.dtype, device="cpu")
        self.open({chunk.file for chunk in stored.chunks})
        self.run(jobs_of(stored, box, memory))
        return memory

    def fetch(self, stored: StoredTensor, start: int, stop: int) -> torch.Tensor:
        """Read bytes of a tensor that lies row-major in one file, for tensors computed from it."""
        chunk = stored.chunks[0]
        info = self.listing.files[chunk.file]
        if info.tensor is not None:
            return info.tensor.reshape(-1).view(torch.uint8)[start:stop].cpu()
        data = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        read_exactly(self.opened[chunk.file], [memory_of(data)], chunk.offset + start)
        with self.lock:
            self.bytes_read += stop - start
        return data

    def _source_devices(self, jobs: Sequence[Job]) -> set[torch.device]:
        """Return the devices, other than the CPU, of tensors in memory."""
        sources = [self.listing.files[job.read.chunk.file].tensor for job in jobs]
        return {source.device for source in sources if source is not None and not source.is_cpu}

    def _copy_from_memory(self, job: Job) -> None:
        read = job.read
        source = self.listing.files[read.chunk.file].tensor
        assert source is not None  # only ranks that have the source read it
        start = source.storage_offset() + read.chunk.offset // source.element_size()
        start += read.chunk.element_offset(read.box)
        view = source.as_strided(read.box.sizes, read.chunk.strides, start)
        copy_into(job.destination, view)
        self.count(read.nbytes)

    def count(self, nbytes: int, computed: Computed | None = None) -> None:
        """Count bytes as read, from any thread; computed tensors count their own reads."""
        with self.lock:
            if computed is None:
                self.bytes_read += nbytes
            self.progress(nbytes)


def _is_listed(now: FileInfo, listed: FileInfo) -> bool:
    """Return whether a file is the one that was listed, or a copy of it on another machine.

    Copies may have any time, and different files may have the same time, such as in container
    images.
    """
    if listed.fingerprint and now.location != listed.location:
        copy = replace(now, blocks=listed.blocks)
        return now.size == listed.size and fingerprint(copy) == listed.fingerprint
    return (now.size, now.version) == (listed.size, listed.version)


@dataclass(slots=True)
class _Slot:
    """Staging memory, and the copies out of it that must finish before it is filled again."""

    scratch: torch.Tensor
    memory: memoryview
    busy: list[torch.Event]


class _Worker:
    """One thread's staging memory and its loop.

    Copies are enqueued in the streams that were current for the caller, after its own work on the
    destinations. A new thread's current device is 0, and so would be the device of its events.
    """

    def __init__(
        self, reader: Reader, slot: int, slots: int, streams: Mapping[torch.device, torch.Stream]
    ) -> None:
        self.reader = reader
        self.slot, self.slots = slot, slots
        self.streams = streams
        self.ring = deque[_Slot]()  # the slot that was filled first is used next
        self.beyond = memoryview(b"")  # takes bytes around the segments of a verified read

    def take(self, item: tuple[int, list[Segment]]) -> None:
        """Read one batch of a file, and copy its staged blocks into their destinations."""
        number, batch = item
        faults.point("load.read")
        job = batch[0].mapped
        if job is None:
            self._read(number, batch)
        elif not self._copy_mapped(number, batch[0], job.read.nbytes):
            slot, most = self.slot, MAX_DIRECT_BYTES
            for part in batches_of(segments_of([job], slot, most), slot, most):
                self._read(number, part)

    def _read(self, number: int, batch: list[Segment]) -> None:
        """Read a batch in one call, through a slot if it cannot go straight to the destination."""
        sums = self.reader.sums.get(number)
        low, high = batch[0].start, batch[-1].stop
        if sums is not None:
            low, high = sums.around(low, high)
        before, after = self._room_beyond(batch[0].start - low, high - batch[-1].stop)
        views = [before]
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
        views.append(after)
        file = self.reader.opened[number]
        if sums is None:
            read_exactly(file, views, low)
        else:
            # Over the network, a second request would be too slow.
            most = high - low if "://" in file.path else READ_BYTES
            read_verified(file, views, low, sums, most)
        self._unstage(staged, slot)
        self.reader.count(high - low, self.reader.listing.files[number].computed)

    def _copy_mapped(self, number: int, segment: Segment, nbytes: int) -> bool:
        """Copy a segment from a mapping of the file, then unmap; return whether it was mapped."""
        file = self.reader.opened[number]
        data = file.mapped(segment.start, segment.stop) if isinstance(file, LocalFile) else None
        if data is None:
            return False
        _unstage(segment, data)
        self.reader.count(nbytes)
        return True

    def _unstage(self, staged: Sequence[tuple[Segment, int]], slot: _Slot) -> None:
        """Copy staged bytes into their destinations; the slot is busy until all copies are done."""
        for segment, offset in staged:
            _unstage(segment, slot.scratch[offset:])
        for device in {
            part.destination.device for part, _ in staged if part.destination is not None
        }:
            if device in self.streams:
                slot.busy.append(self.streams[device].record_event())

    def _room_beyond(self, before: int, after: int) -> tuple[memoryview, memoryview]:
        if len(self.beyond) < before + after:
            self.beyond = memoryview(bytearray(before + after))
        return self.beyond[:before], self.beyond[before : before + after]

    def _slot(self, batch: list[Segment]) -> _Slot:
        if len(batch) == 1 and batch[0].direct is not None:
            return _NOTHING
        if not self.ring:
            for stream in self.streams.values():  # this thread then belongs to the worker
                torch.accelerator.set_stream(stream)
        # One slot after the other: page-locking takes as long as copying the first bytes.
        if len(self.ring) < self.slots:
            pinned = bool(self.streams)
            scratch = torch.empty(self.slot, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self.ring.append(_Slot(scratch, memory_of(scratch), []))
            return self.ring[-1]
        slot = self.ring[0]
        self.ring.rotate(-1)
        while slot.busy:
            slot.busy.pop().synchronize()
        return slot


_NOTHING = _Slot(torch.empty(0, dtype=torch.uint8, device="cpu"), memoryview(bytearray()), [])


def _unstage(segment: Segment, scratch: torch.Tensor) -> None:
    assert segment.dtype is not None
    assert segment.destination is not None
    nbytes = segment.stop - segment.start
    usable = nbytes // segment.dtype.itemsize * segment.dtype.itemsize
    elements = scratch[:usable].view(segment.dtype)
    copy_into(segment.destination, elements.as_strided(segment.destination.shape, segment.strides))


def copy_into(
    destination: torch.Tensor, source: torch.Tensor, *, non_blocking: bool | None = None
) -> None:
    """Copy with a cast, which runs on the destination's side, in the device's current stream.

    A destination on the CPU has its values when the call returns, because the caller may read it at
    once. With `non_blocking=True` (and no cast), it has them when that stream is done.
    """
    if non_blocking is None:
        non_blocking = not destination.is_cpu
    if destination.dtype == source.dtype and source.dtype.itemsize == 1:
        destination, source = destination.view(torch.uint8), source.view(torch.uint8)
    if destination.device != source.device and destination.dtype != source.dtype:
        source = source.to(destination.device, non_blocking=non_blocking)
    destination.copy_(source, non_blocking=non_blocking)


def synchronize(device: torch.device) -> None:
    """Wait for a device, without creating a context on the current device."""
    with torch.accelerator.device_index(device.index):
        torch.accelerator.synchronize(device)


def _aligned(position: int) -> int:
    return -(-position // ALIGN) * ALIGN
