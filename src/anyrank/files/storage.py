"""Paths and URLs: the storage of each, and operations on bytes that work for both."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from anyrank.errors import CheckpointError, LoadError, WrongValue
from anyrank.files.local import LocalStorage, NewLocalFile

if TYPE_CHECKING:
    from anyrank.files.object_store import NewRemoteFile, RemoteStorage

Storage: TypeAlias = "LocalStorage | RemoteStorage"
NewFile: TypeAlias = "NewLocalFile | NewRemoteFile"


class OpenFile(Protocol):
    """A file opened for reading at offsets, from any thread."""

    path: str

    def readv(self, buffers: list[memoryview], offset: int) -> int:
        """Fill the buffers in order from `offset`; return the number of bytes read, fewer at the
        end.
        """
        ...

    def close(self) -> None:
        """Release the file."""
        ...


def storage_for(path: str) -> Storage:
    """Return the storage to which a path or URL belongs.

    Raises:
        ValueError: a file:// URL; or a path with ~, which only a shell expands.
    """
    if path == "~" or path.startswith("~/"):
        raise WrongValue(f"{path}: only a shell expands '~'; pass os.path.expanduser({path!r})")
    if path.startswith("file://"):
        raise WrongValue(f"{path}: pass a local path without file://")
    if "://" not in path:
        return LocalStorage()
    from anyrank.files.object_store import RemoteStorage

    return RemoteStorage(path)


@dataclass(frozen=True)
class FileRecord:
    """One file of a step.

    Attributes:
        size: bytes.
        xxh3_64: hash of its bytes, in hex.
    """

    size: int
    xxh3_64: str


def record_of(data: bytes | memoryview) -> FileRecord:
    """Return the size and the hash of bytes in memory."""
    import xxhash  # only files that are written or verified need it

    return FileRecord(len(data), xxhash.xxh3_64_hexdigest(data))


def write_file(storage: Storage, path: str, data: bytes) -> FileRecord:
    """Write a small file, durably.

    Raises:
        CheckpointError: the device reports an error; a part of the file may remain.
    """
    with storing(path):
        file = storage.create(path)
        try:
            file.write([data])
        except BaseException:
            file.abandon()
            raise
        file.finish()
    return record_of(data)


def storing(path: str) -> contextlib.AbstractContextManager[None]:
    """Turn the device's errors in the block into one that names the path and the way out."""
    return _naming(path, "written", "Free space there or fix its permissions, then save again.")


def reading(path: str) -> contextlib.AbstractContextManager[None]:
    """Turn the storage's errors in the block into a CheckpointError; no answer is not an empty
    folder.
    """
    return _naming(path, "read", "Check the path, its permissions and the network.")


@contextlib.contextmanager
def _naming(path: str, done: str, way_out: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot be {done}: {reason}. {way_out}") from error


def absolute(path: str) -> str:
    """Make a local path absolute, so that it is valid after a change of directory; keep a URL."""
    return path if "://" in path else os.path.abspath(path)


def join_path(folder: str, name: str) -> str:
    """Join a folder and a name, for paths and URLs."""
    return f"{folder.rstrip('/')}/{name}"


def inside(folder: str, name: str) -> str:
    """Join a folder and a name from its index; check that the name stays inside the folder.

    Raises:
        LoadError: the name is absolute or leads out of the folder.
    """
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or "://" in name:
        raise LoadError(f"{folder}: its index names {name!r}, which is outside the folder")
    return join_path(folder, name)


def read_range(file: OpenFile, offset: int, length: int) -> bytes:
    """Read bytes [offset, offset + length) of a file.

    Raises:
        LoadError: the file ends earlier.
    """
    data = bytearray(length)
    read_exactly(file, [memoryview(data)], offset)
    return bytes(data)


def read_whole(storage: Storage, path: str, most: int | None = None) -> bytes:
    """Read all bytes of a file.

    Raises:
        LoadError: the file has more than `most` bytes, or ends early.
    """
    with contextlib.closing(storage.open(path)) as file:
        size = file.info.size
        if most is not None and size > most:
            raise LoadError(f"{path}: {size} bytes are too many; expected at most {most}")
        return read_range(file, 0, size)


def read_exactly(file: OpenFile, buffers: list[memoryview], offset: int) -> None:
    """Fill all buffers from `offset`, however many calls that takes.

    Raises:
        LoadError: the file ends early, or the device reports an error.
    """
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        try:
            got = file.readv(left, offset)
        except OSError as error:
            reason = errno.errorcode.get(error.errno or 0, "OSError")
            raise LoadError(
                f"{file.path}: reading at byte {offset} failed: {error} ({reason})"
            ) from error
        if got <= 0:
            missing = sum(len(buffer) for buffer in left)
            raise LoadError(
                f"{file.path}: ends at byte {offset}, {missing} bytes too early. The file is "
                "truncated or was changed while it was read; copy it again."
            )
        offset += got
        while left and got >= len(left[0]):
            got -= len(left.pop(0))
        if got:
            left[0] = left[0][got:]


def split(
    parts: Iterable[bytes | memoryview], lengths: Iterable[int]
) -> Iterator[list[memoryview]]:
    """Group consecutive parts into groups of the given lengths in bytes; cut parts that are too
    long.
    """
    left, sizes = deque(memoryview(part) for part in parts if len(part)), iter(lengths)
    while left:
        group, room = list[memoryview](), next(sizes)
        while left and room:
            view = left.popleft()
            if len(view) > room:
                left.appendleft(view[room:])
            group.append(view[:room])
            room -= len(group[-1])
        yield group
