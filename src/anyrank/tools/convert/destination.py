"""The destination of a conversion: a local path, written beside it, then renamed into place.

Nothing is ever deleted except files that the conversion itself has written: `overwrite=True`
renames an existing destination.
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
        path: a file or a folder, as the caller named it, without a trailing slash; for a link, its
            target.
        is_file: whether it becomes one file.
        overwrite: whether existing contents may be renamed.
        token: suffix for names beside it, unique to this conversion.
    """

    path: str
    is_file: bool
    overwrite: bool
    token: str

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    @property
    def folder(self) -> str:
        """The folder in which files are written until all of them exist."""
        return f"{self.path}.unfinished-{self.token}"

    @property
    def written(self) -> str:
        """The result that is renamed to the path: the folder, or the file in it."""
        return os.path.join(self.folder, self.name) if self.is_file else self.folder

    def prepare(self, nbytes: int) -> None:
        """Make the folder in which the files are written.

        Raises:
            CheckpointError: it cannot be made, or there is too little space.
        """
        with storing(self.folder):
            STORE.make_folder(self.folder)
            disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if free < nbytes:
            raise CheckpointError(
                f"{self.path}: takes {nbytes} bytes, and {free} are free there: free space, or "
                "give another place"
            )

    def commit(self) -> str:
        """Rename the result to its final name.

        Returns:
            The new path of a former destination; "" if there was none.

        Raises:
            CheckpointError: the path was taken in the meantime, or the disk refuses.
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
                f"{self.path}: came there during the conversion: give another place"
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
    """Check where to write.

    Raises:
        ValueError: a URL, the source itself, a place inside it or above it, one that is taken, one
            that cannot be made, or a pipe, a socket or a device.
    """
    path = os.fspath(dst)
    path = path.rstrip("/") or path
    if "://" in path:
        raise ValueError(
            f"{path}: is a URL, and convert writes to local paths: give a local path, and copy "
            "the result"
        )
    storage_for(path)  # refuses anything that is not a path here
    if not path or path == "/":
        raise ValueError(f"dst={path!r}: give the path of a new file or folder")
    for source in sources:
        if _is_inside(path, source) or _is_inside(source, path):
            raise ValueError(
                f"{path}: is the source {source}, inside it, or above it: give another place"
            )
    # Renaming a pipe or a device would take it away from whoever uses it.
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ValueError(f"{path}: is neither a regular file nor a folder: give another place")
    if not _is_free(path, is_file) and not overwrite:
        raise ValueError(
            f"{path}: is there already: give another place, or overwrite=True (--overwrite)"
        )
    if os.path.islink(path):
        path = os.path.realpath(path)  # the link itself must not be renamed
    _check_parent(path)
    return Destination(path, is_file, overwrite, uuid.uuid4().hex[:8])


def _is_free(path: str, is_file: bool) -> bool:
    """Return whether the path is free, or an empty folder where a folder will be written."""
    if not os.path.lexists(path):
        return True
    return not is_file and os.path.isdir(path) and not os.listdir(path)


def _check_parent(path: str) -> None:
    """Raise ValueError if a file is where a folder above the destination has to be."""
    above = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise ValueError(
            f"{path}: {above} is not a folder, so nothing goes in it: give another place"
        )


def _is_inside(inner: str, outer: str) -> bool:
    inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    return f"{inner}/".startswith(f"{outer.rstrip('/')}/")
