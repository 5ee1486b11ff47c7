"""Optimizers with their own methods, as parts of the state: these methods save and fill them.

Wrappers and sharded optimizers have slow weights, inner optimizers or partitions besides torch's
state, which only their methods know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.optim import Optimizer

from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.runs.state.part_types import PartMatch, PartSource, PartState, in_line, other_class
from anyrank.runs.state.resume_report import Outcome
from anyrank.runs.state.stateful import match_stateful, save_stateful, tensors_now
from anyrank.tensors.wrapped import values_of

HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
PLAIN = ("state", "param_groups", "defaults")  # every optimizer has and saves these
SHOWN = 4  # parameters to show of an order
NESTED = 6  # levels of containers that are searched


def save_own_methods(
    part: str, optimizer: Optimizer, groups: Sequence[Sequence[str]], rank: int
) -> PartState:
    """Return the contribution of such an optimizer to a save: its state_dict(). This rank's view.

    Args:
        part, optimizer, rank: as for `save_optimizer`.
        groups: names of the parameters in each of its groups.

    Raises:
        CheckpointError: it has no state_dict() for this rank, or one with sharded tensors.
    """
    name = type(optimizer).__name__
    try:
        saved = save_stateful(part, optimizer, rank)
    except RuntimeError as error:
        raise CheckpointError(
            f"{part}: a {name} cannot be saved, because it has no state_dict() on this rank "
            f"({error}). Use a torch optimizer, with fully_shard (FSDP2) to shard its state."
        ) from error
    if saved.tensors:
        raise CheckpointError(
            f"{part}: a {name} cannot be saved: its custom state_dict() contains sharded tensors "
            f"({saved.tensors[0].name}), whose layout only {name} knows. Use a torch optimizer "
            "with sharded parameters."
        )
    saved.record["kind"] = "optimizer"
    saved.record["opaque"] = True
    saved.record["params"] = groups  # because a state_dict() numbers them
    saved.unsaved = attribute_tensors(optimizer, [sharded.tensor for sharded in saved.own_tensors])
    return saved


def other_methods(part: str, name: str, record: Any) -> str:
    """Describe the problem of an optimizer that has own methods on only one side."""
    if record["class"] != name:
        return other_class(part, name, record["class"])
    sides = ["the saved run", "this script"]
    with_own, without = sides if "opaque" in record else sides[::-1]
    return (
        f"{part}: a {name} overrides state_dict() or has hooks on it in {with_own}, but not in "
        f"{without}, so its state has another form. Make them the same, or leave the {name} "
        f"unchanged with skip=[{part!r}]."
    )


def match_own_methods(
    part: str,
    optimizer: Optimizer,
    groups: Sequence[Sequence[str]],
    record: Any,
    source: PartSource,
    rank: int,
) -> PartMatch:
    """Plan how to fill such an optimizer by its load_state_dict(). Changes nothing.

    Parameters in another order are a problem, because the method would mistake one for another.
    The outcome is "derived" if its state_dict() then has different values than were loaded, such as
    those of an inner optimizer that the call does not restore.
    """
    matched = match_stateful(part, optimizer, record, source, rank)
    # If the ranks' states differed, so may their parameters, and the record has the first rank's.
    if not matched.problems and "by_rank" not in record:
        reason = f"the state_dict() of a {type(optimizer).__name__} has the state of its parameters"
        orders = _flat(record["params"]), _flat(groups)
        matched.problems += other_order(part, f"{reason} in their order", *orders)
    load = matched.commit

    def commit() -> None:
        load()
        now = tensors_now(part, optimizer)
        filled = {fill.target.name: fill.local for fill in matched.fills}
        lost = [key for key, value in filled.items() if not _is_same(now.get(key), value)]
        if lost:
            call = f"load_state_dict() of a {type(optimizer).__name__} did not restore"
            matched.outcome = Outcome("derived", in_line(call, lost))

    matched.commit = commit
    return matched


def _flat(groups: Sequence[Sequence[str]]) -> list[str]:
    """Return the names of parameters in order, each with the number of its group."""
    return [f"{name} (group {number})" for number, names in enumerate(groups) for name in names]


def other_order(part: str, reason: str, saved: Sequence[str], names: Sequence[str]) -> list[str]:
    """Describe a different order of an optimizer's parameters; return [] if it is the same.

    Args:
        part: its name in the state.
        reason: the part of its state that has this order.
        saved, names: the parameters in the saved order, and in the current one.
    """
    pairs = enumerate(zip_longest(saved, names))
    first = next((number for number, (before, now) in pairs if before != now), None)
    if first is None:
        return []
    before, now = (", ".join(some[first : first + SHOWN]) or "none" for some in (saved, names))
    return [
        f"{part}: {reason}, which was {before} in the saved run and is {now} here, from parameter "
        f"{first} on. Make it with the same parameters in the saved order, or pass skip=[{part!r}] "
        "to start it anew"
    ]


def _is_same(actual: torch.Tensor | None, expected: torch.Tensor) -> bool:
    if actual is None or actual.dtype != expected.dtype:
        return False
    return actual is expected or content_hash(actual) == content_hash(expected)


def has_own_methods(optimizer: Optimizer) -> bool:
    """Return True if an optimizer overrides `state_dict()`, or has hooks on its saves or loads."""
    return overrides(optimizer, "state_dict") or any(getattr(optimizer, n, None) for n in HOOKS)


def overrides(optimizer: Optimizer, method: str) -> bool:
    """Return True if a method of an optimizer is not torch's own."""
    is_inherited = getattr(type(optimizer), method) is getattr(Optimizer, method)
    return not is_inherited or method in vars(optimizer)


def attribute_tensors(optimizer: Optimizer, saved: Sequence[torch.Tensor]) -> list[str]:
    """Return the optimizer's attributes that hold tensors, or optimizers with state, that are
    neither saved nor copies of saved ones: a resume does not restore them.
    """
    known = {_memory_of(tensor) for tensor in saved}
    known |= {_memory_of(param) for group in optimizer.param_groups for param in group["params"]}
    left = [
        (name, tensor)
        for name, value in vars(optimizer).items()
        if name not in PLAIN
        for tensor in _tensors_in(value, NESTED)
        if _memory_of(tensor) not in known
    ]
    if left and has_own_methods(optimizer):  # its state_dict() may hold copies
        values = {content_hash(tensor) for tensor in saved}
        left = [(name, tensor) for name, tensor in left if content_hash(tensor) not in values]
    return sorted({name for name, _ in left})


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: a tensor, a container, an optimizer's state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Optimizer):
        yield from _tensors_in(value.state, depth)
    elif depth and isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        items: Any = value.values() if isinstance(value, Mapping) else value
        for item in items:
            yield from _tensors_in(item, depth - 1)


def _memory_of(tensor: Any) -> tuple[int, torch.Size, torch.dtype]:
    local = tensor.to_local() if hasattr(tensor, "placements") else tensor
    local = values_of(local)
    address = local.data_ptr() if local.layout == torch.strided else id(tensor)
    return address, local.shape, local.dtype
