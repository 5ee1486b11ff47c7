"""Optimizers that keep more than torch's own: they are saved and resumed by their own methods.

`Optimizer.state` and the groups' options are all that a torch optimizer has. Wrappers and sharded
optimizers have slow weights, inner optimizers or partitions besides, which only their
`state_dict()` and `load_state_dict()` know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from anyrank.errors import CheckpointError
from anyrank.state.optimizer_attributes import kept_elsewhere, within
from anyrank.state.part_types import Matched, Saved, Stored, listed
from anyrank.state.report import Outcome
from anyrank.state.stateful import match_stateful, save_stateful, tensors_now

HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def is_opaque(optimizer: Optimizer) -> bool:
    """Whether `.state` and the groups may not be all that an optimizer has."""
    return (
        overrides(optimizer, "state_dict")
        or any(getattr(optimizer, name, None) for name in HOOKS)
        or next(kept_elsewhere(optimizer), None) is not None
    )


def overrides(optimizer: Optimizer, method: str) -> bool:
    """Whether a method of an optimizer is not torch's own."""
    own = getattr(type(optimizer), method) is getattr(Optimizer, method)
    return not own or method in vars(optimizer)


def save_opaque(part: str, optimizer: Optimizer, rank: int) -> Saved:
    """What such an optimizer contributes to a save: its state_dict(). This rank's view.

    Raises:
        CheckpointError: it has no state_dict() for this rank, tensors that the state_dict() does
            not hold, or sharded ones.
    """
    name = type(optimizer).__name__
    try:
        saved = save_stateful(part, optimizer, rank)
    except RuntimeError as error:
        raise CheckpointError(
            f"{part}: a {name} has no state_dict() on this rank ({error}): it cannot be saved; use "
            "a torch optimizer, with fully_shard (FSDP2) where its state is to be sharded"
        ) from error
    if saved.tensors:
        raise CheckpointError(
            f"{part}: a {name} keeps more than torch's state, and its state_dict() has sharded "
            f"tensors ({saved.tensors[0].name}), which it alone could lay out: it cannot be saved; "
            "use a torch optimizer with sharded parameters"
        )
    lost = _lost(optimizer, [held.tensor for held in saved.own])
    if lost:
        raise CheckpointError(
            listed(f"{part}: a {name} has tensors that its state_dict() does not hold", lost)
            + ": they would be lost; add them to its state_dict() and load_state_dict()"
        )
    saved.record["kind"] = "optimizer"
    saved.record["opaque"] = True
    return saved


def _lost(optimizer: Optimizer, saved: list[torch.Tensor]) -> list[str]:
    """Names of tensors that an optimizer keeps in addition to its parameters, and does not save."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    kept = [*_tensors_of("state", optimizer.state, parameters)]
    for where, value in kept_elsewhere(optimizer):
        if isinstance(value, Optimizer):
            kept += _tensors_of(f"{where}.state", value.state, parameters)
        else:
            kept.append((where, value))
    there = {(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in saved}
    return [
        where
        for where, tensor in kept
        if (tensor.data_ptr(), tensor.shape, tensor.dtype) not in there
        and not any(_equal(tensor, other) for other in saved)
    ]


def _tensors_of(where: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, found in within(where, value, {*seen}):
        if isinstance(found, torch.Tensor):
            yield name, found


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor has a copy's values, wherever that is."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return torch.equal(tensor.detach().cpu().view(-1), other.detach().cpu().view(-1))


def match_opaque(
    part: str, optimizer: Optimizer, record: Any, stored: Stored, rank: int
) -> Matched:
    """What fills such an optimizer: its load_state_dict(). Nothing is changed."""
    name = type(optimizer).__name__
    matched = match_stateful(part, optimizer, record, stored, rank)
    load = matched.commit

    def commit() -> None:
        load()
        now = tensors_now(part, optimizer)
        wanted = {fill.held.name: fill.local.dtype for fill in matched.fills}
        cast_ = [key for key, dtype in wanted.items() if key not in now or now[key].dtype != dtype]
        if cast_:
            matched.outcome = Outcome(
                "derived", listed(f"load_state_dict() of a {name} changed the dtype of", cast_)
            )

    matched.commit = commit
    return matched
