"""Folders of torch_checkpointing (torchtitan), with one file per rank.

Each file is a rank's state dict, written with `torch.save`, in which its shares are DTensors. The
weights, the step and a scheduler's state are read; an optimizer's moments are not.
"""

from __future__ import annotations

import re
from typing import Any

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage
from anyrank.sources.foreign.checkpoint import MOMENTS_STAY, Collector, ForeignCheckpoint, count_of
from anyrank.sources.foreign.shards import whole_tensors

MODEL = re.compile(r"^model_(\d+)\.pt$")


def read_torch_checkpointing(storage: Storage, folder: str) -> ForeignCheckpoint:
    """Read the contents of a torch_checkpointing folder.

    Raises:
        LoadError: a rank's file is missing, or the shares do not cover a tensor.
        UnsafeFile: a file is corrupt, or its pickle would run code.
    """
    files, names = Collector(storage, folder), storage.names(folder)
    world = max(int(match[1]) for name in names if (match := MODEL.match(name))) + 1
    weights = _weights(files, [f"model_{rank}.pt" for rank in range(world)])
    states = {
        part: files.tree(files.named(f"{item}_0.pt"))
        for part, item in (("scheduler", "lr_scheduler"), ("train_state", "train_state"))
        if f"{item}_0.pt" in names
    }
    progress: Any = states.pop("train_state", None)
    step = count_of(progress, "step") if isinstance(progress, dict) else None
    return ForeignCheckpoint(
        "torch_checkpointing",
        files.listing("torch_checkpointing"),
        {"model": weights},
        states=states,
        step=step,
        ranks=world,
        not_read={"optimizer": MOMENTS_STAY},
    )


def _weights(files: Collector, names: list[str]) -> Listing:
    """Return the tensors that are in the model's files of all ranks together.

    Raises:
        LoadError: a file is missing.
    """
    lost = [name for name in names if not files.storage.is_file(files.named(name))]
    if lost:
        raise LoadError(
            f"{files.folder}: {lost[0]} is missing ({len(lost)} of {len(names)} files); copy the "
            "files of all ranks"
        )
    trees = [files.tree(files.named(name)) for name in names]
    return Listing("", (), whole_tensors(trees, files.folder))
