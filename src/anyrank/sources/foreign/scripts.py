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
    parts = _Parts(files, table, path)
    parts.take_modules()
    parts.take_optimizers()
    parts.take_states()
    step, not_a_step = parts.take_step()
    optimizer_steps = parts.count_optimizer_steps()
    if step is None and not not_a_step:
        step = parts.assume_step(optimizer_steps)
    if "model" not in parts.weights:
        parts.take_flat_weights()
    loops: Any = parts.rest.pop("loops", None)
    parts.take_others()
    epoch, batches = parts.find_epoch(loops)
    is_lightning = "pytorch-lightning_version" in parts.rest
    unread = {key: WHY for key in parts.rest if key.startswith(NOT_READ)}
    return ForeignCheckpoint(
        "Lightning" if is_lightning else "a training script",
        files.listing("lightning" if is_lightning else "torch"),
        parts.weights,
        parts.optimizers,
        parts.states,
        step=step,
        not_a_step=not_a_step,
        epoch=epoch,
        batches=batches,
        not_read=parts.not_read | unread,
        keys={name: key for name, key in parts.keys.items() if name != key},
        optimizer_steps=optimizer_steps,
        assumed=parts.assumed,
        tree=parts.tree,
    )


class _Parts:
    """The parts that were found in a table. Each call takes those that it knows out of `rest`.

    Attributes:
        tree: the whole table.
        rest: the entries that no call has taken.
        weights, optimizers, states: parts by name. A part with weights may also be a state, if it
            is not sure to be a module.
        keys: part -> its name in the table.
        not_read: part -> why it is not read.
        assumed: sentences about what the table does not say.
    """

    def __init__(self, files: Collector, table: dict[Any, Any], path: str) -> None:
        self.files, self.path = files, path
        self.rest: dict[str, Any] = {str(key): value for key, value in table.items()}
        self.tree = {**self.rest}
        self.weights: dict[str, Listing] = {}
        self.optimizers: dict[str, ForeignOptimizer] = {}
        self.states: dict[str, Any] = {}
        self.keys: dict[str, str] = {}
        self.not_read: dict[str, str] = {}
        self.assumed: list[str] = []

    def take_modules(self) -> None:
        """Take the weights of the model, and their average."""
        rest, names_of = self.rest, {"model": NESTED, "ema": EMAS}
        if _has_average(rest):
            average = {f"module.{key}": value for key, value in rest["state_dict"].items()}
            # The same names as in torch's AveragedModel.
            rest["state_dict"] = average | rest.pop("averaging_state")
            names_of = {"model": (TRAINED,), "ema": ("state_dict",)}
        for name, names in names_of.items():
            key = next((key for key in names if flat(rest.get(key))), None)
            if key is None:
                continue
            inner = rest.pop(key)
            self.weights[name] = weights_of(inner)
            self.keys[name] = key
            if name != "model":  # the part may not be a module
                self.states[name] = inner
            if isinstance(rest.get(name), dict):
                del rest[name]
                self.not_read[name] = f"the part {name} was read from {key}"

    def take_optimizers(self) -> None:
        """Take the optimizers with the usual names."""
        for name, tree in _take_parts(self.rest, OPTIMIZERS, self.keys):
            self.optimizers[name] = _optimizer(tree, f"{self.path}: {name}")

    def take_states(self) -> None:
        """Take the schedulers and scalers with the usual names."""
        for names in (SCHEDULERS, SCALERS):
            self.states |= dict(_take_parts(self.rest, names, self.keys))

    def take_step(self) -> tuple[int | None, str]:
        """Take the completed steps; also return the error text for an invalid value."""
        wrong = ""
        inner = (self.rest[key] for key in PROGRESS if isinstance(self.rest.get(key), dict))
        for table in [self.rest, *inner]:
            for name in STEPS:
                value = table.get(name)
                if isinstance(value, StoredTensor) and value.numel == 1:
                    value = self.files.value(value)
                if is_plain_number(value) and value >= 0 and value % 1 == 0:
                    table.pop(name)
                    return int(value), ""
                if value is not None and not isinstance(value, dict | StoredTensor):
                    wrong = (
                        wrong or f"the checkpoint's {name} is {value!r:.40}, which is not a step"
                    )
        return None, wrong

    def count_optimizer_steps(self) -> int | None:
        """Return the largest number of steps that an optimizer has counted, if any."""
        counts = [self.files.steps_of(optimizer) for optimizer in self.optimizers.values()]
        return max((count for count in counts if count is not None), default=None)

    def assume_step(self, optimizer_steps: int | None) -> int | None:
        """Return the step in the file's name, or the optimizer's count; None without either."""
        path = self.path
        if match := STEP_NAME.search(path.rpartition("/")[2]):
            step = int(match[1])
            self.assumed.append(
                f"step {step} was taken from the name of {path}, which does not store it"
            )
            return step
        if not optimizer_steps:
            return None
        self.assumed.append(
            f"step {optimizer_steps} was taken from the optimizer's count, because {path} does not "
            "store it"
        )
        return optimizer_steps

    def take_flat_weights(self) -> None:
        """Take the tensors that are in no inner table, as the model's.

        Raises:
            LoadError: the table has no weights at all.
        """
        tensors = {
            key: value
            for key, value in self.rest.items()
            if isinstance(value, StoredTensor) and key not in STEPS
        }
        if tensors:
            self.weights["model"] = Listing("", (), tensors)
            self.rest = {key: value for key, value in self.rest.items() if key not in tensors}
        elif not self.weights and not any(map(flat, _unpacked(self.rest).values())):
            shown = ", ".join([*self.tree][:20]) or "nothing"
            raise LoadError(
                f"{self.path}: contains no weights under {', '.join(NESTED)}; it contains {shown}"
            )

    def take_others(self) -> None:
        """Add the tables with other names, which parts of the state may have."""
        for key, value in _unpacked(self.rest).items():
            if isinstance(value, dict) and value and not key.startswith(NOT_READ):
                self.states.setdefault(key, value)
                if isinstance(value.get("param_groups"), list) and "state" in value:
                    self.optimizers.setdefault(key, _optimizer(value, f"{self.path}: {key}"))
                elif flat(value):  # the weights of a module, if the part is one
                    self.weights[key] = weights_of(value)

    def find_epoch(self, loops: Any) -> tuple[float | None, int]:
        """Return the completed epochs, and the batches of the next one; `loops` is Lightning's."""
        saved = self.rest.get("epoch")
        if isinstance(saved, StoredTensor) and saved.numel == 1:
            saved = self.files.value(saved)
        epoch, batches = _epoch(saved, loops)
        if epoch is not None and not isinstance(loops, dict):
            self.assumed.append(
                f"epoch {epoch:g} is interpreted as {epoch:g} completed epochs; if that is wrong, "
                "pass the number of completed epochs: resume(epoch=...)"
            )
        return epoch, batches


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
