"""DeepSpeed folders: ZeRO 1 to 3, saved on any number of ranks.

ZeRO stores the float32 weights flat, and the optimizer's moments in the same form. In stages 1 and
2, the parameters of a group lie one after the other, and each rank has an equal part of them; in
stage 3, each parameter is cut into equal parts. Their order is in the model's file. Nothing is
merged: each rank reads the ranges of its share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, inside, join_path, read_whole
from anyrank.sources.foreign.checkpoint import (
    Collector,
    ForeignCheckpoint,
    ForeignGroup,
    ForeignOptimizer,
    count_of,
    flat,
    optimizer_of,
)
from anyrank.sources.foreign.flat import assembled
from anyrank.tensors.spec import StoredTensor

OPTIMIZER = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
MODEL = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
PIPELINE = re.compile(r"^layer_\d+-model_")
EXPERTS = re.compile(r"^(?:layer_\d+_)?expert_|^expp_rank_")
LATEST = "latest"  # the file with the name of the latest step
UNIVERSAL = "zero"
MAX_TAG_BYTES = 4096
Shapes = list[dict[str, tuple[int, ...]]]
# Parameter -> the pieces of its elements, in order: flat tensor, first element, count.
Parts = dict[str, list[tuple[StoredTensor, int, int]]]


def list_folder(storage: Storage, folder: str) -> Listing:
    """List the weights of a DeepSpeed folder: the float32 weights, if an optimizer has them."""
    return read(storage, folder).model("model")


def read(storage: Storage, folder: str) -> ForeignCheckpoint:
    """Read the contents of a DeepSpeed folder.

    Raises:
        LoadError: a rank's file is missing, sizes contradict each other, or the parallelism is not
            only data parallelism.
        UnsafeFile: a file is corrupt, or its pickle would run code.
    """
    names = storage.names(folder)
    if not any(MODEL.match(name) for name in names):
        folder = _latest(storage, folder, names)
        names = storage.names(folder)
    files = Collector(storage, folder)
    if UNIVERSAL in names:
        raise _not_read(folder, "is a universal checkpoint")
    if _is_parallel(names):
        raise _not_read(folder, "has files of tensor, pipeline or expert parallelism")
    models = _ranked(MODEL, folder, names)
    model: Any = files.tree(files.named(models[0]))
    if not isinstance(model, dict):
        raise LoadError(f"{files.named(models[0])}: does not contain a dict of model states")
    optimizers = _ranked(OPTIMIZER, folder, names)
    try:
        if optimizers:
            weights, optimizer = _zero(files, model, optimizers)
        else:
            weights, saved = flat(model["module"]), model.get("optimizer")
            optimizer = optimizer_of(saved, files.named(models[0])) if saved else None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _not_read(folder, f"has unknown or missing fields ({error!r})") from error
    except ValueError as error:
        raise LoadError(f"{folder}: {error}. A file belongs to a different save.") from error
    scheduler = model.get("lr_scheduler")
    return ForeignCheckpoint(
        "DeepSpeed",
        files.listing("deepspeed"),
        {"model": Listing("deepspeed", (), weights)},
        {} if optimizer is None else {"optimizer": optimizer},
        states={"scheduler": scheduler} if isinstance(scheduler, dict) and scheduler else {},
        step=count_of(model, "global_steps"),
        samples=count_of(model, "global_samples"),
        ranks=len(optimizers) or count_of(model, "dp_world_size"),
        not_read={"loss scaler": "it is a DeepSpeed object"},
    )


def _latest(storage: Storage, folder: str, names: list[str]) -> str:
    if LATEST not in names:
        shown = ", ".join(names[:20])
        raise LoadError(f"{folder}: contains no file of model states; it contains {shown}")
    data = read_whole(storage, join_path(folder, LATEST), MAX_TAG_BYTES)
    tag = data.decode(errors="replace").strip()
    if not storage.is_dir(inside(folder, tag)):
        raise LoadError(f"{folder}: its {LATEST} names {tag!r}, which does not exist")
    return inside(folder, tag)


def _is_parallel(names: list[str]) -> bool:
    """Return whether files were written with tensor, pipeline or expert parallelism."""
    matches = [match for name in names if (match := MODEL.match(name) or OPTIMIZER.match(name))]
    return any(int(match[2]) for match in matches) or any(
        PIPELINE.match(name) or EXPERTS.match(name) for name in names
    )


def _ranked(pattern: re.Pattern[str], folder: str, names: list[str]) -> list[str]:
    """Return the files of a kind in the order of the ranks; check that none is missing.

    Raises:
        LoadError: a file is missing.
    """
    by_rank = {int(match[1] or 0): name for name in names if (match := pattern.match(name))}
    if by_rank and sorted(by_rank) != list(range(len(by_rank))):
        lost = min(set(range(max(by_rank))) - by_rank.keys())
        some = next(iter(by_rank.values()))
        name = some.replace(f"zero_pp_rank_{pattern.match(some)[1]}_", f"zero_pp_rank_{lost}_")  # type: ignore[index]
        raise LoadError(f"{folder}: {name} is missing; copy the files of all ranks")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _shapes(model: dict[str, Any]) -> Shapes:
    """Return the shapes of the parameters of each group, in order."""
    groups: Any = model["param_shapes"]
    groups = groups if isinstance(groups, list) else [groups]
    return [
        {str(name): tuple(int(n) for n in shape) for name, shape in group.items()}
        for group in groups
    ]


def _others(model: dict[str, Any], shapes: Shapes, whole: bool) -> dict[str, StoredTensor]:
    """Return weights that no optimizer has: buffers, and in stages 1 and 2 frozen parameters."""
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
    """Return the weights and the optimizer, from each rank's partitions."""
    saved: list[Any] = [files.tree(files.named(name)) for name in optimizers]
    states: list[Any] = [state["optimizer_state_dict"] for state in saved]
    count = states[0].get("partition_count")
    count = max(count) if isinstance(count, list) else count
    if isinstance(count, int) and count != len(states):
        lost = re.sub(r"pp_rank_\d+_", f"pp_rank_{len(states)}_", optimizers[-1], count=1)
        raise LoadError(
            f"{files.folder}: was saved on {count} ranks, but has the files of only {len(states)}; "
            f"{lost} is missing"
        )
    shapes = _shapes(model)
    is_stage_3 = "fp32_flat_groups" in states[0]
    is_elastic = isinstance(states[0].get("base_optimizer_state"), list)
    if is_elastic:
        raise _not_read(files.folder, "is of elastic ZeRO")
    if is_stage_3 and model.get("frozen_param_shapes"):
        raise _not_read(files.folder, "has frozen parameters under ZeRO 3")
    if is_stage_3:
        keys, parts_of = ("fp32_flat_groups", "optimizer_state_dict"), _parts_of_stage_3
    else:
        keys = "single_partition_of_fp32_groups", "base_optimizer_state"
        parts_of = _parts_of_stage_1_or_2
    masters: list[list[StoredTensor]] = [state[keys[0]] for state in states]
    weights = _assembled(parts_of(masters, shapes), shapes)
    moments = [state[keys[1]]["state"] for state in states]
    optimizer = _optimizer(moments, states[0][keys[1]]["param_groups"], shapes, parts_of)
    weights |= _others(model, shapes, whole=not is_stage_3)
    return _with_ties(weights, model), optimizer


def _optimizer(
    moments: list[Any],
    groups: list[dict[str, Any]],
    shapes: Shapes,
    parts_of: Callable[[list[list[StoredTensor]], Shapes], Parts],
) -> ForeignOptimizer:
    """Return the optimizer, whose moments are flat as the weights are.

    Args:
        moments: for each rank: number of a flat tensor -> its state.
        groups: the optimizer's groups, some of which stage 3 may have split.
        shapes: shapes of the parameters, group by group.
        parts_of: finds each parameter in the flat tensors of all ranks.
    """
    state: dict[str | int, dict[str, Any]] = {name: {} for group in shapes for name in group}
    options = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in groups]
    foreign_groups = [ForeignGroup([], values) for values in options]
    for number, group in enumerate(shapes):
        owners = (n for n, saved in enumerate(groups) if number in saved.get("params", ()))
        owner = next(owners, min(number, len(groups) - 1))
        foreign_groups[owner].params.extend(group)
        counts = {"step": groups[owner]["step"]} if "step" in groups[owner] else {}
        counts |= {k: v for k, v in moments[0][number].items() if not _is_flat(v)}
        for name in group:
            state[name] |= counts
    for key in [key for key, value in moments[0][0].items() if _is_flat(value)]:
        flats = [[state_of[n][key] for n in range(len(state_of))] for state_of in moments]
        for name, value in _assembled(parts_of(flats, shapes), shapes).items():
            state[name][key] = value.renamed(f"{name}.{key}")
    return ForeignOptimizer([group for group in foreign_groups if group.params], state)


def _is_flat(value: Any) -> bool:
    return isinstance(value, StoredTensor) and value.numel > 1


def _assembled(parts: Parts, shapes: Shapes) -> dict[str, StoredTensor]:
    """Assemble the tensors of all parameters from their parts."""
    return {
        name: assembled(name, shape, parts[name])
        for group in shapes
        for name, shape in group.items()
    }


def _not_read(folder: str, what: str) -> LoadError:
    return LoadError(
        f"{folder}: {what}, which is not supported. Run the zero_to_fp32.py next to it, and load "
        "the weights that it writes."
    )


def _parts_of_stage_1_or_2(masters: list[list[StoredTensor]], shapes: Shapes) -> Parts:
    """Find parameters: those of a group lie one after the other, in equal parts on the ranks."""
    parts: Parts = {}
    for number, group in enumerate(shapes):
        size, start = max(flat_tensors[number].numel for flat_tensors in masters), 0
        for name, shape in group.items():
            stop = start + math.prod(shape)
            parts[name] = []
            for rank, flat_tensors in enumerate(masters):
                low, high = max(start, rank * size), min(stop, (rank + 1) * size)
                if low < high:
                    parts[name].append((flat_tensors[number], low - rank * size, high - low))
            start = stop
    return parts


def _parts_of_stage_3(masters: list[list[StoredTensor]], shapes: Shapes) -> Parts:
    """Find parameters: each is cut into equal parts, the last one padded.

    The parts of a rank lie one after the other, across all of its flat tensors.
    """
    parts: Parts = {}
    start = 0
    for name, shape in (pair for group in shapes for pair in group.items()):
        left = math.prod(shape)
        size = math.ceil(left / len(masters))
        parts[name] = []
        for flat_tensors in masters:
            stop, begin = start + min(size, left), 0
            left -= stop - start
            for flat_tensor in flat_tensors:
                low, high = max(start, begin), min(stop, begin + flat_tensor.numel)
                if low < high:
                    parts[name].append((flat_tensor, low - begin, high - low))
                begin += flat_tensor.numel
        start += size
    total = sum(flat_tensor.numel for flat_tensor in masters[0])
    if total != start:
        raise ValueError(
            f"the parameters need {start} elements on each rank, but its file has {total}"
        )
    return parts
