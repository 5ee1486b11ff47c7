"""What a checkpoint of another tool holds, to begin a run from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from anyrank.errors import CheckpointError, LoadError
from anyrank.files.storage import Storage, storage_for
from anyrank.formats.sources import FOLDERS, with_ends
from anyrank.formats.tools import tables
from anyrank.formats.tools.foreign import ForeignCheckpoint

FILES = (".ckpt", ".pt", ".pth", ".bin")


def recognises(names: list[str]) -> bool:
    """Whether a folder with these entries is a checkpoint that is read here."""
    return any(each.run and each.sign(names) for each in FOLDERS)


def read_foreign(path: str, is_sent: bool = False) -> ForeignCheckpoint:
    """What a checkpoint of another tool holds, from its headers and small values.

    Args:
        path: of it.
        is_sent: whether other ranks get it, and read files that they see.

    Raises:
        CheckpointError: nothing there, or nothing that is read here; it is not whole.
        UnsafeFile: a header that lies, or a pickle that would run code.
    """
    storage = storage_for(path)
    try:
        found = _reader(storage, path)(storage, path)
        return replace(found, listing=with_ends(found.listing)) if is_sent else found
    except LoadError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _reader(storage: Storage, path: str) -> Callable[[Storage, str], ForeignCheckpoint]:
    if storage.is_dir(path):
        names = storage.names(path)
        for each in FOLDERS:
            if each.run is not None and each.sign(names):
                return each.run
        shown = ", ".join(names[:20]) or "nothing"
        raise CheckpointError(
            f"{path}: no checkpoint of a tool whose runs are read here; the folder holds {shown}. "
            "For weights alone call anyrank.load"
        )
    if storage.is_file(path):
        if path.lower().endswith(FILES):
            return tables.read_file
        raise CheckpointError(
            f"{path}: a run is read from {', '.join(FILES)} and folders; for weights alone call "
            "anyrank.load"
        )
    raise CheckpointError(
        f"{path}: does not exist (working directory {os.getcwd()}): resume takes 'auto', 'must', a "
        "step, or the path of a checkpoint"
    )
