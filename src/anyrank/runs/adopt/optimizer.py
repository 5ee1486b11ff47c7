"""An optimizer state that another tool saved, as the record of an optimizer of a run.

Tools identify a parameter by its name, or by its number in the optimizer, as `state_dict()` does.
Numbers are only valid for an optimizer that was made in the same way: with the same number of
groups, with the same number of parameters, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from anyrank.errors import CheckpointError, LoadError
from anyrank.files.json_codec import to_json
from anyrank.files.manifest import IMPLEMENTATION
from anyrank.runs.state.optimizer import UNKNOWN, Names, keeps_one_vector
from anyrank.runs.state.optimizer_own import has_own_methods
from anyrank.runs.state.part_types import in_line
from anyrank.sources.foreign.checkpoint import ForeignGroup, ForeignOptimizer, Unread
from anyrank.tensors.names import match_keys
from anyrank.tensors.spec import StoredTensor

# Options that torch has added over time, with defaults that keep the older behavior.
LATER = {*IMPLEMENTATION, "maximize", "amsgrad", "decoupled_weight_decay"}
# State that torch's optimizers keep for each parameter that was stepped, in its shape.
KEPT = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("exp_avg", "exp_avg_sq")),
    **dict.fromkeys(("SGD", "Muon"), ("momentum_buffer",)),
    "Adamax": ("exp_avg", "exp_inf"),
    "Adagrad": ("sum",),
    "Adadelta": ("square_avg", "acc_delta"),
    "RMSprop": ("square_avg",),
    "Rprop": ("prev", "step_size"),
    "ASGD": ("ax",),
}
SHOWN = 10  # maximum number of problems to show for one optimizer


def record_of(
    part: str,
    optimizer: Optimizer,
    source: ForeignOptimizer,
    names: Names,
    rename: Callable[[str], str],
) -> tuple[dict[str, Any], dict[str, StoredTensor], list[str]]:
    """Make the record of an optimizer part; list its tensors, and what does not match.

    Args:
        part: name of the part in the state.
        optimizer: the optimizer as it is now.
        source: the saved state.
        names: names of the parameters of the state's modules.
        rename: maps the source's names of parameters to the model's.
    """
    problems = _problems_of_class(part, optimizer, source)
    if problems:
        return {}, {}, problems
    own_names, problems = _our_names(part, optimizer, source, names, rename)
    params = {names[id(p)].name: names[id(p)] for g in optimizer.param_groups for p in g["params"]}
    tensors: dict[str, StoredTensor] = {}

    def put(where: str, value: Any) -> Any:
        tensors[where] = value.renamed(where)
        return {"~whole": [where, ""]}

    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    kept = KEPT.get(type(optimizer).__name__, ()) if is_torchs else ()
    in_all = sum(math.prod(tensor.shape) for tensor in params.values())
    vector = (in_all,) if keeps_one_vector(optimizer) else None
    state: dict[str, Any] = {}
    for key, entries in source.state.items():
        name = own_names[key]
        if name in params:
            where, shape = f"{part}.state.{name}", params[name].shape
            problems += _misfits(where, entries, shape, kept, vector)
        state[name] = _json(entries, f"{part}.state.{name}", put)
    groups = [
        {
            "params": [own_names.get(key, str(key)) for key in group.params],
            "options": _json(_options(optimizer, group), f"{part}.param_groups.{number}", put),
        }
        for number, group in enumerate(source.groups)
    ]
    record = {
        "kind": "optimizer",
        "class": UNKNOWN,
        "layout": "",
        "groups": groups,
        "state": state,
        "extra": {},
    }
    return record, tensors, problems[:SHOWN]


def _json(value: Mapping[str, Any], where: str, put: Callable[[str, Any], Any]) -> Any:
    try:
        return to_json(dict(value), where, put)
    except CheckpointError as error:
        raise CheckpointError(f"in the checkpoint, {error}") from error


def _options(optimizer: Optimizer, group: ForeignGroup) -> dict[str, Any]:
    """Return the hyperparameters of a saved group; missing ones have their current values."""
    now = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    known = {key: value for key, value in group.options.items() if not isinstance(value, Unread)}
    late = {key: now[key] for key in LATER & now.keys() - known.keys()}
    return late | known


def _problems_of_class(part: str, optimizer: Optimizer, source: ForeignOptimizer) -> list[str]:
    """List signs that a different kind of optimizer saved the state."""
    name = type(optimizer).__name__
    if has_own_methods(optimizer):
        return [
            f"{part}: a {name} has state that only its own methods can read, and another tool's "
            f"checkpoint does not have such a state. Leave it unchanged with skip=[{part!r}]."
        ]
    options = [group.options for group in source.groups]
    lost = sorted(
        key
        for key in optimizer.defaults.keys() - LATER
        if any(key not in group for group in options)
    )
    if lost:
        return [
            f"{part}: is a {name}, but the checkpoint was saved by an optimizer without "
            f"{', '.join(lost)}. Use the class of the original run, or pass skip=[{part!r}]."
        ]
    decoupled = optimizer.defaults.get("decoupled_weight_decay")
    if decoupled is not None and any(
        group.get("decoupled_weight_decay", decoupled) != decoupled for group in options
    ):
        return [
            f"{part}: is a {name}, and the checkpoint's optimizer applies weight decay differently "
            f"(Adam / AdamW). Use the class of the original run, or pass skip=[{part!r}]."
        ]
    return []


def _our_names(
    part: str,
    optimizer: Optimizer,
    source: ForeignOptimizer,
    names: Names,
    rename: Callable[[str], str],
) -> tuple[dict[str | int, str], list[str]]:
    """Map the checkpoint's names of parameters to this state's; list what does not match."""
    keys = [*source.state, *(key for group in source.groups for key in group.params)]
    own_groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    own_names: dict[str | int, str] = {key: f"parameter {key}" for key in keys}
    if any(isinstance(key, int) for key in keys):
        sizes = [len(group.params) for group in source.groups]
        if sizes != [len(group) for group in own_groups]:
            now = [len(group) for group in own_groups]
            flat = " (flat ones, if FSDP1 saved it)" if sum(sizes) < sum(now) else ""
            return own_names, [
                f"{part}: the checkpoint numbers the parameters, and has groups of {sizes} "
                f"parameters{flat} but this optimizer has {now}. Make it with the groups of the "
                f"original run, in the same order, or leave it unchanged with skip=[{part!r}]."
            ]
        for saved, params in zip(source.groups, own_groups, strict=True):
            own_names |= {key: param.name for key, param in zip(saved.params, params, strict=True)}
        lost = [key for key in source.state if own_names[key] == f"parameter {key}"]
        problem = in_line(f"{part}: state of parameters that are in no group", list(map(str, lost)))
        return own_names, [problem] if lost else []
    flat = [param for group in own_groups for param in group]
    try:
        match = match_keys(
            [param.all_names() for param in flat], map(str, dict.fromkeys(keys)), rename
        )
    except LoadError as error:
        return own_names, [f"{part}: {error}"]
    own_names = {key: rename(str(key)) for key in keys}
    own_names |= {key: flat[index].name for index, key in match.keys.items()}
    own_names |= {key: own_names[first] for key, first in match.duplicates.items()}
    return own_names, []


def _misfits(
    where: str,
    entries: Mapping[str, Any],
    shape: Sequence[int],
    kept: Collection[str],
    vector: tuple[int] | None,
) -> list[str]:
    """Describe the saved state of a parameter that does not match that parameter.

    Args:
        where: name of the state.
        entries: the saved state.
        shape: shape of the parameter.
        kept: entries that have this shape.
        vector: shape of state over all parameters, if the optimizer has such.
    """
    lost = [key for key in kept if key not in entries] if entries else []
    problems = [f"{where}: the checkpoint has no {', '.join(lost)}"] if lost else []
    for key, value in entries.items():
        if not isinstance(value, StoredTensor):
            continue
        whole = value.shape in (tuple(shape), vector)
        part = len(value.shape) <= len(shape) and all(n == 1 or n in shape for n in value.shape)
        if not whole and (key in kept or not (part or value.numel == 1)):
            problems.append(
                f"{where}.{key}: has shape {list(value.shape)} in the checkpoint, but its "
                f"parameter has {list(shape)}"
            )
    return problems
