"""Folders of other tools for `verify` and `diff`: their weights, and tensors of optimizers."""

from __future__ import annotations

import os
from dataclasses import replace

from anyrank.files.listing import Listing
from anyrank.files.storage import storage_for
from anyrank.sources.foreign.read import read_foreign
from anyrank.sources.readers.folders import format_of_folder
from anyrank.sources.source import LISTERS, Source
from anyrank.tensors.spec import StoredTensor


def is_tool_folder(source: Source) -> bool:
    """Return whether a source is a folder of another tool; its listing has only weights."""
    if not isinstance(source, (str, os.PathLike)):
        return False
    storage, path = storage_for(os.fspath(source)), os.fspath(source)
    return storage.is_dir(path) and format_of_folder(storage.names(path)) not in LISTERS


def with_optimizers(source: Source, weights: Listing) -> Listing:
    """Return the listing of another tool's folder, with the tensors of optimizers and all models.

    An optimizer that has no reader is listed as unreadable.

    Raises:
        CheckpointError, UnsafeFile: the folder is incomplete, or one of its files is unsafe.
    """
    assert isinstance(source, (str, os.PathLike))
    run = read_foreign(os.fspath(source))
    tensors = {**run.listing.tensors}
    unreadable = {**weights.unreadable}
    if "optimizer" in run.not_read and not tensors:
        unreadable["optimizer"] = f"state that is sharded by the ranks of {run.tool}"
    for part, listing in run.weights.items():
        prefix = "" if part == "model" else f"{part}."
        tensors |= {f"{prefix}{name}": stored for name, stored in listing.tensors.items()}
    for part, optimizer in run.optimizers.items():
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, StoredTensor):
                    tensors[f"{part}.{parameter}.{key}"] = value
    listing = replace(weights, files=run.listing.files, checksums=run.listing.checksums)
    return replace(listing, tensors=tensors, unreadable=unreadable)
