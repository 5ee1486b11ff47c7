"""Folders that Accelerate's `save_state` writes, with DDP, and with FSDP, sharded or full."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage
from anyrank.formats import dcp, dcp_state, deepspeed, huggingface, safetensors, torch_file
from anyrank.formats.foreign import (
    Collector,
    ForeignCheckpoint,
    ForeignOptimizer,
    optimizer_of,
)

RANDOM = re.compile(r"^random_states_(\d+)\.pkl$")
CUSTOM = re.compile(r"^(custom_checkpoint_\d+)\.pkl$")
OPTIMIZER = re.compile(r"^optimizer(?:_(\d+))?\.bin$")
SHARDED_OPTIMIZER = re.compile(r"^optimizer_(\d+)$")
SCHEDULER = re.compile(r"^scheduler(?:_(\d+))?\.bin$")
MODEL = re.compile(r"^(?:model|pytorch_model|pytorch_model_fsdp)(?:_(\d+))?\.(safetensors|bin)$")
SHARDED_MODEL = re.compile(r"^pytorch_model_fsdp_(\d+)$")


def recognises(names: list[str]) -> bool:
    """Whether a folder with these entries is one that `save_state` wrote."""
    return any(RANDOM.match(name) for name in names)


def read(storage: Storage, folder: str) -> ForeignCheckpoint:
    """What such a folder holds.

    Raises:
        LoadError, UnsafeFile: it is not whole, or a pickle in it would run code.
    """
    files = Collector(storage, folder)
    names = storage.names(folder)
    inner = files.named("pytorch_model")  # where its engine of DeepSpeed's saves
    if "pytorch_model" in names and storage.is_dir(inner):
        return replace(deepspeed.read(storage, inner), tool="Accelerate")
    models = model_files(files, names)
    optimizers = optimizer_files(files, names)
    states: dict[str, Any] = {}
    for name in names:
        if match := SCHEDULER.match(name):
            states[numbered("scheduler", match[1])] = files.tree(files.named(name))
        elif name == "scaler.pt":
            states["scaler"] = files.tree(files.named(name))
        elif match := CUSTOM.match(name):
            states[match[1]] = files.tree(files.named(name))
    ranks = sum(bool(RANDOM.match(name)) for name in names)
    step = next((files.steps_of(optimizer) for optimizer in optimizers.values()), None)
    scheduler = states.get("scheduler")
    if step is None and ranks == 1 and isinstance(scheduler, dict):
        step = scheduler.get("last_epoch")
    not_read = {
        name: "random streams belong to the processes that saved them"
        for name in names
        if RANDOM.match(name)
    }
    not_read |= {
        name: "the position of a loader of this tool's, in its own order of samples"
        for name in names
        if name.startswith(("dl_state_dict", "sampler"))
    }
    return ForeignCheckpoint(
        "Accelerate",
        files.listing("accelerate"),
        models,
        optimizers,
        states,
        files.extras,
        step=step if isinstance(step, int) and step >= 0 else None,
        ranks=ranks,
        scheduler_steps=ranks,
        not_read=not_read,
    )


def numbered(name: str, number: str | None) -> str:
    """`model`, `model_1`, ...: as Accelerate numbers what it was given to prepare."""
    return name if number in (None, "0") else f"{name}_{number}"


def model_files(files: Collector, names: list[str]) -> dict[str, Any]:
    """The weights of each model in the folder, by the model's name."""
    found: dict[str, Any] = {}
    for name in names:
        path = files.named(name)
        if match := SHARDED_MODEL.match(name):
            key, listing = numbered("model", match[1]), _sharded_model(files, path)
        elif match := MODEL.match(name):
            reader = safetensors if match[2] == "safetensors" else torch_file
            key, listing = numbered("model", match[1]), reader.list_file(files.storage, path)
        else:
            continue
        if key not in found:
            found[key] = files.weights(key, listing)
    return found or {"model": files.weights("model", exported(files, names))}


def exported(files: Collector, names: list[str]) -> Listing:
    """The weights that `save_pretrained` or `save_model` put into the folder.

    Raises:
        LoadError: there are none, or not all.
    """
    endings = (".safetensors", ".bin", ".index.json")
    if not any(name.startswith(huggingface.STEMS) and name.endswith(endings) for name in names):
        shown = ", ".join(names[:20])
        raise LoadError(f"{files.folder}: no weights of a model here; the folder holds {shown}")
    return huggingface.list_folder(files.storage, files.folder)


def _sharded_model(files: Collector, path: str) -> Listing:
    listing = dcp.list_folder(files.storage, path)
    inner = {key.removeprefix("model."): tensor for key, tensor in listing.tensors.items()}
    return listing.with_tensors(inner)


def optimizer_files(files: Collector, names: list[str]) -> dict[str, ForeignOptimizer]:
    """The state of each optimizer in the folder, by the optimizer's name."""
    found: dict[str, ForeignOptimizer] = {}
    for name in names:
        path = files.named(name)
        if match := SHARDED_OPTIMIZER.match(name):
            found[numbered("optimizer", match[1])] = dcp_state.optimizer(files, path)
        elif match := OPTIMIZER.match(name):
            found[numbered("optimizer", match[1])] = optimizer_of(files.tree(path), path)
    return found
