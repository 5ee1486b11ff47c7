"""A new file whose parts are written where they belong, from several threads or processes."""

from __future__ import annotations

import os
from typing import Protocol

from anyrank import faults
from anyrank.files.store import WritableStorage, start_writeback

# For longer writes Linux looks for large pages, and moves others to make room for them: that takes
# three times as long as the write itself where memory is fragmented.
WRITE_BYTES = 64 << 10


class PlacedFile(Protocol):
    """A new file of known size. `in_order`: whether parts have to come from its start to its end.

    A part that nobody writes reads as zeros.
    """

    in_order: bool

    def write(self, offset: int, data: memoryview) -> None: ...

    def finish(self) -> None:
        """Make it durable and close it."""
        ...

    def abandon(self) -> None:
        """Close it as it is."""
        ...


class _LocalPlaced:
    """A local file, written with pwrite."""

    in_order = False

    def __init__(self, path: str, size: int | None) -> None:
        faults.point("file.open")
        flags = os.O_WRONLY | os.O_CLOEXEC
        if size is not None:
            flags |= os.O_CREAT | os.O_EXCL
        self.descriptor = os.open(path, flags, 0o666)
        if size is not None:
            os.ftruncate(self.descriptor, size)

    def write(self, offset: int, data: memoryview) -> None:
        faults.point("file.write")
        start, length = offset, len(data)
        while len(data):
            done = os.pwrite(self.descriptor, data[:WRITE_BYTES], offset)
            data, offset = data[done:], offset + done
        start_writeback(self.descriptor, start, length)

    def finish(self) -> None:
        faults.point("file.fsync")
        os.fsync(self.descriptor)
        os.close(self.descriptor)

    def abandon(self) -> None:
        os.close(self.descriptor)


class _RemotePlaced:
    """An object, which a storage takes in order only."""

    in_order = True

    def __init__(self, store: WritableStorage, path: str) -> None:
        self.sink = store.create(path)
        self.position = 0

    def write(self, offset: int, data: memoryview) -> None:
        assert offset == self.position, f"byte {offset} after {self.position}"
        self.sink.write([data])
        self.position += len(data)

    def finish(self) -> None:
        self.sink.finish()

    def abandon(self) -> None:
        self.sink.abandon()


def create(store: WritableStorage, path: str, size: int) -> PlacedFile:
    """A new file.

    Raises:
        OSError: it is there already, or the storage refuses.
    """
    return _LocalPlaced(path, size) if store.renames else _RemotePlaced(store, path)


def reopen(path: str) -> PlacedFile:
    """A local file that another process created, to write further parts of it."""
    return _LocalPlaced(path, None)
