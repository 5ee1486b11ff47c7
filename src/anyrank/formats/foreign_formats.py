"""Which tool wrote a checkpoint that is to be resumed. A new tool is a line in a table below."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from anyrank.errors import CheckpointError, LoadError
from anyrank.files.storage import Storage, storage_for
from anyrank.formats import accelerate, dcp, deepspeed, megatron, per_rank, tables, trainer
from anyrank.formats.foreign import ForeignCheckpoint
from anyrank.formats.sources import with_ends

Reader = Callable[[Storage, str], ForeignCheckpoint]

# Folders in order of their signs.
FOLDERS: tuple[tuple[Callable[[list[str]], bool], Reader], ...] = (
    (trainer.recognises, trainer.read),
    (accelerate.recognises, accelerate.read),
    (deepspeed.recognises, deepspeed.read),
    (per_rank.is_verl, per_rank.read_verl),
    (per_rank.is_torch_checkpointing, per_rank.read_torch_checkpointing),
    (megatron.recognises, megatron.read),
    (lambda names: dcp.METADATA in names, tables.read_dcp),
)
FILES = (".ckpt", ".pt", ".pth", ".bin")


def recognises(names: list[str]) -> bool:
    """Whether a folder with these entries is a checkpoint that is read here."""
    return any(sign(names) for sign, _ in FOLDERS)


def read_foreign(path: str) -> ForeignCheckpoint:
    """What a checkpoint of another tool holds, from its headers and small values.

    Raises:
        CheckpointError: nothing there, or nothing that is read here; it is not whole.
        UnsafeFile: a header that lies, or a pickle that would run code.
    """
    storage = storage_for(path)
    try:
        found = _reader(storage, path)(storage, path)
    except LoadError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return replace(found, listing=with_ends(found.listing))


def _reader(storage: Storage, path: str) -> Reader:
    if storage.is_dir(path):
        names = storage.names(path)
        for sign, reader in FOLDERS:
            if sign(names):
                return reader
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
