"""Checkpoints that are one table of parts: files of training scripts and Lightning, and DCP
folders.

Parts are known by the usual names in scripts. Other parts keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, join_path
from anyrank.sources.foreign import dcp_state
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
from anyrank.sources.part_names import NESTED
from anyrank.sources.readers import dcp
from anyrank.tensors.spec import StoredTensor

TRAINED = "current_model_state"  # Lightning's WeightAveraging stores the average in state_dict
EMAS = ("ema", "state_dict_ema", "ema_state_dict", "model_ema", "ema_model")
OPTIMIZERS = (
    "optimizer", "optimizer_state_dict", "optim", "optim_state_dict", "opt", "optimizer_states",
    "optimizers",
)  # fmt: skip
SCHEDULERS = (
    "scheduler", "scheduler_state_dict", "lr_scheduler", "lr_schedulers", "lr_scheduler_state_dict",
    "schedulers", "lr_sched", "lr_schedule", "sched", "schedule",
)  # fmt: skip
SCALERS = (
    "scaler", "scaler_state_dict", "grad_scaler", "amp_scaler", "fp16_scaler", "MixedPrecision",
)  # fmt: skip
STEPS = ("global_step", "step", "iteration", "global_steps", "iter", "train_steps")
PROGRESS = ("train_state", "trainer_state", "progress", "state")
DATA = re.compile(r"/__(\d+)_[^/]*\.distcp$")  # a file that a rank wrote
STEP_NAME = re.compile(r"(?:^|[_.-])(?:step|iter|iteration|checkpoint)[_=-]?(\d+)(?=[_.-]|$)")
META = "meta.pt"  # in Lightning's sharded folders: everything that is not in files of DCP
NOT_READ = ("dataloader", "rng", "rng_state", "random_state")
WHY = "random generators and loaders belong to the processes that saved them"


def read_file(storage: Storage, path: str) -> ForeignCheckpoint:
    """Read a torch.save file of Lightning or of a training script.

    Raises:
        LoadError: it contains no weights.
        UnsafeFile: it is corrupt, or its pickle would run code.
    """
    folder, _, _ = path.rpartition("/")
    files = Collector(storage, folder)
    tree = files.tree(path)
    if not isinstance(tree, dict):
        raise LoadError(f"{path}: contains a {type(tree).__name__}, not a dict of parts")
    return _read_table(files, cast("dict[Any, Any]", tree), path)


def read_dcp(storage: Storage, folder: str) -> ForeignCheckpoint:
    """Read a torch.distributed.checkpoint folder of a script, torchtitan or Lightning.

    Raises:
        LoadError, UnsafeFile: as for `read_file`; a data file is missing.
    """
    files = Collector(storage, folder)
    content = dcp.read_folder(
        storage, folder, lambda key: not key.removeprefix("app.").startswith(NOT_READ)
    )
    table: dict[Any, Any] = {**dcp_state.add_folder(files, content).tree()}
    if storage.is_file(join_path(folder, META)):
        rest = files.tree(files.named(META))
        table |= rest if isinstance(rest, dict) else {}
    while len(table) == 1 and isinstance(inner := next(iter(table.values())), dict):
        if any(isinstance(value, StoredTensor) for value in inner.values()):
            break
        table = {**cast("dict[Any, Any]", inner)}  # for example {"app": AppState()}
    run = _read_table(files, table, folder)
    ranks = {match[1] for info in content.listing.files if (match := DATA.search(info.path))}
    not_read = dict.fromkeys({key.split(".")[0] for key in content.others}, WHY)
    name = run.tool if run.tool == "Lightning" else "torch.distributed.checkpoint"
    return replace(run, tool=name, ranks=len(ranks) or None, not_read=run.not_read | not_read)


def _read_table(files: Collector, table: dict[Any, Any], path: str) -> ForeignCheckpoint:
    """Find the parts of a checkpoint by their names in a table.

    Raises:
        LoadError: it contains no weights.
    """
    rest = {str(key): value for key, value in table.items()}
    tree = {**rest}
    weights: dict[str, Listing] = {}
    not_read: dict[str, str] = {}
    keys: dict[str, str] = {}  # for parts that have a different name in the table
    averages: dict[str, Any] = {}
    names_of = {"model": NESTED, "ema": EMAS}
    if _has_average(rest):
        average = {f"module.{key}": value for key, value in rest["state_dict"].items()}
        # The same names as in torch's AveragedModel.
        rest["state_dict"] = average | rest.pop("averaging_state")
        names_of = {"model": (TRAINED,), "ema": ("state_dict",)}
    for name, names in names_of.items():
        key = next((key for key in names if flat(rest.get(key))), None)
        if key is not None:
            inner = rest.pop(key)
            weights[name] = weights_of(inner)
            keys[name] = key
            averages |= {} if name == "model" else {name: inner}  # the part may not be a module
            if isinstance(rest.get(name), dict):
                del rest[name]
                not_read[name] = f"the part {name} was read from {key}"
    optimizers = {
        name: _optimizer(tree, f"{path}: {name}")
        for name, tree in _take_parts(rest, OPTIMIZERS, keys)
    }
    stateful = [*_take_parts(rest, SCHEDULERS, keys), *_take_parts(rest, SCALERS, keys)]
    states: dict[str, Any] = averages | dict(stateful)
    step, not_a_step = _step(files, rest)
    assumed: list[str] = []
    if step is None and not not_a_step and (match := STEP_NAME.search(path.rpartition("/")[2])):
        step = int(match[1])
        assumed.append(f"step {step} was taken from the name of {path}, which does not store it")
    counts = [files.steps_of(optimizer) for optimizer in optimizers.values()]
    optimizer_steps = max((count for count in counts if count is not None), default=None)
    if step is None and not not_a_step and optimizer_steps:
        step = optimizer_steps
        assumed.append(
            f"step {step} was taken from the optimizer's count, because {path} does not store it"
        )
    if "model" not in weights:
        tensors = {key: value for key, value in rest.items() if isinstance(value, StoredTensor)}
        tensors = {key: value for key, value in tensors.items() if key not in STEPS}
        if not tensors and not any(map(flat, _unpacked(rest).values())) and not weights:
            shown = ", ".join(map(str, [*table][:20])) or "nothing"
            raise LoadError(
                f"{path}: contains no weights under {', '.join(NESTED)}; it contains {shown}"
            )
        weights |= {"model": Listing("", (), tensors)} if tensors else {}
        rest = {key: value for key, value in rest.items() if key not in tensors}
    loops: Any = rest.pop("loops", None)
    for key, value in _unpacked(rest).items():
        if isinstance(value, dict) and value and not key.startswith(NOT_READ):
            states.setdefault(key, value)
            if isinstance(value.get("param_groups"), list) and "state" in value:
                optimizers.setdefault(key, _optimizer(value, f"{path}: {key}"))
            elif flat(value):  # the weights of a module, if the part is one
                weights[key] = weights_of(value)
    is_lightning = "pytorch-lightning_version" in rest
    saved_epoch = rest.get("epoch")
    if isinstance(saved_epoch, StoredTensor) and saved_epoch.numel == 1:
        saved_epoch = files.value(saved_epoch)
    epoch, batches = _epoch(saved_epoch, loops)
    if epoch is not None and not isinstance(loops, dict):
        assumed.append(
            f"epoch {epoch:g} is interpreted as {epoch:g} completed epochs; if that is wrong, pass "
            "the number of completed epochs: resume(epoch=...)"
        )
    return ForeignCheckpoint(
        "Lightning" if is_lightning else "a training script",
        files.listing("lightning" if is_lightning else "torch"),
        weights,
        optimizers,
        states,
        step=step,
        not_a_step=not_a_step,
        epoch=epoch,
        batches=batches,
        not_read=not_read | {key: WHY for key in rest if key.startswith(NOT_READ)},
        keys={name: key for name, key in keys.items() if name != key},
        optimizer_steps=optimizer_steps,
        assumed=assumed,
        tree=tree,
    )


def _unpacked(rest: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a checkpoint; those in lists by number, such as `schedules.0`, and
    optimizers in a table by name.
    """
    tables: dict[str, Any] = {}
    for key, value in rest.items():
        if isinstance(value, list):
            rows = enumerate(cast("list[Any]", value))
            tables |= {f"{key}.{number}": row for number, row in rows if isinstance(row, dict)}
        elif _holds_optimizers(value):
            tables |= {f"{key}.{name}": optimizer for name, optimizer in value.items()}
        else:
            tables[key] = value
    return tables


def _holds_optimizers(value: Any) -> bool:
    """Return whether this is a table of the states of optimizers."""
    rows: list[Any] = [*value.values()] if isinstance(value, dict) else []
    return bool(rows) and all(isinstance(row, dict) and "param_groups" in row for row in rows)


def _has_average(table: dict[str, Any]) -> bool:
    """Return whether Lightning's WeightAveraging has stored the average in place of the weights."""
    names = (TRAINED, "state_dict", "averaging_state")
    return all(isinstance(table.get(name), dict) for name in names)


def _take_parts(
    rest: dict[str, Any], names: Sequence[str], keys: dict[str, str]
) -> list[tuple[str, Any]]:
    """Take the parts of one kind out of the table: `optimizer`, `optimizer_1`, ...

    Records their names in the table in `keys`.
    """
    first = names[0]
    parts: list[tuple[str, Any]] = []
    for key in [key for key in rest if key in names or key.removeprefix(f"{first}_").isdigit()]:
        if _holds_optimizers(rest[key]):
            continue  # their names, and not their order, say which is which
        value = rest.pop(key)
        trees = cast("list[Any]", value) if isinstance(value, list) else [value]
        for tree in trees:
            if isinstance(tree, dict) and tree:
                parts.append((f"{first}_{len(parts)}" if parts else first, tree))
                keys[parts[-1][0]] = key
    return parts


def _optimizer(tree: Any, path: str) -> ForeignOptimizer:
    if isinstance(tree.get("param_groups"), list):
        return optimizer_of(tree, path)
    return dcp_state.read_tree(tree, path)


def _step(files: Collector, rest: dict[str, Any]) -> tuple[int | None, str]:
    """Return the completed steps, found by the usual names, and the error text for an invalid
    value.
    """
    wrong = ""
    tables = [rest, *(rest[key] for key in PROGRESS if isinstance(rest.get(key), dict))]
    for table in tables:
        for name in STEPS:
            value = table.get(name)
            if isinstance(value, StoredTensor) and value.numel == 1:
                value = files.value(value)
            if is_plain_number(value) and value >= 0 and value % 1 == 0:
                table.pop(name)
                return int(value), ""
            if value is not None and not isinstance(value, dict | StoredTensor):
                wrong = wrong or f"the checkpoint's {name} is {value!r:.40}, which is not a step"
    return None, wrong


def _epoch(epoch: Any, loops: Any) -> tuple[float | None, int]:
    """Return the completed epochs, and the batches of the next one."""
    progress: Any = loops.get("fit_loop") if isinstance(loops, dict) else None
    if not isinstance(progress, dict):
        return (float(epoch), 0) if is_plain_number(epoch) and epoch >= 0 else (None, 0)
    try:
        batches = progress["epoch_loop.batch_progress"]
        done = count_of(progress["epoch_progress"]["current"], "completed") or 0
        processed = count_of(progress["epoch_progress"]["current"], "processed") or 0
        if batches["is_last_batch"]:
            return float(max(done, processed)), 0
        return float(done), count_of(batches["current"], "completed") or 0
    except (KeyError, TypeError, AttributeError):
        return None, 0
