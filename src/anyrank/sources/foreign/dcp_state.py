"""Optimizers and other parts in torch.distributed.checkpoint folders, in both usual layouts.

Nested: `optimizer.state.<parameter>.exp_avg` and `optimizer.param_groups` as a list of groups, as
torch's `get_optimizer_state_dict` returns them; or with numbers instead of names, as an
optimizer's `state_dict()` has them. Flat: the same keys, and
`optimizer.param_groups.<parameter>.lr` for each parameter, as with
`StateDictOptions(flatten_optimizer_state_dict=True)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from anyrank.errors import LoadError
from anyrank.sources.foreign.checkpoint import (
    Collector,
    ForeignGroup,
    ForeignOptimizer,
    Unread,
    bound,
    optimizer_of,
)
from anyrank.sources.readers import dcp

STATE, GROUPS = "state.", "param_groups."


def read_optimizer(files: Collector, folder: str) -> ForeignOptimizer:
    """Read the optimizer in a DCP folder that contains nothing else.

    Raises:
        LoadError: the folder has no optimizer.
    """
    content = dcp.read_folder(files.storage, folder, lambda key: "param_groups." in key)
    tree = add_folder(files, content).tree()
    return read_tree(tree.get("optimizer", tree), folder)


def add_folder(files: Collector, content: dcp.DcpFolder) -> dcp.DcpFolder:
    """Add a folder's files to the checkpoint; return the folder with their new numbers."""
    listing = files.add(content.listing)
    objects = bound(content.objects, files.folder, lambda key, ref: Unread("Tensor"))
    return dcp.DcpFolder(listing, content.paths, objects, content.others)


def read_tree(tree: Any, path: str) -> ForeignOptimizer:
    """Read the optimizer's part of a saved state dict, nested or flat.

    Raises:
        LoadError: it is neither.
    """
    table: dict[Any, Any] = tree if isinstance(tree, dict) else {}
    if isinstance(table.get("state"), dict):
        groups = _listed(table.get("param_groups"))
        groups = [
            {**group, "params": _listed(group.get("params"))}
            for group in groups
            if isinstance(group, dict)
        ]
        state = table["state"]
        if any(isinstance(key, int) for group in groups for key in group["params"]):
            # An optimizer's own state_dict(): DCP has made strings of the numbers in keys.
            state = {int(key) if str(key).isdecimal() else key: state[key] for key in state}
        return optimizer_of({"state": state, "param_groups": groups}, path)
    if not any(str(key).startswith(STATE) for key in table):
        shown = ", ".join(map(str, [*table][:10]))
        raise LoadError(
            f"{path}: has no optimizer in a layout that torch writes; it contains {shown}"
        )
    return _flat(table)


def _listed(value: Any) -> list[Any]:
    """Rebuild a list from its entries by number, into which DCP has split it."""
    if isinstance(value, dict):
        table = cast("dict[Any, Any]", value)
        return [table[key] for key in sorted(table, key=lambda key: int(key))]
    return list(cast("list[Any]", value)) if isinstance(value, (list, tuple)) else []


def _flat(table: Mapping[Any, Any]) -> ForeignOptimizer:
    state: dict[str | int, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in table.items():
        name, _, last = str(key).rpartition(".")
        if name.startswith(STATE):
            state.setdefault(name.removeprefix(STATE), {})[last] = value
        elif name.startswith(GROUPS):
            options.setdefault(name.removeprefix(GROUPS), {})[last] = value
    return ForeignOptimizer(_by_options(options, state), state)


def _by_options(
    options: Mapping[str, dict[str, Any]], state: Mapping[str | int, Any]
) -> list[ForeignGroup]:
    """Group parameters that have the same hyperparameters."""
    groups: dict[str, ForeignGroup] = {}
    for name in {**dict.fromkeys(map(str, state)), **dict.fromkeys(options)}:
        values = options.get(name, {})
        groups.setdefault(repr(sorted(values.items())), ForeignGroup([], values)).params.append(
            name
        )
    return [*groups.values()]
