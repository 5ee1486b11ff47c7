"""Reads a checkpoint of another tool, so that a run can start from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from anyrank.errors import CheckpointError, LoadError
from anyrank.files.fingerprints import with_fingerprints
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, storage_for
from anyrank.sources.foreign import accelerate, deepspeed, per_rank, scripts
from anyrank.sources.foreign.checkpoint import ForeignCheckpoint
from anyrank.sources.readers.folders import format_of_folder
from anyrank.sources.weight_files import format_of_file

# Readers of the folders of tools, by name in FOLDERS of `readers/folders.py`.
RUNS: dict[str, Callable[[Storage, str], ForeignCheckpoint]] = {
    "trainer": accelerate.read,
    "accelerate": accelerate.read,
    "deepspeed": deepspeed.read,
    "torch_checkpointing": per_rank.read_torch_checkpointing,
    "dcp": scripts.read_dcp,
}
# Tools whose folders are recognized but not read -> how to convert them.
NOT_READ = {
    "verl": "saved by verl's FSDP workers, with one file per rank. Merge the files into a Hugging "
    "Face folder with verl (python -m verl.model_merger merge --backend fsdp)",
    "megatron": "a torch_dist checkpoint of Megatron. Convert it into a Hugging Face folder with "
    "Megatron's tools (Megatron Bridge, or tools/checkpoint/convert.py)",
}
WITH_A_LISTING = ("trainer", "accelerate", "deepspeed")  # only their weights are listed


def list_weights(name: str, storage: Storage, folder: str) -> Listing:
    """List the weights in a folder of the tool with this name.

    Raises:
        LoadError, UnsafeFile: as for its reader.
    """
    if name in NOT_READ:
        raise LoadError(f"{folder}: is {NOT_READ[name]}, and pass that folder.")
    if name in WITH_A_LISTING:
        return accelerate.list_folder(storage, folder)
    return RUNS[name](storage, folder).model("model")


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


def _reader(storage: Storage, path: str) -> Callable[[Storage, str], ForeignCheckpoint]:
    if storage.is_dir(path):
        names = storage.names(path)
        name = format_of_folder(names)
        if name in RUNS:
            return RUNS[name]
        if name in NOT_READ:
            raise CheckpointError(f"{path}: is {NOT_READ[name]}, and pass that folder.")
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
