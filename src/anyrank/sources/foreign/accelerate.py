"""Folders of Accelerate's `save_state` and `checkpoint-N` folders of the transformers Trainer.

Accelerate's folders may be from DDP or FSDP, sharded or full. Tools that are built on the Trainer
write the same folders.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, join_path
from anyrank.sources import weight_files
from anyrank.sources.endings import ENDINGS
from anyrank.sources.foreign import dcp_state, deepspeed
from anyrank.sources.foreign.checkpoint import (
    Collector,
    ForeignCheckpoint,
    ForeignOptimizer,
    count_of,
    flat,
    is_plain_number,
    optimizer_of,
    weights_of,
)
from anyrank.sources.readers import dcp, huggingface
from anyrank.sources.readers.folders import looks_like

RANDOM = re.compile(r"^(?:random_states_\d+\.pkl|rng_state(?:_\d+)?\.pth)$")
CUSTOM = re.compile(r"^(custom_checkpoint_(\d+))\.pkl$")
OPTIMIZER = re.compile(r"^optimizer(?:_(\d+))?\.(?:bin|pt)$")
SHARDED_OPTIMIZER = re.compile(r"^optimizer_(\d+)$")
SCHEDULER = re.compile(r"^scheduler(?:_(\d+))?\.(?:bin|pt)$")
MODEL = re.compile(r"^(?:model|pytorch_model|pytorch_model_fsdp)(?:_(\d+))?\.(?:safetensors|bin)$")
STATE = "trainer_state.json"
ENGINE = "pytorch_model"  # the folder of its DeepSpeed engine
FSDP_MODEL = re.compile(r"^pytorch_model_fsdp(?:_\d+)?(?:\.bin)?$")
SHARDED_MODEL = re.compile(r"^pytorch_model_fsdp_(\d+)$")


def list_folder(storage: Storage, folder: str) -> Listing:
    """List the weights of a folder of Accelerate, the Trainer or DeepSpeed.

    Weights in safetensors are preferred to those that DeepSpeed or FSDP wrote.

    Raises:
        LoadError: the folder has weights of several models; or as for `read`.
    """
    names = storage.names(folder)
    if not any(".safetensors" in name for name in names):
        if looks_like("deepspeed", names):
            return deepspeed.list_folder(storage, folder)
        if ENGINE in names:
            return deepspeed.list_folder(storage, join_path(folder, ENGINE))
        if any(FSDP_MODEL.match(name) for name in names):
            return _list_fsdp(storage, folder, names)
    return huggingface.list_folder(storage, folder)


def _list_fsdp(storage: Storage, folder: str, names: list[str]) -> Listing:
    models = _models(storage, folder, names)
    if len(models) > 1:
        shown = ", ".join(name for name in names if SHARDED_MODEL.match(name) or MODEL.match(name))
        raise LoadError(f"{folder}: contains several sets of weights ({shown}); pass one of them")
    (listing,) = models.values()
    return listing


def read(storage: Storage, folder: str) -> ForeignCheckpoint:
    """Read the contents of a folder of Accelerate, the Trainer or DeepSpeed.

    Raises:
        LoadError, UnsafeFile: it is incomplete, or a pickle in it would run code.
    """
    files, names = Collector(storage, folder), storage.names(folder)
    if STATE in names:
        return _read_trainer(files, names)
    if ENGINE in names:
        inner = deepspeed.read(storage, files.named(ENGINE))
        return replace(inner, tool="Accelerate")
    return _read(files, names)


def _read_trainer(files: Collector, names: list[str]) -> ForeignCheckpoint:
    path = files.named(STATE)
    try:
        progress: Any = json.loads(files.small(path))
        epoch, step = progress.get("epoch"), count_of(progress, "global_step")
    except (ValueError, RecursionError, AttributeError) as error:
        raise LoadError(f"{path}: is not a JSON object ({error})") from error
    is_engines = looks_like("deepspeed", names)
    checkpoint = deepspeed.read(files.storage, files.folder) if is_engines else _read(files, names)
    epoch = float(epoch) if is_plain_number(epoch) else None
    return replace(checkpoint, tool="transformers Trainer", step=step, epoch=epoch)


def _read(files: Collector, names: list[str]) -> ForeignCheckpoint:
    listings = _models(files.storage, files.folder, names) or {"model": _exported(files, names)}
    models = {name: files.add(listing) for name, listing in listings.items()}
    optimizers = _optimizer_files(files, names)
    states: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for name in names:
        if match := SCHEDULER.match(name):
            tree = files.tree(files.named(name))
            states |= {_numbered("scheduler", match[1]): tree} if isinstance(tree, dict) else {}
        elif name == "scaler.pt":
            states["scaler"] = files.tree(files.named(name))
        elif match := CUSTOM.match(name):
            part, tree = _numbered("registered", match[2]), files.tree(files.named(name))
            states[part], keys[part] = tree, match[1]
            if flat(tree):  # the weights of a module, if the object is a module
                models[part] = weights_of(tree)
    ranks = sum(bool(RANDOM.match(name)) for name in names)
    step = next((files.steps_of(optimizer) for optimizer in optimizers.values()), None)
    scheduler = states.get("scheduler")
    if step is None and ranks == 1 and scheduler is not None:
        step = scheduler.get("last_epoch")
    not_read = {
        name: "random generators belong to the processes that saved them"
        for name in names
        if RANDOM.match(name)
    }
    not_read |= {
        name: "the position of the tool's loader, in its own sample order"
        for name in names
        if name.startswith(("dl_state_dict", "sampler"))
    }
    return ForeignCheckpoint(
        "Accelerate",
        files.listing("trainer" if STATE in names else "accelerate"),
        models,
        optimizers,
        states,
        step=step if isinstance(step, int) and step >= 0 else None,
        ranks=ranks or None,
        scheduler_steps=1
        if STATE in names
        else max(ranks, 1),  # the Trainer counts optimizer steps
        not_read=not_read,
        keys=keys,
        tree={key: states[part] for part, key in keys.items()},
    )


def _numbered(name: str, number: str | None) -> str:
    """Return `model`, `model_1`, ..., as Accelerate numbers prepared objects."""
    return name if number in (None, "0") else f"{name}_{number}"


def _models(storage: Storage, folder: str, names: list[str]) -> dict[str, Listing]:
    listings: dict[str, Listing] = {}
    for name in names:
        path = join_path(folder, name)
        if match := SHARDED_MODEL.match(name):
            key, lister = _numbered("model", match[1]), _sharded_model
        elif match := MODEL.match(name):
            key, lister = _numbered("model", match[1]), weight_files.list_file
        else:
            continue
        if key not in listings:
            listings[key] = lister(storage, path)
    return listings


def _exported(files: Collector, names: list[str]) -> Listing:
    """Return the weights that `save_pretrained` or `save_model` wrote into the folder.

    Raises:
        LoadError: the folder has none, or some are missing.
    """
    stems, endings = huggingface.STEMS, ENDINGS
    if not any(name.startswith(stems) and name.endswith(endings) for name in names):
        shown = ", ".join(names[:20])
        raise LoadError(f"{files.folder}: contains no weights of a model; it contains {shown}")
    return huggingface.list_folder(files.storage, files.folder)


def _sharded_model(storage: Storage, path: str) -> Listing:
    listing = dcp.list_folder(storage, path)
    inner = {key.removeprefix("model."): tensor for key, tensor in listing.tensors.items()}
    return listing.with_tensors(inner)


def _optimizer_files(files: Collector, names: list[str]) -> dict[str, ForeignOptimizer]:
    """Return the state of each optimizer in the folder, by the optimizer's name."""
    optimizers: dict[str, ForeignOptimizer] = {}
    for name in names:
        path = files.named(name)
        if match := SHARDED_OPTIMIZER.match(name):
            optimizers[_numbered("optimizer", match[1])] = dcp_state.read_optimizer(files, path)
        elif match := OPTIMIZER.match(name):
            optimizers[_numbered("optimizer", match[1])] = optimizer_of(files.tree(path), path)
    return optimizers
