"""An optimizer whose groups are not those of the checkpoint, and the schedules that go by them.

Parameters are new, gone, or in other groups. Hyperparameters belong to the parameters, and not to
the number of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anyrank.models.tensors import ModelTensor
from anyrank.runs.state.part_types import PartMatch, PartSource, differences, in_line

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
    """Find for each group of an optimizer the saved group whose hyperparameters it takes. A group
    of only fresh parameters keeps its own. Add groups and problems to `matched`.

    Args:
        part, optimizer, record, source, names: as for `match_optimizer`.
        matched: match of the part.

    Returns:
        The parameters that start fresh.
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
                in_line(f"{part}: parameters that the checkpoint's had not", unasked)
                + f": if they are new, resume with fresh={unasked[:1]!r}, or a pattern"
            )
            continue
        fresh += new
        sources = sorted({home[name] for name in members if name in home})
        if not sources:
            # A group without parameters goes by its number, because it has nothing else.
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
                    f"{differences(first, options)}): group them as they were, or resume with "
                    'settings="script", which uses those of this script'
                )
        # A group with its own number keeps its place, by which schedules count.
        chosen.append(number if number in sources else sources[0])
    absent = [name for name in home if name not in seen and not source.is_dropped(name)]
    if absent:
        matched.problems.append(
            in_line(f"{part}: parameters of the checkpoint's that it no longer has", absent)
            + ": if the run has added their group between two steps, add it before the resume; "
            f"if they are frozen now, or gone, resume with drop={absent[:1]!r}, or a pattern; "
            f"skip=[{part!r}] leaves the optimizer as it is, without the moments of the others"
        )
    matched.groups = chosen
    matched.is_regrouped = _are_regrouped(chosen, len(record["groups"]))
    return fresh


def _are_regrouped(groups: Sequence[int | None], count: int) -> bool:
    """Return whether the groups are other than the checkpoint's in order and then new ones."""
    return [*groups[:count]] != [*range(count)] or any(n is not None for n in groups[count:])


def in_groups(tree: Any, current: Any, groups: Sequence[int | None]) -> Any:
    """Arrange a scheduler's state for the groups that its optimizer has now: each continues with
    what its saved group had, and a new one starts as it is.
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
            result[key] = [own_row if n is None else rows[n] for n, own_row in pairs]
    return result


def check_schedulers(parts: Mapping[str, Any], matched: Mapping[str, PartMatch]) -> None:
    """Refuse other libraries' schedulers if the optimizer's groups are in another order.

    Args:
        parts: parts of a state, by name.
        matched: matches of the parts; gets the problems.
    """
    regrouped = {id(parts[name]): name for name, part in matched.items() if part.is_regrouped}
    for name, part in matched.items():
        optimizer = regrouped.get(id(getattr(parts[name], "optimizer", None)))
        if optimizer is not None and not isinstance(parts[name], LRScheduler):
            part.problems.append(
                f"{name}: goes by the order of {optimizer}'s groups, which are not those of the "
                f"checkpoint: make them in the same order, or leave {name} as it is with "
                f"skip=[{name!r}]"
            )
