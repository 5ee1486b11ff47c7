"""Optimizers that keep more than torch's own: they are saved and resumed by their own methods.

`Optimizer.state` and the groups' options are all that a torch optimizer has. Wrappers and sharded
optimizers have slow weights, inner optimizers or partitions besides, which only their
`state_dict()` and `load_state_dict()` know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
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
    lost = _unlike(optimizer, [held.tensor for held in saved.own])
    if lost:
        raise CheckpointError(
            listed(f"{part}: a {name} has tensors that its state_dict() does not hold", lost)
            + ": they would be lost; add them to its state_dict() and load_state_dict()"
        )
    saved.record["kind"] = "optimizer"
    saved.record["opaque"] = True
    saved.record["kept"] = sorted({where for where, _ in _kept(optimizer)})
    return saved


def _unlike(optimizer: Optimizer, others: Sequence[torch.Tensor]) -> list[str]:
    """Names of tensors that an optimizer keeps, and whose values none of the others has."""
    places = {_place(tensor) for tensor in others}
    left = [(where, tensor) for where, tensor in _kept(optimizer) if _place(tensor) not in places]
    values: dict[Any, set[str]] = {}
    for tensor in others if left else ():
        values.setdefault((tensor.shape, tensor.dtype), set()).add(content_hash(tensor))
    return [
        where
        for where, tensor in left
        if (tensor.shape, tensor.dtype) not in values
        or content_hash(tensor) not in values[tensor.shape, tensor.dtype]
    ]


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _kept(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors that an optimizer has in addition to its parameters; inner ones' too."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    yield from _tensors_of("state", optimizer.state, parameters)
    for where, value in kept_elsewhere(optimizer):
        if isinstance(value, Optimizer):
            yield from _tensors_of(f"{where}.state", value.state, parameters)
        else:
            yield where, value


def _tensors_of(where: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, found in within(where, value, {*seen}):
        if isinstance(found, torch.Tensor):
            yield name, found


def match_opaque(
    part: str, optimizer: Optimizer, record: Any, stored: Stored, rank: int
) -> Matched:
    """What fills such an optimizer: its load_state_dict(). Nothing is changed.

    It is "derived" where that call leaves tensors out, as one does that gives the state to a
    wrapper and not to the optimizer within it, or casts them.
    """
    call = f"load_state_dict() of a {type(optimizer).__name__}"
    matched = match_stateful(part, optimizer, record, stored, rank)
    load = matched.commit

    def commit() -> None:
        load()
        now = tensors_now(part, optimizer)
        wanted = {fill.held.name: fill.local.dtype for fill in matched.fills}
        cast_ = [key for key, dtype in wanted.items() if key not in now or now[key].dtype != dtype]
        gone = {*record.get("kept", ())} - {where for where, _ in _kept(optimizer)}
        left = sorted({*gone, *_unlike(optimizer, [fill.local for fill in matched.fills])})
        if cast_:
            matched.outcome = Outcome("derived", listed(f"{call} changed the dtype of", cast_))
        elif left:
            matched.outcome = Outcome("derived", listed(f"{call} did not bring back", left))

    matched.commit = commit
    return matched
