"""`checkpoint-N` folders of the transformers Trainer, and of what is built on it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from anyrank.errors import LoadError
from anyrank.files.storage import Storage
from anyrank.foreign import deepspeed
from anyrank.foreign.accelerate import exported, model_files, optimizer_files
from anyrank.foreign.checkpoint import (
    Collector,
    ForeignCheckpoint,
    count_of,
    is_plain_number,
    optimizer_of,
)
from anyrank.formats.sources import looks_like

STATE = "trainer_state.json"
RANDOM = re.compile(r"^rng_state(?:_\d+)?\.pth$")


def read(storage: Storage, folder: str) -> ForeignCheckpoint:
    """What such a folder holds.

    Raises:
        LoadError, UnsafeFile: it is not whole, or a pickle in it would run code.
    """
    files = Collector(storage, folder)
    names = storage.names(folder)
    progress = _progress(files)
    epoch = progress.get("epoch")
    epoch = float(epoch) if is_plain_number(epoch) else None
    step = count_of(progress, "global_step")
    if looks_like("deepspeed", names):
        made = deepspeed.read(storage, folder)
        return replace(made, tool="transformers Trainer", step=step, epoch=epoch)
    is_sharded = any(name.startswith("pytorch_model_fsdp") for name in names)
    if is_sharded and not any(".safetensors" in name for name in names):
        weights = model_files(files, names)
    else:
        weights = {"model": files.weights("model", exported(files, names))}
    optimizers = optimizer_files(files, names)
    if "optimizer.pt" in names:
        path = files.named("optimizer.pt")
        optimizers["optimizer"] = optimizer_of(files.tree(path), path)
    states = {
        name: files.tree(files.named(f"{name}.pt"))
        for name in ("scheduler", "scaler")
        if f"{name}.pt" in names
    }
    random = [name for name in names if RANDOM.match(name)]
    return ForeignCheckpoint(
        "transformers Trainer",
        files.listing("trainer"),
        weights,
        optimizers,
        states,
        files.extras,
        step=step,
        epoch=epoch,
        ranks=len(random) or None,
        not_read=dict.fromkeys(random, "random streams belong to the processes that saved them"),
    )


def _progress(files: Collector) -> dict[str, Any]:
    path = files.named(STATE)
    try:
        table = json.loads(files.small(path))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise LoadError(f"{path}: is not a JSON object")
    return table
