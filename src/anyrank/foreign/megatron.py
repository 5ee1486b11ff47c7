"""Megatron's `torch_dist` folders: DCP for tensors, and a `common.pt` for the rest.

The weights and the step are read. The optimizer's moments, which lie as its parallelism cut them,
are not.
"""

from __future__ import annotations

from typing import Any

from anyrank.errors import LoadError
from anyrank.files.storage import Storage
from anyrank.foreign.checkpoint import MOMENTS_STAY, Collector, ForeignCheckpoint, count_of
from anyrank.formats import dcp

COMMON = "common.pt"
NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")


def read(storage: Storage, folder: str) -> ForeignCheckpoint:
    """What such a folder holds.

    Raises:
        LoadError: no weights are in it, or a data file is missing.
        UnsafeFile: a file is damaged, or its pickle would run code.
    """
    files = Collector(storage, folder)
    listing = files.add(dcp.list_folder(storage, folder))
    common: Any = files.tree(files.named(COMMON))
    common = common if isinstance(common, dict) else {}
    weights = {k: t for k, t in listing.tensors.items() if not k.startswith(NOT_WEIGHTS)}
    if not weights:
        raise LoadError(f"{folder}: no weights here; it holds {', '.join([*listing.tensors][:10])}")
    args: Any = common.get("args")
    of_megatron = common.keys() & {"opt_param_scheduler", "rng_state"}
    not_read = dict.fromkeys(of_megatron, "it is Megatron's own")
    not_read |= {"optimizer": MOMENTS_STAY} if len(weights) < len(listing.tensors) else {}
    return ForeignCheckpoint(
        "Megatron",
        files.listing("megatron torch_dist").with_tensors(listing.tensors),
        {"model": listing.with_tensors(weights)},
        step=count_of(common, "iteration"),
        samples=count_of(args if isinstance(args, dict) else {}, "consumed_train_samples"),
        not_read=not_read,
    )
