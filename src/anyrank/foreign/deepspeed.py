"""DeepSpeed's folders: ZeRO 1 to 3, of any number of ranks, and universal checkpoints.

ZeRO keeps flat partitions. In stages 1 and 2 the parameters of a group lie one after another, and
the ranks have equal parts of that; in stage 3 each parameter is cut into equal parts. The order of
the parameters is in the model's file. Nothing is merged: each rank reads the ranges of its share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, cast

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, inside, join_path, read_whole
from anyrank.foreign.checkpoint import (
    Collector,
    ForeignCheckpoint,
    ForeignGroup,
    ForeignOptimizer,
    count_of,
    flat,
    optimizer_of,
)
from anyrank.tensors.flat import assembled
from anyrank.tensors.spec import StoredTensor

OPTIMIZER = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
MODEL = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
PIPELINE = re.compile(r"^layer_\d+-model_")
EXPERTS = re.compile(r"^(?:layer_\d+_)?expert_|^expp_rank_")
LATEST = ("latest_universal", "latest")
UNIVERSAL = "zero"
MAX_TAG_BYTES = 4096  # of the file that names the latest step
Shapes = list[dict[str, tuple[int, ...]]]


def list_folder(storage: Storage, folder: str) -> Listing:
    """The weights of such a folder: the float32 ones, where an optimizer holds them."""
    return read(storage, folder).model("model")


def read(storage: Storage, folder: str) -> ForeignCheckpoint:
    """What such a folder holds.

    Raises:
        LoadError: a rank's file is missing, parallelism other than data's, sizes that disagree.
        UnsafeFile: a file is damaged, or its pickle would run code.
    """
    names = storage.names(folder)
    if not any(MODEL.match(name) for name in names):
        folder = _latest(storage, folder, names)
        names = storage.names(folder)
    files = Collector(storage, folder)
    _check_parallelism(folder, names)
    models = _ranked(MODEL, folder, names)
    model: Any = files.tree(files.named(models[0]))
    if not isinstance(model, dict):
        raise LoadError(f"{files.named(models[0])}: does not hold a dict of a model's states")
    optimizers = _ranked(OPTIMIZER, folder, names)
    try:
        if UNIVERSAL in names:
            made = _universal(files, model)
        elif optimizers:
            made = _zero(files, model, optimizers)
        else:
            made = _unsharded(files, model, models[0])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise LoadError(f"{folder}: not in a layout of DeepSpeed's ({error!r})") from error
    except ValueError as error:
        raise LoadError(f"{folder}: {error}: a file belongs to another save") from error
    weights, optimizer = made
    scheduler = model.get("lr_scheduler")
    return ForeignCheckpoint(
        "DeepSpeed",
        files.listing("deepspeed"),
        {"model": weights},
        {} if optimizer is None else {"optimizer": optimizer},
        {"scheduler": scheduler} if isinstance(scheduler, dict) and scheduler else {},
        step=count_of(model, "global_steps"),
        samples=count_of(model, "global_samples"),
        ranks=len(optimizers) or count_of(model, "dp_world_size"),
        not_read={"loss scaler": "it is an object of DeepSpeed's"} if optimizers else {},
    )


def _latest(storage: Storage, folder: str, names: list[str]) -> str:
    for name in LATEST:
        if name in names:
            tag = (
                read_whole(storage, join_path(folder, name), MAX_TAG_BYTES)
                .decode(errors="replace")
                .strip()
            )
            if not storage.is_dir(inside(folder, tag)):
                raise LoadError(f"{folder}: its {name} names {tag!r}, which is not there")
            return inside(folder, tag)
    raise LoadError(
        f"{folder}: no file of a model's states in it; it holds {', '.join(names[:20])}"
    )


def _check_parallelism(folder: str, names: list[str]) -> None:
    matches = [match for name in names if (match := MODEL.match(name) or OPTIMIZER.match(name))]
    other = next((match[0] for match in matches if int(match[2])), None)
    other = other or next((n for n in names if PIPELINE.match(n) or EXPERTS.match(n)), None)
    if other is not None:
        raise LoadError(
            f"{folder}: {other} is of tensor, pipeline or expert parallelism, which is not read: "
            "save the weights with DeepSpeed's own tools, and load them"
        )


def _ranked(pattern: re.Pattern[str], folder: str, names: list[str]) -> list[str]:
    """The files of a kind in the order of the ranks, all of them.

    Raises:
        LoadError: one is missing.
    """
    found = {int(match[1] or 0): name for name in names if (match := pattern.match(name))}
    if found and sorted(found) != list(range(len(found))):
        lost = min(set(range(max(found))) - found.keys())
        some = next(iter(found.values()))
        name = some.replace(f"zero_pp_rank_{pattern.match(some)[1]}_", f"zero_pp_rank_{lost}_")  # type: ignore[index]
        raise LoadError(f"{folder}: {name} is missing: copy the files of all ranks")
    return [found[rank] for rank in sorted(found)]


def _shapes(model: dict[str, Any]) -> Shapes:
    """For each group, its parameters' shapes in order."""
    groups: Any = model["param_shapes"]
    groups = groups if isinstance(groups, list) else [groups]
    return [
        {str(name): tuple(int(n) for n in shape) for name, shape in group.items()}
        for group in groups
    ]


def _others(model: dict[str, Any], shapes: Shapes, whole: bool) -> dict[str, StoredTensor]:
    """What of the weights no optimizer holds: buffers, and in stages 1 and 2 frozen parameters."""
    known = {name for group in shapes for name in group}
    kept = flat(model["module"])
    buffers = {str(name) for name in model.get("buffer_names") or ()}
    return {k: t for k, t in kept.items() if k in buffers or (whole and k not in known)}


def _with_ties(weights: dict[str, StoredTensor], model: dict[str, Any]) -> dict[str, StoredTensor]:
    shared: Any = model.get("shared_params") or {}
    ties = {str(k): weights[v].renamed(str(k)) for k, v in shared.items() if v in weights}
    return weights | ties


def _zero(
    files: Collector, model: dict[str, Any], optimizers: list[str]
) -> tuple[dict[str, StoredTensor], ForeignOptimizer]:
    """Weights and optimizer from each rank's partitions."""
    saved: list[Any] = [files.tree(files.named(name)) for name in optimizers]
    states: list[Any] = [state["optimizer_state_dict"] for state in saved]
    count = states[0].get("partition_count")
    count = max(count) if isinstance(count, list) else count
    if isinstance(count, int) and count != len(states):
        lost = re.sub(r"pp_rank_\d+_", f"pp_rank_{len(states)}_", optimizers[-1], count=1)
        raise LoadError(
            f"{files.folder}: saved on {count} ranks, and has the files of {len(states)}: "
            f"{lost} is missing"
        )
    shapes = _shapes(model)
    is_stage_3 = "fp32_flat_groups" in states[0]
    if isinstance(states[0].get("base_optimizer_state"), list):
        raise _not_read(files.folder, "is elastic (elastic_checkpoint)")
    if is_stage_3 and model.get("frozen_param_shapes"):
        raise _not_read(files.folder, "keeps frozen parameters in fragments (ZeRO 3)")
    keep = _Stage3(states, shapes) if is_stage_3 else _Stage12(states, shapes)
    weights = {
        name: keep.tensor(name, g, lambda rank, group: keep.masters(rank)[group])
        for g, group in enumerate(shapes)
        for name in group
    }
    weights |= _others(model, shapes, whole=not is_stage_3)
    state: dict[str | int, dict[str, Any]] = {}
    for g, group in enumerate(shapes):
        options = keep.options(g)
        for name in group:
            state[name] = {
                key: keep.tensor(
                    f"{name}.{key}", g, lambda rank, n, key=key: keep.base(rank, n)[key], name
                )
                if keep.is_flat(g, key)
                else value
                for key, value in keep.base(0, g).items()
            }
            if "step" in options and "step" not in state[name]:
                state[name]["step"] = options["step"]
    groups: dict[int, ForeignGroup] = {}
    for g, group in enumerate(shapes):
        options = {k: v for k, v in keep.options(g).items() if k not in ("params", "step")}
        groups.setdefault(keep.group_of(g), ForeignGroup([], options)).params.extend(group)
    return _with_ties(weights, model), ForeignOptimizer([*groups.values()], state)


def _not_read(folder: str, what: str) -> LoadError:
    return LoadError(
        f"{folder}: {what}, which is not read: run the zero_to_fp32.py that DeepSpeed put beside "
        "it, and load the weights that it writes"
    )


class _Stage12:
    """Partitions of stages 1 and 2: equal parts of a group's parameters, one after another."""

    def __init__(self, states: list[Any], shapes: Shapes) -> None:
        self.states, self.shapes = states, shapes
        self.count = len(states)

    def masters(self, rank: int) -> list[StoredTensor]:
        """The float32 weights of a rank, by group."""
        return self.states[rank]["single_partition_of_fp32_groups"]

    def base(self, rank: int, group: int) -> dict[str, Any]:
        """The optimizer's state of a rank's partition."""
        return self.states[rank]["base_optimizer_state"]["state"][group]

    def options(self, group: int) -> dict[str, Any]:
        """The hyperparameters of a group."""
        return self.states[0]["base_optimizer_state"]["param_groups"][group]

    def group_of(self, group: int) -> int:
        """The optimizer's group of a group of parameters."""
        return group

    def is_flat(self, group: int, key: str) -> bool:
        """Whether a value of the state is a partition, and no count."""
        value = self.base(0, group)[key]
        return isinstance(value, StoredTensor) and value.numel > 1

    def tensor(self, name: str, group: int, of: Any, param: str | None = None) -> StoredTensor:
        """A parameter, or a moment of one, from the ranks' partitions."""
        part = max(self.masters(rank)[group].numel for rank in range(self.count))
        first, shape = 0, self.shapes[group][param or name]
        for other, sizes in self.shapes[group].items():
            if other == (param or name):
                break
            first += math.prod(sizes)
        last = first + math.prod(shape)
        parts: list[tuple[StoredTensor, int, int]] = []
        for rank in range(self.count):
            low, high = max(first, rank * part), min(last, (rank + 1) * part)
            if low < high:
                parts.append((of(rank, group), low - rank * part, high - low))
        return _tensor(name, shape, parts, of(0, group))


class _Stage3(_Stage12):
    """Partitions of stage 3: an equal part of each parameter, padded at its end."""

    def __init__(self, states: list[Any], shapes: Shapes) -> None:
        super().__init__(states, shapes)
        self.places: dict[str, int] = {}  # of each parameter, in a rank's flat groups together
        at = 0
        for group in shapes:
            for name, shape in group.items():
                self.places[name] = at
                at += math.ceil(math.prod(shape) / self.count)
        held = sum(master.numel for master in self.masters(0))
        if held != at:
            raise ValueError(f"the parameters take {at} elements of each rank, its file has {held}")

    def masters(self, rank: int) -> list[StoredTensor]:
        return self.states[rank]["fp32_flat_groups"]

    def base(self, rank: int, group: int) -> dict[str, Any]:
        return self.states[rank]["optimizer_state_dict"]["state"][group]

    def options(self, group: int) -> dict[str, Any]:
        saved: Any = self.states[0]["optimizer_state_dict"]["param_groups"]
        return saved[self.group_of(group)]

    def group_of(self, group: int) -> int:
        saved: Any = self.states[0]["optimizer_state_dict"]["param_groups"]
        held = [n for n, state in enumerate(saved) if group in state["params"]]
        return held[0] if held else min(group, len(saved) - 1)

    def tensor(self, name: str, group: int, of: Any, param: str | None = None) -> StoredTensor:
        shape, first = self.shapes[group][param or name], self.places[param or name]
        left, each = math.prod(shape), math.ceil(math.prod(shape) / self.count)
        parts: list[tuple[StoredTensor, int, int]] = []
        for rank in range(self.count):
            low, high = first, first + min(each, left)
            left -= high - low
            start = 0
            for number, master in enumerate(self.masters(rank)):
                begin, end = max(low, start), min(high, start + master.numel)
                if begin < end:
                    parts.append((of(rank, number), begin - start, end - begin))
                start += master.numel
        return _tensor(name, shape, parts, of(0, group))


def _tensor(
    name: str,
    shape: tuple[int, ...],
    parts: Sequence[tuple[StoredTensor, int, int]],
    like: StoredTensor,
) -> StoredTensor:
    if not parts:
        return StoredTensor(name, shape, like.dtype, ())
    return assembled(name, shape, parts)


def _unsharded(
    files: Collector, model: dict[str, Any], name: str
) -> tuple[dict[str, StoredTensor], ForeignOptimizer | None]:
    """Without ZeRO: everything is in the model's file."""
    saved: Any = model.get("optimizer")
    is_plain = isinstance(saved, dict) and isinstance(
        cast("dict[str, Any]", saved).get("param_groups"), list
    )
    return flat(model["module"]), optimizer_of(saved, files.named(name)) if is_plain else None


def _universal(
    files: Collector, model: dict[str, Any]
) -> tuple[dict[str, StoredTensor], ForeignOptimizer]:
    """What `ds_to_universal` made: a folder for each parameter."""
    shapes = _shapes(model)
    saved: Any = files.tree(files.named(UNIVERSAL, "optimizer_state.pt"))
    weights: dict[str, StoredTensor] = {}
    state: dict[str | int, dict[str, Any]] = {}
    groups: list[ForeignGroup] = []
    for number, group in enumerate(shapes):
        options = dict(saved["param_groups"][min(number, len(saved["param_groups"]) - 1)])
        for name, shape in group.items():
            folder = join_path(files.named(UNIVERSAL), name)
            entries: dict[str, Any] = {}
            for file in files.storage.names(folder):
                key, _, ending = file.rpartition(".")
                value: Any = files.tree(join_path(folder, file)) if ending == "pt" else None
                value = value["param"] if isinstance(value, dict) else value
                if isinstance(value, StoredTensor) and key != "step":
                    value = _reshaped(value, f"{name}.{key}", shape)
                entries |= {key: value} if ending == "pt" else {}
            weights[name] = entries.pop("fp32").renamed(name)
            if "step" in options and "step" not in entries:
                entries["step"] = options["step"]
            state[name] = entries
        options = {k: v for k, v in options.items() if k not in ("params", "step")}
        groups.append(ForeignGroup([*group], options))
    weights |= _others(model, shapes, whole=True)
    return _with_ties(weights, model), ForeignOptimizer(groups, state)


def _reshaped(value: StoredTensor, name: str, shape: tuple[int, ...]) -> StoredTensor:
    """A tensor that was stored flat, with its parameter's shape."""
    if value.shape == shape or len(value.shape) != 1:
        return value.renamed(name)
    return assembled(name, shape, [(value, 0, math.prod(shape))])
