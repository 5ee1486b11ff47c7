"""An optimizer whose groups are not those of the checkpoint, and the schedulers that use them.

Parameters are new, removed, or in different groups. Hyperparameters belong to the parameters, and
not to the number of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anyrank.models.tensors import ModelTensor
from anyrank.runs.state.part_types import PartMatch, PartSource, differences, in_line
from anyrank.tensors.near_names import near

# Entries that schedulers keep for each group of their optimizer.
BY_GROUP = {
    *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs"),
    *("max_lrs", "base_momentums", "max_momentums"),
}


def match_groups(
    part: str,
    optimizer: Optimizer,
    record: Any,
    names: Mapping[int, ModelTensor],
    source: PartSource,
    matched: PartMatch,
) -> list[str]:
    """Find for each group of an optimizer the saved group whose hyperparameters it takes; add
    groups and problems to `matched`. A group of only fresh parameters keeps its own.

    Args:
        part, optimizer, record, source, names: as for `match_optimizer`.
        matched: match of the part.

    Returns:
        The parameters whose state is reset.
    """
    home = {name: n for n, group in enumerate(record["groups"]) for name in group["params"]}
    chosen: list[int | None] = []
    seen: set[str] = set()
    fresh: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        members = [names[id(parameter)].name for parameter in group["params"]]
        seen.update(members)
        new = [name for name in members if name not in home]
        unasked = [name for name in new if not source.is_fresh(name)]
        if unasked:
            matched.problems.append(
                in_line(f"{part}: parameters that are new since the checkpoint", unasked)
                + f". If that is intended, pass fresh={unasked[:1]!r}, or a pattern."
            )
            continue
        fresh += new
        sources = sorted({home[name] for name in members if name in home})
        if not sources:
            # A group without parameters is matched by its number, because it has nothing else.
            alone = bool(members) or number >= len(record["groups"])
            chosen.append(None if alone else number)
            continue
        first = record["groups"][sources[0]]["options"]
        for other in sources[1:]:
            options = record["groups"][other]["options"]
            if options != first and not source.joins:
                matched.problems.append(
                    f"{part}: group {number} joins parameters of groups {sources[0]} and {other} "
                    f"of the checkpoint, whose hyperparameters differ ("
                    f"{differences(first, options)}). Group them as they were, or pass "
                    'settings="script" to use those of this script.'
                )
        # A group with its own number keeps its position, by which schedulers count.
        chosen.append(number if number in sources else sources[0])
    absent = [name for name in home if name not in seen and not source.is_dropped(name)]
    if absent:
        matched.problems.append(
            in_line(
                f"{part}: parameters of the checkpoint that the optimizer no longer holds", absent
            )
            + ". If they belong to a group that the run added later (add_param_group), add it "
            f"before resume(). If they were frozen or removed, pass drop={absent[:1]!r}, or a "
            f"pattern. skip=[{part!r}] leaves the whole optimizer unrestored."
        )
    matched.groups = chosen
    matched.is_regrouped = _are_regrouped(chosen, len(record["groups"]))
    return fresh


def without_parameter(
    part: str, record: Any, source: PartSource, parameters: Mapping[str, torch.Tensor]
) -> list[str]:
    """Describe saved state whose parameter the optimizer no longer holds."""
    absent = [name for name in record["state"] if name not in parameters]
    unknown = [name for name in absent if not source.is_dropped(name)]
    if not unknown:
        return []
    shown = [f"{name}{near(name, [*parameters])}" for name in unknown]
    return [in_line(f"{part}: has state for parameters that it no longer holds", shown)]


def _are_regrouped(groups: Sequence[int | None], count: int) -> bool:
    """Return True if the groups are not the checkpoint's in order, followed by new ones."""
    return [*groups[:count]] != [*range(count)] or any(n is not None for n in groups[count:])


def in_groups(tree: Any, current: Any, groups: Sequence[int | None]) -> Any:
    """Arrange a scheduler's state for its optimizer's current groups: each continues with the
    values of its saved group, and one without saved values keeps its current ones.
    """
    if not isinstance(tree, dict) or not isinstance(current, dict):
        return tree
    saved, now = cast("dict[str, Any]", tree), cast("dict[str, Any]", current)
    result: dict[str, Any] = dict(saved)
    for key in saved.keys() & now.keys():
        before, after = saved[key], now[key]
        if not isinstance(before, list) or not isinstance(after, list):
            continue
        rows, own_rows = cast("list[Any]", before), cast("list[Any]", after)
        if key == "_schedulers":
            pairs = zip(rows, own_rows, strict=False)
            result[key] = [in_groups(row, own_row, groups) for row, own_row in pairs]
        elif key in BY_GROUP and len(own_rows) == len(groups):
            pairs = zip(groups, own_rows, strict=True)
            result[key] = [
                rows[n] if n is not None and n < len(rows) else own_row for n, own_row in pairs
            ]
    return result


def check_schedulers(parts: Mapping[str, Any], matched: Mapping[str, PartMatch]) -> None:
    """Add a problem for other libraries' schedulers if the optimizer's groups are reordered.

    Args:
        parts: parts of a state, by name.
        matched: matches of the parts, to which the problems are added.
    """
    regrouped = {id(parts[name]): name for name, part in matched.items() if part.is_regrouped}
    for name, part in matched.items():
        optimizer = regrouped.get(id(getattr(parts[name], "optimizer", None)))
        if optimizer is not None and not isinstance(parts[name], LRScheduler):
            part.problems.append(
                f"{name}: depends on the order of {optimizer}'s groups, which is not that of the "
                f"checkpoint. Make them in the same order, or leave {name} unchanged with "
                f"skip=[{name!r}]."
            )
