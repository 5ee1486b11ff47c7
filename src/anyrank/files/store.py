"""Bytes into rest: files written in sequence with checksums, durable before they count.

Every file event passes a point of `anyrank.faults`, so that a test can stop a process at each.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from anyrank import faults
from anyrank.errors import CheckpointError
from anyrank.files.storage import LocalStorage, RemoteStorage, Storage

BLOCK_BYTES = 16 << 20  # of a file, each with a checksum of its own: ranks share the verification

Part = bytes | memoryview


@dataclass(frozen=True)
class Written:
    """A finished file: bytes, and the xxh3-64 of each BLOCK_BYTES of it."""

    size: int
    digests: tuple[str, ...]


class Digester:
    """xxh3-64 of consecutive blocks, fed in parts of any size."""

    def __init__(self) -> None:
        import xxhash  # only files that are written or verified need it

        self.new = xxhash.xxh3_64
        self.hash = self.new()
        self.room = BLOCK_BYTES
        self.size = 0
        self.done: list[str] = []

    def update(self, part: Part) -> None:
        """Take the next bytes."""
        view = memoryview(part)
        self.size += len(view)
        while len(view) >= self.room:
            self.hash.update(view[: self.room])
            view = view[self.room :]
            self.done.append(self.hash.hexdigest())
            self.hash, self.room = self.new(), BLOCK_BYTES
        self.hash.update(view)
        self.room -= len(view)

    def result(self) -> Written:
        """Size and digests of everything taken."""
        rest = (self.hash.hexdigest(),) if self.room < BLOCK_BYTES or not self.done else ()
        return Written(self.size, (*self.done, *rest))


def digest_of(data: Part) -> Written:
    """Size and digests of bytes in memory."""
    digester = Digester()
    digester.update(data)
    return digester.result()


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
class LocalSink:
    """A local file. Buffers are the caller's own; nothing is copied."""

    path: str
    descriptor: int = field(init=False)

    def __post_init__(self) -> None:
        faults.point("file.open")
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self.descriptor = os.open(self.path, flags, 0o666)

    def write(self, parts: Sequence[Part]) -> None:
        faults.point("file.write")
        left = [memoryview(part) for part in parts if len(part)]
        while left:
            done = os.writev(self.descriptor, left)
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]

    def finish(self) -> None:
        faults.point("file.fsync")
        os.fsync(self.descriptor)
        os.close(self.descriptor)

    def abandon(self) -> None:
        os.close(self.descriptor)


class RemoteSink:
    """An object behind fsspec; it appears as a whole when it is finished."""

    def __init__(self, filesystem: Any, path: str) -> None:
        faults.point("file.open")
        self.file = filesystem.open(path, "wb")

    def write(self, parts: Sequence[Part]) -> None:
        faults.point("file.write")
        for part in parts:
            self.file.write(part)

    def finish(self) -> None:
        faults.point("file.fsync")
        self.file.close()

    def abandon(self) -> None:
        # Closing would publish a part of the file as if it were the whole.
        with contextlib.suppress(Exception):
            self.file.discard()


class Store(Storage, Protocol):
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
        faults.point("file.folder")
        os.makedirs(path, exist_ok=True)

    def create(self, path: str) -> Sink:
        return LocalSink(path)

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
        return RemoteSink(self.filesystem, path)

    def rename(self, old: str, new: str) -> None:
        """Copy and delete, object by object: never where a kill in between would matter."""
        faults.point("file.rename")
        self.filesystem.mv(old, new, recursive=True)

    def sync_folder(self, path: str) -> None:
        """Objects are durable once they are there."""

    def remove(self, path: str) -> None:
        faults.point("file.remove")
        self.filesystem.rm_file(path)

    def remove_folder(self, path: str) -> None:
        faults.point("file.remove")
        self.filesystem.rm(path, recursive=True)

    def names(self, path: str) -> list[str]:
        self.filesystem.invalidate_cache()  # other ranks write as well
        return super().names(path) if self.filesystem.exists(path) else []


def store_for(path: str) -> Store:
    """The store that a path or URL belongs to."""
    return RemoteStore(path) if "://" in path else LocalStore()


def write_file(store: Store, path: str, data: bytes) -> Written:
    """Write a small file, durably.

    Raises:
        CheckpointError: the device says no; the file may be there in part.
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


@contextlib.contextmanager
def storing(path: str) -> Any:
    """Turn a device's refusal into an error that names the path and the way out."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(
            f"{path}: cannot be written: {reason}: free space or permissions there, then save again"
        ) from error
