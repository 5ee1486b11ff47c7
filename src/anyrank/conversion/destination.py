"""Where a conversion goes: checked first, written beside it, and renamed into place at the end."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from anyrank import faults
from anyrank.errors import AnyrankError, CheckpointError
from anyrank.files.formats import list_source
from anyrank.files.manifest import MANIFEST
from anyrank.files.storage import join_path
from anyrank.files.store import Store, store_for, storing

UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Destination:
    """A place that holds nothing, or what may be replaced.

    Attributes:
        path: a file or a folder, as the caller named it, without a slash at its end.
        store: the storage that it is in.
        is_file: whether it is one file.
        folder: where files are written until all of them are there.
    """

    path: str
    store: Store
    is_file: bool
    folder: str

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    def prepare(self, nbytes: int) -> None:
        """Make the folder that is written to.

        Raises:
            CheckpointError: it cannot be made, or has not so much space.
        """
        with storing(self.folder):
            self.store.make_folder(self.folder)
        if self.store.renames:
            with contextlib.suppress(OSError, AttributeError):
                disk = os.statvfs(self.folder)
                free = disk.f_bavail * disk.f_frsize
                if free < nbytes:
                    raise CheckpointError(
                        f"{self.path}: takes {nbytes} bytes, and {free} are free there: free "
                        "space, or give another place"
                    )

    def commit(self) -> None:
        """Give what was written its name.

        Raises:
            CheckpointError: something else came there in the meantime, or the storage refuses.
        """
        if not self.store.renames:
            return
        with storing(self.path):
            self.store.sync_folder(self.folder)
            faults.point("convert.commit")
            written = join_path(self.folder, self.name) if self.is_file else self.folder
            old = f"{self.path}.replaced-{uuid.uuid4().hex[:8]}"
            is_replaced = os.path.lexists(self.path) and not _is_empty_folder(self.path)
            if self.is_file:
                os.replace(written, self.path)
                os.rmdir(self.folder)
            else:
                if is_replaced:
                    self.store.rename(self.path, old)
                self.store.rename(written, self.path)
            self.store.sync_folder(os.path.dirname(self.path) or ".")
            if is_replaced and not self.is_file:
                self.store.remove_folder(old)

    def abandon(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):
            self.store.remove_folder(self.folder)


def destination(
    dst: str | os.PathLike[str], sources: Sequence[str], is_file: bool, overwrite: bool
) -> Destination:
    """Where to write.

    Raises:
        ValueError: the source itself, a place inside it or above it, or one that must not be
            replaced.
    """
    path = os.fspath(dst)
    path = path.rstrip("/") or path
    store = store_for(path)
    if not path or path == "/":
        raise ValueError(f"dst={path!r}: give the path of a new file or folder")
    for source in sources:
        if _is_inside(path, source) or _is_inside(source, path):
            raise ValueError(
                f"{path}: is the source {source}, inside it, or above it: give another place"
            )
    if store.is_file(path) or store.is_dir(path):
        _check_replaceable(store, path, is_file, overwrite)
    elif store.renames and os.path.lexists(path):
        raise ValueError(f"{path}: is there, and neither a file nor a folder: give another place")
    folder = f"{path}{UNFINISHED}{uuid.uuid4().hex[:8]}" if store.renames else path
    if is_file and not store.renames:
        folder = path.rsplit("/", 1)[0]
    return Destination(path, store, is_file, folder)


def _is_inside(inner: str, outer: str) -> bool:
    if "://" in inner or "://" in outer:
        return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")
    here, there = os.path.realpath(inner), os.path.realpath(outer)
    return f"{here}/".startswith(f"{there.rstrip('/')}/")


def _check_replaceable(store: Store, path: str, is_file: bool, overwrite: bool) -> None:
    is_folder = store.is_dir(path)
    if is_folder and not is_file and not store.names(path):
        return
    if not overwrite:
        raise ValueError(f"{path}: is there already: give another place, or overwrite=True")
    if is_folder == is_file:
        raise ValueError(
            f"{path}: is a {'folder' if is_folder else 'file'}, and would become a "
            f"{'file' if is_file else 'folder'}: give another place"
        )
    if is_folder:
        names = store.names(path)
        plain = MANIFEST not in names and not any(store.is_dir(join_path(path, n)) for n in names)
        try:
            list_source(path)
        except AnyrankError:
            plain = False
        if not plain:
            raise ValueError(
                f"{path}: is not a folder of weights and nothing else, so it is not replaced: "
                "give another place"
            )


def _is_empty_folder(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path)
