"""What a checkpoint of another tool holds, to begin a run from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from anyrank.errors import CheckpointError, LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, storage_for
from anyrank.foreign import accelerate, deepspeed, megatron, per_rank, tables, trainer
from anyrank.foreign.checkpoint import ForeignCheckpoint
from anyrank.formats.sources import format_of_folder, with_fingerprints
from anyrank.formats.weight_files import FILES, format_of


@dataclass(frozen=True)
class Tool:
    """What reads the folders of a tool.

    Attributes:
        run: reads the whole run, to go on from.
        weights: lists them alone; None where that takes the whole run.
    """

    run: Callable[[Storage, str], ForeignCheckpoint]
    weights: Callable[[Storage, str], Listing] | None = None


# By the names of `sources.FOLDERS`, which tells them apart.
TOOLS = {
    "trainer": Tool(trainer.read, accelerate.list_folder),
    "accelerate": Tool(accelerate.read, accelerate.list_folder),
    "deepspeed": Tool(deepspeed.read, accelerate.list_folder),
    "verl": Tool(per_rank.read_verl),
    "torch_checkpointing": Tool(per_rank.read_torch_checkpointing),
    "megatron": Tool(megatron.read),
    "dcp": Tool(tables.read_dcp),
}


def list_weights(name: str, storage: Storage, folder: str) -> Listing:
    """The weights in a folder of the tool of this name.

    Raises:
        LoadError, UnsafeFile: as its reader.
    """
    tool = TOOLS[name]
    if tool.weights is not None:
        return tool.weights(storage, folder)
    return tool.run(storage, folder).model("model")


def read_foreign(path: str, far: bool = False) -> ForeignCheckpoint:
    """What a checkpoint of another tool holds, from its headers and small values.

    Args:
        path: of it.
        far: whether ranks on other machines read it too, each what it sees.

    Raises:
        CheckpointError: nothing there, or nothing that is read here; it is not whole.
        UnsafeFile: a header that lies, or a pickle that would run code.
    """
    storage = storage_for(path)
    try:
        found = _reader(storage, path)(storage, path)
        return replace(found, listing=with_fingerprints(found.listing)) if far else found
    except LoadError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _reader(storage: Storage, path: str) -> Callable[[Storage, str], ForeignCheckpoint]:
    if storage.is_dir(path):
        names = storage.names(path)
        tool = TOOLS.get(format_of_folder(names))
        if tool is not None:
            return tool.run
        shown = ", ".join(names[:20]) or "nothing"
        raise CheckpointError(
            f"{path}: no checkpoint of a tool whose runs are read here; the folder holds {shown}. "
            "For weights alone call anyrank.load"
        )
    if storage.is_file(path):
        if format_of(path) == "torch":
            return tables.read_file
        endings = ", ".join(ending for ending, name in FILES.items() if name == "torch")
        raise CheckpointError(
            f"{path}: a run is read from {endings} and folders; for weights alone call anyrank.load"
        )
    raise CheckpointError(
        f"{path}: does not exist (working directory {os.getcwd()}): resume takes 'auto', 'must', a "
        "step, or the path of a checkpoint"
    )
