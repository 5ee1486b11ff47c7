"""The groups of an optimizer, beside those of the checkpoint: which of theirs each one takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from anyrank.errors import CorruptCheckpoint
from anyrank.files.optimizer_numbers import IMPLEMENTATION
from anyrank.model.tensors import ModelTensor
from anyrank.state.part_types import Stored, differences, listed

Names = Mapping[int, ModelTensor]  # id of a parameter -> the tensor of a module of the same state


def check_options(where: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Hyperparameters of a saved group that are of another kind than the optimizer's.

    Raises:
        CorruptCheckpoint: its learning rate is absent, or none.
    """
    lr = saved.get("lr", ...)
    if "lr" in now and _kind_of(lr) not in ("number", "None"):
        found = "no learning rate" if lr is ... else f"the learning rate {lr!r}"
        raise CorruptCheckpoint(f"{where} has {found} in the checkpoint, which is damaged")
    return [
        f"{where} has {key} {saved[key]!r} in the checkpoint, and {now[key]!r} here: make the "
        "optimizer as it was"
        for key in sorted(saved.keys() & now.keys() - {*IMPLEMENTATION})
        if len({_kind_of(saved[key]), _kind_of(now[key])} - {"None"}) > 1
    ]


def _kind_of(value: Any) -> str:
    """The kind of a hyperparameter, within which its type may change."""
    if isinstance(value, int | float | torch.Tensor):
        return "number"
    if isinstance(value, list | tuple):
        return "sequence"
    return "None" if value is None else type(value).__name__


def fit_groups(
    part: str,
    optimizer: Optimizer,
    record: Any,
    names: Names,
    stored: Stored,
    problems: list[str],
) -> tuple[list[int | None], list[str]]:
    """For each group of the optimizer, the saved group whose hyperparameters it takes; and the
    parameters that start fresh. A group of these alone keeps its own hyperparameters.
    """
    home = {name: n for n, group in enumerate(record["groups"]) for name in group["params"]}
    chosen: list[int | None] = []
    seen: set[str] = set()
    fresh: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        members = [names[id(parameter)].name for parameter in group["params"]]
        seen.update(members)
        new = [name for name in members if name not in home]
        unasked = [name for name in new if not stored.is_fresh(name)]
        if unasked:
            problems.append(
                listed(f"{part}: parameters that the checkpoint's had not", unasked)
                + f": if they are to start anew, resume with fresh={unasked[:1]!r}, or a pattern"
            )
            continue
        fresh += new
        sources = sorted({home[name] for name in members if name in home})
        if not sources:
            alone = bool(members) or number >= len(record["groups"])
            chosen.append(None if alone else number)
            continue
        first = record["groups"][sources[0]]["options"]
        for other in sources[1:]:
            options = record["groups"][other]["options"]
            if options != first:
                problems.append(
                    f"{part}: group {number} joins parameters of groups {sources[0]} and {other} "
                    f"of the checkpoint, whose hyperparameters differ ("
                    f"{differences(first, options)}): group them as they were"
                )
        chosen.append(sources[0])
    gone = [name for name in home if name not in seen]
    if gone:
        problems.append(
            listed(f"{part}: parameters of the checkpoint's that it no longer has", gone)
        )
    return chosen, fresh


def are_regrouped(groups: Sequence[int | None], count: int) -> bool:
    """Whether groups are other than the checkpoint's, in order, and new ones after them."""
    return [*groups[:count]] != [*range(count)] or any(n is not None for n in groups[count:])
