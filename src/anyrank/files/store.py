"""Files written from start to end, with checksums, and durable before they count.

Every file event passes a point of `anyrank.faults`, so that a test can stop a process at each.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from anyrank import faults
from anyrank.errors import CheckpointError
from anyrank.files.storage import LocalStorage, RemoteStorage, Storage, asking, join_path

SYNC_FILE_RANGE_WRITE = 2
PART_BYTES = 32 << 20  # of an object, sent in one request; S3 takes 10,000 of them
WRITEBACK_BYTES = 32 << 20  # of a local file, which the kernel is asked to write at a time
SLICE_BYTES = 1 << 20  # most by which a part is larger

Part = bytes | memoryview


@dataclass(frozen=True)
class Written:
    """A finished small file: its bytes, and their xxh3-64 in hex."""

    size: int
    digest: str


def digest_of(data: Part) -> Written:
    """Size and digest of bytes in memory."""
    import xxhash  # only files that are written or verified need it

    return Written(len(data), xxhash.xxh3_64_hexdigest(data))


class Sink(Protocol):
    """A new file that is written from its start to its end."""

    def write(self, parts: Sequence[Part]) -> None: ...

    def finish(self) -> None:
        """Make it durable and close it."""
        ...

    def abandon(self) -> None:
        """Close it as it is."""
        ...


@dataclass
class _LocalSink:
    """A local file. Buffers are the caller's own; nothing is copied."""

    path: str
    descriptor: int = field(init=False)
    size: int = 0
    started: int = 0  # up to here, the kernel has been asked to write

    def __post_init__(self) -> None:
        faults.point("file.open")
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self.descriptor = os.open(self.path, flags, 0o666)

    def write(self, parts: Sequence[Part]) -> None:
        faults.point("file.write")
        left = [memoryview(part) for part in parts if len(part)]
        self.size += sum(map(len, left))
        while left:
            done = os.writev(self.descriptor, left)
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]
        if self.size - self.started >= WRITEBACK_BYTES:
            _start_writeback(self.descriptor, self.started, self.size - self.started)
            self.started = self.size

    def finish(self) -> None:
        faults.point("file.fsync")
        os.fsync(self.descriptor)
        os.close(self.descriptor)

    def abandon(self) -> None:
        os.close(self.descriptor)


def _start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Let the kernel write a range to the disk from now on, so that fsync finds little left.

    A hint: Linux waits for nothing here, and elsewhere nothing happens.
    """
    call = _of_libc("sync_file_range")
    if call is not None:
        call(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), SYNC_FILE_RANGE_WRITE)


@functools.cache
def _of_libc(name: str) -> Any:
    """The C library's function of this name, or None: to find it takes longer than to call it."""
    return getattr(ctypes.CDLL(None), name, None)


class _RemoteSink:
    """An object that fsspec writes; it appears as a whole when it is finished.

    What waits to be sent is PART_BYTES, and a copy of it while it is sent.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        faults.point("file.open")
        self.path = path
        with asking(path):
            self.file = filesystem.open(path, "wb", block_size=PART_BYTES)

    def write(self, parts: Sequence[Part]) -> None:
        faults.point("file.write")
        with asking(self.path):
            for part in parts:
                view = memoryview(part)
                for start in range(0, len(view), SLICE_BYTES):
                    self.file.write(view[start : start + SLICE_BYTES])

    def finish(self) -> None:
        faults.point("file.fsync")
        with asking(self.path):
            self.file.close()

    def abandon(self) -> None:
        # Closing would publish a part of the file as if it were the whole, as would the garbage
        # collector, which closes what is open.
        with contextlib.suppress(Exception):
            self.file.discard()
        with contextlib.suppress(AttributeError):  # a file in memory has one that is read only
            self.file.closed = True


class WritableStorage(Storage, Protocol):
    """A place that files are written to. `renames`: whether a folder moves in one step."""

    renames: bool

    def make_folder(self, path: str) -> None: ...

    def create(self, path: str) -> Sink: ...

    def rename(self, old: str, new: str) -> None: ...

    def sync_folder(self, path: str) -> None: ...

    def remove(self, path: str) -> None: ...

    def remove_folder(self, path: str) -> None: ...


class LocalStore(LocalStorage):
    """The local file system."""

    renames = True

    def make_folder(self, path: str) -> None:
        """Make it and what is missing above it; each survives a power cut."""
        faults.point("file.folder")
        missing = [path.rstrip("/") or "/"]
        while (above := os.path.dirname(missing[-1]) or ".") and not os.path.lexists(above):
            missing.append(above)
        for folder in reversed(missing):
            if not os.path.isdir(folder):
                os.makedirs(folder, exist_ok=True)
                with contextlib.suppress(PermissionError):  # a parent that may not be listed
                    self.sync_folder(os.path.dirname(folder) or ".")

    def create(self, path: str) -> Sink:
        return _LocalSink(path)

    def rename(self, old: str, new: str) -> None:
        faults.point("file.rename")
        os.rename(old, new)

    def sync_folder(self, path: str) -> None:
        faults.point("file.fsync")
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        faults.point("file.remove")
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        faults.point("file.remove")
        shutil.rmtree(path)


class RemoteStore(RemoteStorage):
    """Any file system that fsspec knows; its folders are prefixes, and nothing is renamed."""

    renames = False

    def make_folder(self, path: str) -> None:
        """Folders need not exist."""

    def create(self, path: str) -> Sink:
        return _RemoteSink(self.filesystem, path)

    def rename(self, old: str, new: str) -> None:
        """Copy, then delete, object by object: never where a kill in between would matter."""
        faults.point("file.rename")
        with asking(old):
            for name in self.names(old):
                self.filesystem.cp_file(join_path(old, name), join_path(new, name))
            self.filesystem.rm(old, recursive=True)

    def sync_folder(self, path: str) -> None:
        """Objects are durable once they are there."""

    def remove(self, path: str) -> None:
        faults.point("file.remove")
        with asking(path):
            self.filesystem.rm_file(path)

    def remove_folder(self, path: str) -> None:
        """Remove the objects under a prefix, which there may be none of."""
        faults.point("file.remove")
        with asking(path), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm(path, recursive=True)

    def names(self, path: str) -> list[str]:
        try:
            return super().names(path)
        except FileNotFoundError:
            return []


def store_for(path: str) -> WritableStorage:
    """The store that a path or URL belongs to.

    Raises:
        ValueError: a file:// URL, for which there is the path.
    """
    if path.startswith("file://"):
        raise ValueError(f"{path}: give a local path without file://")
    return RemoteStore(path) if "://" in path else LocalStore()


def write_file(store: WritableStorage, path: str, data: bytes) -> Written:
    """Write a small file, durably.

    Raises:
        CheckpointError: the device refuses; the file may be there in part.
    """
    with storing(path):
        sink = store.create(path)
        try:
            sink.write([data])
        except BaseException:
            sink.abandon()
            raise
        sink.finish()
    return digest_of(data)


def storing(path: str) -> contextlib.AbstractContextManager[None]:
    """Turn a device's refusal into an error that names the path and the way out."""
    return _naming(path, "written", "free space or permissions there, then save again")


def reading(path: str) -> contextlib.AbstractContextManager[None]:
    """Turn a storage that does not answer into an error: it must not pass for an empty folder."""
    return _naming(path, "read", "check the path, permissions and the network there")


@contextlib.contextmanager
def _naming(path: str, done: str, way_out: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot be {done}: {reason}: {way_out}") from error
