"""Where bytes are: a local file system, or any that fsspec knows. Seven questions, nothing more."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import stat
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from functools import cache
from typing import Any, Protocol

from anyrank.errors import LoadError
from anyrank.files.listing import FileInfo


class OpenFile(Protocol):
    """A file opened for reading at offsets, from any thread."""

    def readv(self, buffers: list[memoryview], offset: int) -> int:
        """Fill the buffers in order from `offset`; return bytes read, fewer at the end."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class Storage(Protocol):
    """A place that files are read from. Paths are strings, because `Path` mangles URLs."""

    def is_file(self, path: str) -> bool: ...

    def is_dir(self, path: str) -> bool: ...

    def names(self, path: str) -> list[str]: ...

    def entries(self, path: str) -> dict[str, bool]: ...

    def info(self, path: str) -> FileInfo: ...

    def open(self, path: str) -> OpenFile: ...


class NotAFile(OSError):
    """A pipe, socket or device in a file's place: to read it could block for ever."""


class LocalFile:
    """A local file, read with preadv: no mapping, so nothing ever aliases it."""

    def __init__(self, path: str) -> None:
        # Not to wait for a pipe's writer; for a regular file the flag means nothing.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            os.close(self.descriptor)
            raise NotAFile(errno.EINVAL, "is not a regular file", path)

    def readv(self, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(self.descriptor, buffers, offset)

    def close(self) -> None:
        os.close(self.descriptor)


class LocalStorage:
    """The local file system."""

    def is_file(self, path: str) -> bool:
        return os.path.isfile(path)

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(path)

    def names(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def entries(self, path: str) -> dict[str, bool]:
        """Each name in a folder, and whether it is a folder."""
        with os.scandir(path) as found:
            return {entry.name: entry.is_dir() for entry in found}

    def info(self, path: str) -> FileInfo:
        status = os.stat(path)
        place = f"{_machine()}:{status.st_dev}:{status.st_ino}"
        version = str(status.st_mtime_ns)
        return FileInfo(path, status.st_size, version, place=place)

    def open(self, path: str) -> OpenFile:
        return LocalFile(path)


@cache
def _machine() -> str:
    """This machine since it was started."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


END_BYTES = 64 << 10  # headers, directories with checksums, and some of the weights


def digest_of_ends(file: OpenFile, info: FileInfo) -> str:
    """A digest of a file's first and last 64 KiB, which distinguishes a copy from another file."""
    length = min(END_BYTES, info.size)
    digest = hashlib.blake2b(digest_size=16)
    for offset in sorted({0, info.size - length}):
        digest.update(read_range(file, info.path, offset, length))
    return digest.hexdigest()


def is_copy(file: OpenFile, now: FileInfo, listed: FileInfo) -> bool:
    """Whether a file is another copy of the one that was listed: each machine may have its own."""
    if not listed.ends or now.place == listed.place or now.size != listed.size:
        return False
    return digest_of_ends(file, now) == listed.ends


class _RemoteFile:
    """A file that fsspec reads by ranges."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem = filesystem
        self.path = path

    def readv(self, buffers: list[memoryview], offset: int) -> int:
        wanted = sum(len(buffer) for buffer in buffers)
        with asking(self.path):
            found = self.filesystem.cat_file(self.path, start=offset, end=offset + wanted)
        data = memoryview(found)
        position = 0
        for buffer in buffers:
            part = data[position : position + len(buffer)]
            buffer[: len(part)] = part
            position += len(part)
        return len(data)

    def close(self) -> None:
        """Nothing is held open."""


@contextlib.contextmanager
def asking(path: str) -> Generator[None]:
    """Turn what a remote storage's own library raises into an OSError, as local storage does."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # each library has its own exceptions
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error


class RemoteStorage:
    """Any file system that fsspec knows (s3://, gs://, memory://, ...).

    Listings are never kept: another process may have written since.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # heavy, and only remote sources need it

        self.filesystem: Any = url_to_fs(url, use_listings_cache=False)[0]

    def is_file(self, path: str) -> bool:
        """False only when the storage says so: a storage that does not answer is an OSError."""
        try:
            with asking(path):
                return bool(self.filesystem.info(path)["type"] == "file")
        except FileNotFoundError:
            return False

    def is_dir(self, path: str) -> bool:
        with asking(path):
            return bool(self.filesystem.isdir(path))

    def names(self, path: str) -> list[str]:
        with asking(path):
            found: list[str] = self.filesystem.ls(path, detail=False)
        return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in found)

    def entries(self, path: str) -> dict[str, bool]:
        """Each name in a folder, and whether it is a folder, by one listing."""
        with asking(path):
            found: list[dict[str, Any]] = self.filesystem.ls(path, detail=True)
        return {
            entry["name"].rstrip("/").rsplit("/", 1)[-1]: entry["type"] == "directory"
            for entry in found
        }

    def info(self, path: str) -> FileInfo:
        with asking(path):
            details: dict[str, Any] = self.filesystem.info(path)
        tags = (details.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "created"))
        version = next((str(tag) for tag in tags if tag is not None), "")
        return FileInfo(path, int(details["size"]), version)

    def open(self, path: str) -> OpenFile:
        return _RemoteFile(self.filesystem, path)


def storage_for(path: str) -> Storage:
    """The storage that a path or URL belongs to."""
    if path.startswith("file://"):
        raise LoadError(f"{path}: give a local path without file://")
    return RemoteStorage(path) if "://" in path else LocalStorage()


def absolute(path: str) -> str:
    """A local path as it is wherever the process goes; a URL unchanged."""
    return path if "://" in path else os.path.abspath(path)


def join_path(folder: str, name: str) -> str:
    """A name inside a folder, for paths and URLs alike."""
    return f"{folder.rstrip('/')}/{name}"


def inside(folder: str, name: str) -> str:
    """A path that an index names, which must stay inside the index's folder.

    Raises:
        LoadError: the name is absolute or climbs out.
    """
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or "://" in name:
        raise LoadError(f"{folder}: its index names {name!r}, which lies outside the folder")
    return join_path(folder, name)


def read_range(file: OpenFile, path: str, offset: int, length: int) -> bytes:
    """Bytes [offset, offset + length) of a file.

    Raises:
        LoadError: the file ends before that.
    """
    data = bytearray(length)
    read_exactly(file, path, [memoryview(data)], offset)
    return bytes(data)


def read_whole(storage: Storage, path: str, most: int | None = None) -> bytes:
    """All bytes of a file.

    Raises:
        LoadError: it has more than `most` bytes, or ends early.
    """
    size = storage.info(path).size
    if most is not None and size > most:
        raise LoadError(f"{path}: {size} bytes are too many for this file")
    with contextlib.closing(storage.open(path)) as file:
        return read_range(file, path, 0, size)


def read_exactly(file: OpenFile, path: str, buffers: list[memoryview], offset: int) -> None:
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
                f"{path}: reading at byte {offset} failed: {error} ({reason})"
            ) from error
        if got <= 0:
            missing = sum(len(buffer) for buffer in left)
            raise LoadError(
                f"{path}: ends at byte {offset}, {missing} bytes too early: "
                "the file is truncated or was changed while it was read; copy it again"
            )
        offset += got
        while left and got >= len(left[0]):
            got -= len(left.pop(0))
        if got:
            left[0] = left[0][got:]


def split(
    parts: Iterable[bytes | memoryview], lengths: Iterable[int]
) -> Iterator[list[memoryview]]:
    """Groups of consecutive parts, of as many bytes as each length says; long parts are cut."""
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
