"""The destination of a conversion: a local path, written next to it, then renamed.

Only files that the conversion itself has written are ever deleted. `overwrite=True` renames an
existing destination.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from anyrank import faults
from anyrank.errors import CheckpointError
from anyrank.files.storage import LocalStorage, storage_for, storing

STORE = LocalStorage()


@dataclass(frozen=True)
class Destination:
    """A local path that is free, or whose contents may be renamed.

    Attributes:
        path: a file or a folder, as the caller passed it, without a trailing slash; for a link, its
            target.
        is_file: whether the result is one file.
        overwrite: whether existing contents may be renamed.
        token: suffix for names next to the path, unique to this conversion.
    """

    path: str
    is_file: bool
    overwrite: bool
    token: str

    @property
    def name(self) -> str:
        """Last part of the path."""
        return os.path.basename(self.path)

    @property
    def folder(self) -> str:
        """Folder in which files are written until all of them exist."""
        return f"{self.path}.unfinished-{self.token}"

    @property
    def written(self) -> str:
        """Path of the result before it is renamed: the folder, or the file in it."""
        return os.path.join(self.folder, self.name) if self.is_file else self.folder

    def prepare(self, nbytes: int) -> None:
        """Make the folder in which the files are written.

        Raises:
            CheckpointError: the folder cannot be made, or the disk has too little space.
        """
        with storing(self.folder):
            STORE.make_folder(self.folder)
            disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if free < nbytes:
            raise CheckpointError(
                f"{self.path}: needs {nbytes} bytes, but only {free} are free. Free some space, or "
                "choose a different path"
            )

    def commit(self) -> str:
        """Rename the result to its final name.

        Returns:
            The new path of a former destination; "" if there was none.

        Raises:
            CheckpointError: the path exists by now, or the disk reports an error.
        """
        with storing(self.path):
            STORE.sync_folder(self.folder)
            faults.point("convert.commit")
            replaced = self._set_aside()
            try:
                STORE.rename(self.written, self.path)
            except OSError:
                if replaced:
                    STORE.rename(replaced, self.path)
                raise
            STORE.sync_folder(os.path.dirname(self.path) or ".")
            if self.is_file:
                os.rmdir(self.folder)
        return replaced

    def _set_aside(self) -> str:
        if _is_free(self.path, self.is_file):
            return ""
        if not self.overwrite:
            raise CheckpointError(
                f"{self.path}: was created by another process during the conversion. Choose a "
                "different path"
            )
        replaced = f"{self.path}.replaced-{self.token}"
        STORE.rename(self.path, replaced)
        return replaced

    def abandon(self) -> None:
        """Remove the written files."""
        with contextlib.suppress(OSError):
            STORE.remove_folder(self.folder)


def destination(
    dst: str | os.PathLike[str], sources: Sequence[str], is_file: bool, overwrite: bool
) -> Destination:
    """Check the destination path, and return the destination.

    Raises:
        ValueError: the path is a URL, is the source, inside or above it, exists, cannot be made, or
            is a pipe, a socket or a device.
    """
    path = os.fspath(dst)
    path = path.rstrip("/") or path
    if "://" in path:
        raise ValueError(
            f"{path}: is a URL, but convert writes only to local paths. Pass a local path, and "
            "copy the result"
        )
    storage_for(path)  # raises for anything that is not a path
    if not path or path == "/":
        raise ValueError(f"dst={path!r}: must be the path of a new file or folder")
    for source in sources:
        if _is_inside(path, source) or _is_inside(source, path):
            raise ValueError(
                f"{path}: is the source {source}, inside it, or above it. Choose a different path"
            )
    # A pipe or a device must not be renamed, because another process may use it.
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ValueError(f"{path}: is neither a file nor a folder. Choose a different path")
    if not _is_free(path, is_file) and not overwrite:
        raise ValueError(
            f"{path}: already exists. Choose a different path, or pass overwrite=True (--overwrite)"
        )
    if os.path.islink(path):
        path = os.path.realpath(path)  # the link itself must not be renamed
    _check_parent(path)
    return Destination(path, is_file, overwrite, uuid.uuid4().hex[:8])


def _is_free(path: str, is_file: bool) -> bool:
    """Return whether the path does not exist, or is an empty folder and the result is a folder."""
    if not os.path.lexists(path):
        return True
    return not is_file and os.path.isdir(path) and not os.listdir(path)


def _check_parent(path: str) -> None:
    """Raise ValueError if a file exists where a folder above the destination must be."""
    above = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise ValueError(f"{path}: {above} is not a folder. Choose a different path")


def _is_inside(inner: str, outer: str) -> bool:
    inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    return f"{inner}/".startswith(f"{outer.rstrip('/')}/")
