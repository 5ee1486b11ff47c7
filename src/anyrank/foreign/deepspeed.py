"""DeepSpeed's folders: ZeRO 1 to 3, of any number of ranks, and universal checkpoints.

ZeRO keeps flat partitions. In stages 1 and 2 the parameters of a group lie one after another, and
the ranks have equal parts of that; in stage 3 each parameter is cut into equal parts. The order of
the parameters is in the model's file. Nothing is merged: each rank reads the ranges of its share.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
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
    keep = (_stage_3 if is_stage_3 else _stage_1_or_2)(states, shapes)
    weights: dict[str, StoredTensor] = {}
    state: dict[str | int, dict[str, Any]] = {}
    groups: dict[int, ForeignGroup] = {}
    for number, group in enumerate(shapes):
        of = keep.group_of(number)
        options = {k: v for k, v in keep.groups[of].items() if k not in ("params", "step")}
        groups.setdefault(of, ForeignGroup([], options)).params.extend(group)
        for name, shape in group.items():
            weights[name] = keep.weight(name, shape)
            state[name] = keep.state(name, shape, number)
            if "step" in keep.groups[of]:
                state[name].setdefault("step", keep.groups[of]["step"])
    weights |= _others(model, shapes, whole=not is_stage_3)
    return _with_ties(weights, model), ForeignOptimizer([*groups.values()], state)


def _not_read(folder: str, what: str) -> LoadError:
    return LoadError(
        f"{folder}: {what}, which is not read: run the zero_to_fp32.py that DeepSpeed put beside "
        "it, and load the weights that it writes"
    )


@dataclass(frozen=True)
class _Partitions:
    """The flat tensors that the ranks keep, each with parts of some parameters.

    Attributes:
        masters: rank -> the float32 weights, by number of the flat tensor.
        moments: rank -> the optimizer's state of each, by the same numbers.
        groups: hyperparameters of the optimizer's groups.
        parts: parameter -> where its elements lie one after another: the rank, the number of its
            flat tensor, the first element there, and how many.
    """

    masters: list[list[StoredTensor]]
    moments: list[Any]
    groups: list[dict[str, Any]]
    parts: dict[str, list[tuple[int, int, int, int]]]

    def group_of(self, number: int) -> int:
        """The optimizer's group of a group of parameters, which stage 3 may have split."""
        held = (n for n, group in enumerate(self.groups) if number in group.get("params", ()))
        return next(held, min(number, len(self.groups) - 1))

    def weight(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A parameter."""
        return self._whole(name, name, shape, lambda rank, n: self.masters[rank][n])

    def state(self, name: str, shape: tuple[int, ...], number: int) -> dict[str, Any]:
        """The optimizer's state of a parameter: its part of what is flat; counts as they are."""
        made: dict[str, Any] = {}
        for key, value in self.moments[0][number].items():
            made[key] = value
            if isinstance(value, StoredTensor) and value.numel > 1:
                made[key] = self._whole(
                    f"{name}.{key}",
                    name,
                    shape,
                    lambda rank, n, key=key: self.moments[rank][n][key],
                )
        return made

    def _whole(self, name: str, param: str, shape: tuple[int, ...], flat: Any) -> StoredTensor:
        """A tensor from its parts; `flat` returns the flat tensor of a rank and a number."""
        parts = [(flat(rank, n), first, count) for rank, n, first, count in self.parts[param]]
        if not parts:
            return StoredTensor(name, shape, flat(0, 0).dtype, ())
        return assembled(name, shape, parts)


def _stage_1_or_2(states: list[Any], shapes: Shapes) -> _Partitions:
    """A group's parameters lie one after another, and the ranks have equal parts of that."""
    masters: list[list[StoredTensor]] = [s["single_partition_of_fp32_groups"] for s in states]
    base = [state["base_optimizer_state"] for state in states]
    parts: dict[str, list[tuple[int, int, int, int]]] = {}
    for number, group in enumerate(shapes):
        size, start = max(held[number].numel for held in masters), 0
        for name, shape in group.items():
            stop = start + math.prod(shape)
            ranges = [
                (rank, max(start, rank * size), min(stop, (rank + 1) * size))
                for rank in range(len(masters))
            ]
            parts[name] = [
                (rank, number, low - rank * size, high - low)
                for rank, low, high in ranges
                if low < high
            ]
            start = stop
    return _Partitions(masters, [b["state"] for b in base], base[0]["param_groups"], parts)


def _stage_3(states: list[Any], shapes: Shapes) -> _Partitions:
    """Each parameter is cut into equal parts, the last one padded. A rank's parts lie one after
    another, through all of its flat tensors.
    """
    masters: list[list[StoredTensor]] = [state["fp32_flat_groups"] for state in states]
    base = [state["optimizer_state_dict"] for state in states]
    parts: dict[str, list[tuple[int, int, int, int]]] = {}
    start = 0
    for name, shape in (pair for group in shapes for pair in group.items()):
        left = math.prod(shape)
        size = math.ceil(left / len(states))
        parts[name] = []
        for rank, held in enumerate(masters):
            stop, begin = start + min(size, left), 0
            left -= stop - start
            for n, flat_tensor in enumerate(held):
                low, high = max(start, begin), min(stop, begin + flat_tensor.numel)
                if low < high:
                    parts[name].append((rank, n, low - begin, high - low))
                begin += flat_tensor.numel
        start += size
    total = sum(flat_tensor.numel for flat_tensor in masters[0])
    if total != start:
        raise ValueError(f"the parameters take {start} elements of each rank, its file has {total}")
    return _Partitions(masters, [b["state"] for b in base], base[0]["param_groups"], parts)


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
