"""Objects in any storage that fsspec supports (s3://, gs://, memory://, ...).

Folders are prefixes, renames are not atomic, and an object appears as a whole.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Generator, Sequence
from functools import cached_property
from typing import Any

from anyrank import faults
from anyrank.files.listing import FileInfo

PART_BYTES = 32 << 20  # sent in one request; S3 accepts at most 10,000 parts per object
SLICE_BYTES = 1 << 20  # a part may be larger by at most this


@contextlib.contextmanager
def asking(path: str) -> Generator[None]:
    """Turn exceptions of a remote storage's library into OSError, which local storage raises."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # each library has its own exceptions
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error


class RemoteFile:
    """An object that is read by byte ranges."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem = filesystem
        self.path = path

    @cached_property
    def info(self) -> FileInfo:
        return self.stat()

    def stat(self) -> FileInfo:
        """Describe the object as it is now."""
        with asking(self.path):
            return _info_of(self.path, self.filesystem.info(self.path))

    def readv(self, buffers: list[memoryview], offset: int) -> int:
        wanted = sum(len(buffer) for buffer in buffers)
        with asking(self.path):
            content = self.filesystem.cat_file(self.path, start=offset, end=offset + wanted)
        data = memoryview(content)
        position = 0
        for buffer in buffers:
            part = data[position : position + len(buffer)]
            buffer[: len(part)] = part
            position += len(part)
        return len(data)

    def close(self) -> None:
        """Do nothing, because no connection is kept open."""


class NewRemoteFile:
    """An object that is written from start to end; it appears when it is finished.

    At most PART_BYTES wait to be sent, plus a copy while they are sent.
    """

    def __init__(self, filesystem: Any, path: str) -> None:
        faults.point("file.open")
        self.path = path
        with asking(path):
            self.file = filesystem.open(path, "wb", block_size=PART_BYTES)

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
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
        # Closing would publish a part of the file as if it were complete. So would the garbage
        # collector, which closes open files.
        with contextlib.suppress(Exception):
            self.file.discard()
        with contextlib.suppress(AttributeError):  # a file in memory has a read-only attribute
            self.file.closed = True


class RemoteStorage:
    """A file system of fsspec. Listings are not cached, because other processes may write."""

    renames = False

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # slow to import, and needed only for remote sources

        try:
            self.filesystem: Any = url_to_fs(url, use_listings_cache=False)[0]
        except ImportError as error:  # it names the package for the protocol
            raise ImportError(f"{url}: {error}") from error

    def find(self, path: str) -> FileInfo | None:
        """Describe an object; None only if the storage says that it does not exist."""
        try:
            with asking(path):
                details = self.filesystem.info(path)
        except FileNotFoundError:
            return None
        return _info_of(path, details) if details["type"] == "file" else None

    def is_file(self, path: str) -> bool:
        return self.find(path) is not None

    def is_dir(self, path: str) -> bool:
        with asking(path):
            return bool(self.filesystem.isdir(path))

    def location(self, path: str) -> str:
        """Return "", because a URL names the same object on every machine."""
        return ""

    def names(self, path: str) -> list[str]:
        """Return the names in a folder; [] if it does not exist, because folders need not exist."""
        try:
            return sorted(self.entries(path))
        except FileNotFoundError:
            return []

    def entries(self, path: str) -> dict[str, bool]:
        """Map the names in a folder to whether each is a folder, with one listing."""
        return {name: entry["type"] == "directory" for name, entry in self._list(path)}

    def sizes(self, path: str) -> dict[str, int]:
        """Map the objects in a folder to their sizes in bytes, with one listing."""
        return {name: int(e["size"]) for name, e in self._list(path) if e["type"] == "file"}

    def _list(self, path: str) -> list[tuple[str, dict[str, Any]]]:
        with asking(path):
            details: list[dict[str, Any]] = self.filesystem.ls(path, detail=True)
        return [(entry["name"].rstrip("/").rsplit("/", 1)[-1], entry) for entry in details]

    def open(self, path: str) -> RemoteFile:
        return RemoteFile(self.filesystem, path)

    def make_folder(self, path: str) -> None:
        """Do nothing, because folders need not exist."""

    def create(self, path: str) -> NewRemoteFile:
        return NewRemoteFile(self.filesystem, path)

    def rename(self, old: str, new: str) -> None:
        """Copy, then delete, object by object; callers must tolerate a kill in between."""
        faults.point("file.rename")
        with asking(old):
            for name in self.names(old):
                self.filesystem.cp_file(f"{old}/{name}", f"{new}/{name}")
            self.filesystem.rm(old, recursive=True)

    def copy(self, old: str, new: str) -> None:
        """Copy an object within the store."""
        faults.point("file.copy")
        with asking(old):
            self.filesystem.cp_file(old, new)

    def sync_folder(self, path: str) -> None:
        """Do nothing, because objects are durable once they appear."""

    def remove(self, path: str) -> None:
        faults.point("file.remove")
        with asking(path):
            self.filesystem.rm_file(path)

    def remove_folder(self, path: str) -> None:
        """Remove the objects under a prefix, if any exist."""
        faults.point("file.remove")
        with asking(path), contextlib.suppress(FileNotFoundError):
            self.filesystem.rm(path, recursive=True)


def _info_of(path: str, details: dict[str, Any]) -> FileInfo:
    tags = (details.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "created"))
    version = next((str(tag) for tag in tags if tag is not None), "")
    return FileInfo(path, int(details["size"]), version)
