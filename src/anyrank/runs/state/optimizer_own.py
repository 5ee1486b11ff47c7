"""Optimizers with methods of their own, as parts of the state: these methods save and fill them."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.runs.state.part_types import PartMatch, PartSource, PartState, in_line
from anyrank.runs.state.resume_report import Outcome
from anyrank.runs.state.stateful import (
    attribute_tensors,
    match_stateful,
    save_stateful,
    tensors_now,
)


def save_own_methods(part: str, optimizer: Optimizer, rank: int) -> PartState:
    """Return what such an optimizer contributes to a save: its state_dict(). This rank's view.

    Raises:
        CheckpointError: it has no state_dict() for this rank, or one with sharded tensors.
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
    saved.record["kind"] = "optimizer"
    saved.record["opaque"] = True
    saved.unsaved = attribute_tensors(optimizer, [sharded.tensor for sharded in saved.own_tensors])
    return saved


def match_own_methods(
    part: str, optimizer: Optimizer, record: Any, source: PartSource, rank: int
) -> PartMatch:
    """Plan how to fill such an optimizer: by its load_state_dict(). Changes nothing.

    The outcome is "derived" if its state_dict() then has other values than it was given, such as
    those of an inner optimizer that the call leaves out.
    """
    matched = match_stateful(part, optimizer, record, source, rank)
    load = matched.commit

    def commit() -> None:
        load()
        now = tensors_now(part, optimizer)
        filled = {fill.target.name: fill.local for fill in matched.fills}
        lost = [key for key, value in filled.items() if not _is_same(now.get(key), value)]
        if lost:
            call = f"load_state_dict() of a {type(optimizer).__name__} did not bring back"
            matched.outcome = Outcome("derived", in_line(call, lost))

    matched.commit = commit
    return matched


def _is_same(actual: torch.Tensor | None, expected: torch.Tensor) -> bool:
    if actual is None or actual.dtype != expected.dtype:
        return False
    return actual is expected or content_hash(actual) == content_hash(expected)
