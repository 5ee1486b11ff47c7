"""Megatron's `torch_dist` folders: DCP for tensors, and a `common.pt` for the rest.

Parameters and their moments are known by name. Where the distributed optimizer kept moments flat,
they are read if each is one vector, as without tensor and pipeline parallelism.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from anyrank.errors import LoadError
from anyrank.files.storage import Storage
from anyrank.foreign.checkpoint import (
    Collector,
    ForeignCheckpoint,
    ForeignOptimizer,
    count_of,
    is_plain_number,
)
from anyrank.formats import dcp
from anyrank.tensors.box import row_major
from anyrank.tensors.flat import boxes_of_range
from anyrank.tensors.spec import Chunk, StoredTensor

COMMON = "common.pt"
STATE = "optimizer.state."
MASTER = "fp32_param"
NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")


def read(storage: Storage, folder: str) -> ForeignCheckpoint:
    """What such a folder holds.

    Raises:
        LoadError: no weights are in it, or a data file is missing.
        UnsafeFile: a file is damaged, or its pickle would run code.
    """
    files = Collector(storage, folder)
    listing = dcp.list_folder(storage, folder)
    tensors = files.add(listing)
    common: Any = files.tree(files.named(COMMON))
    common = common if isinstance(common, dict) else {}
    weights = {k: t for k, t in tensors.items() if not k.startswith(NOT_WEIGHTS)}
    if not weights:
        raise LoadError(f"{folder}: no weights here; it holds {', '.join([*tensors][:10])}")
    step = count_of(common, "iteration")
    state: dict[str | int, dict[str, Any]] = {}
    not_read: dict[str, str] = {}
    for key, stored in tensors.items():
        if not key.startswith(STATE):
            continue
        kind, _, name = key.removeprefix(STATE).partition(".")
        like = weights.get(name)
        mine = None if like is None else _shaped(stored, like.shape)
        if mine is None:
            not_read[key] = "it is cut for tensor or pipeline parallelism, or has no weight"
        elif kind == MASTER:
            weights[name] = mine.renamed(name)
        else:
            state.setdefault(name, {})[kind] = mine
    count = _steps(common, step)
    for entries in state.values():
        if is_plain_number(count):
            entries.setdefault("step", count)
    optimizers = {} if not_read or not state else {"optimizer": ForeignOptimizer([], state)}
    return ForeignCheckpoint(
        "Megatron",
        files.listing("megatron torch_dist"),
        {"model": weights},
        optimizers,
        step=step,
        samples=count_of(_vars_of(common.get("args")), "consumed_train_samples"),
        not_read=not_read
        | dict.fromkeys(
            common.keys() & {"opt_param_scheduler", "rng_state"}, "it is Megatron's own"
        ),
    )


def _vars_of(value: Any) -> dict[str, Any]:
    """A table, or none where a value is not one."""
    return value if isinstance(value, dict) else {}


def _steps(common: dict[Any, Any], step: int | None) -> Any:
    """Steps of the optimizer, which its groups count."""
    saved = _vars_of(common.get("optimizer"))
    groups = _vars_of(saved.get("optimizer", saved)).get("param_groups")
    first = _vars_of(groups[0]) if isinstance(groups, list) and groups else {}
    return first.get("step", step)


def _shaped(stored: StoredTensor, shape: tuple[int, ...]) -> StoredTensor | None:
    """A moment with its parameter's shape; None where its elements' places are unknown."""
    if stored.shape == shape:
        return stored
    numel = math.prod(shape)
    if stored.numel != numel or stored.shape[-1:] != (numel,):
        return None
    chunks: list[Chunk] = []
    for chunk in stored.chunks:
        start, count = chunk.box.offsets[-1], chunk.box.sizes[-1]
        for box, at in boxes_of_range(shape, start, start + count):
            offset = chunk.offset + at * chunk.strides[-1] * stored.dtype.itemsize
            chunks.append(replace(chunk, box=box, offset=offset, strides=row_major(box.sizes)))
    return replace(stored, shape=shape, chunks=tuple(chunks))
