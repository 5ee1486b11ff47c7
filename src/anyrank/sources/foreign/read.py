"""Reads a checkpoint of another tool, so that a run can start from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from anyrank.errors import CheckpointError, LoadError
from anyrank.files.fingerprints import with_fingerprints
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, storage_for
from anyrank.sources.foreign import accelerate, deepspeed, per_rank, scripts
from anyrank.sources.foreign.checkpoint import ForeignCheckpoint
from anyrank.sources.readers.folders import format_of_folder
from anyrank.sources.weight_files import format_of_file

Reader = Callable[[Storage, str], ForeignCheckpoint]


@dataclass(frozen=True)
class Tool:
    """How the folders of a tool are read.

    Attributes:
        read: reads the whole checkpoint; None if the folders are only recognized.
        list_weights: lists only the weights; by default those that `read` finds.
        way_out: for folders that are not read: what they are, and how to convert them.
    """

    read: Reader | None = None
    list_weights: Callable[[Storage, str], Listing] | None = None
    way_out: str = ""

    def reader(self, folder: str) -> Reader:
        """Return `read`; raise LoadError for a folder that is not read."""
        if self.read is None:
            raise LoadError(f"{folder}: is {self.way_out}, and pass that folder.")
        return self.read


# By name in FOLDERS of `readers/folders.py`; the weights of "dcp" are listed by `readers/dcp.py`.
TOOLS = {
    "trainer": Tool(accelerate.read, accelerate.list_folder),
    "accelerate": Tool(accelerate.read, accelerate.list_folder),
    "deepspeed": Tool(deepspeed.read, accelerate.list_folder),
    "torch_checkpointing": Tool(per_rank.read_torch_checkpointing),
    "dcp": Tool(scripts.read_dcp),
    "verl": Tool(
        way_out="saved by verl's FSDP workers, with one file per rank. Merge the files into a "
        "Hugging Face folder with verl (python -m verl.model_merger merge --backend fsdp)"
    ),
    "megatron": Tool(
        way_out="a torch_dist checkpoint of Megatron. Convert it into a Hugging Face folder with "
        "Megatron's tools (Megatron Bridge, or tools/checkpoint/convert.py)"
    ),
}


def list_weights(name: str, storage: Storage, folder: str) -> Listing:
    """List the weights in a folder of the tool with this name.

    Raises:
        LoadError, UnsafeFile: as for its reader.
    """
    tool = TOOLS[name]
    if tool.list_weights is not None:
        return tool.list_weights(storage, folder)
    return tool.reader(folder)(storage, folder).model("model")


def read_foreign(path: str, far: bool = False) -> ForeignCheckpoint:
    """Read the contents of another tool's checkpoint, from its headers and small values.

    Args:
        path: path of the checkpoint.
        far: whether ranks on other machines also read it, each from its own copy.

    Raises:
        CheckpointError: the path does not exist, its format is not supported, or the checkpoint is
            incomplete.
        UnsafeFile: a header with impossible sizes, or a pickle that would run code.
    """
    storage = storage_for(path)
    try:
        run = _reader(storage, path)(storage, path)
        return replace(run, listing=with_fingerprints(run.listing)) if far else run
    except LoadError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _reader(storage: Storage, path: str) -> Reader:
    if storage.is_dir(path):
        names = storage.names(path)
        if (tool := TOOLS.get(format_of_folder(names))) is not None:
            return tool.reader(path)
        shown = ", ".join(names[:20]) or "nothing"
        raise CheckpointError(
            f"{path}: is not a checkpoint of a supported tool; the folder contains {shown}. To "
            "load only weights, call anyrank.load."
        )
    if storage.is_file(path):
        if format_of_file(storage, path) == "torch":
            return scripts.read_file
        raise CheckpointError(
            f"{path}: a run can start only from files of torch.save and folders. To load only "
            "weights, call anyrank.load."
        )
    raise CheckpointError(
        f"{path}: does not exist (working directory {os.getcwd()}). Pass 'auto', 'must', a step, "
        "or the path of a checkpoint to resume()."
    )
