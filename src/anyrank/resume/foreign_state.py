"""Schedulers, scalers and other parts with a `state_dict()` that another tool saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from anyrank.data.position import Position
from anyrank.errors import CheckpointError
from anyrank.files.foreign import ForeignCheckpoint, is_plain_number
from anyrank.resume.json_codec import to_json
from anyrank.resume.report import Outcome
from anyrank.tensors.spec import StoredTensor

# What a scheduler keeps that steps count up, and what they leave alone.
COUNTS = ("last_epoch", "_step_count")
CONSTANT = {
    "base_lrs", "_last_lr", "lr_lambdas", "verbose", "_is_initial", "_get_lr_called_within_step",
}  # fmt: skip


def record_of(
    part: str, thing: Any, tree: Any
) -> tuple[dict[str, Any] | str, dict[str, StoredTensor]]:
    """The record of a stateful part and the tensors that it refers to, or why there is none."""
    tensors: dict[str, StoredTensor] = {}

    def put(where: str, value: Any) -> Any:
        tensors[where] = value.renamed(where)
        return {"~whole": where}

    try:
        tree = to_json(tree, part, put)
    except CheckpointError as error:
        return f"the checkpoint holds what is not read: {error}".split(":  ", 1)[0], {}
    record = {"kind": "stateful", "class": type(thing).__name__, "layout": "", "tree": tree}
    return record, tensors


def in_optimizer_steps(tree: Any, source: ForeignCheckpoint) -> tuple[Any, Outcome | None]:
    """A scheduler's state as one has it that is stepped once in each optimizer step.

    Accelerate steps it once for each process. The state, and what became of it if it is not the
    saved one; the state is None where it cannot be told.
    """
    often, step = source.scheduler_steps, source.step
    if often == 1 or not isinstance(tree, dict):
        return tree, None
    table = cast("dict[str, Any]", tree)
    count = table.get("last_epoch")
    if step is None or not is_plain_number(count):
        return None, Outcome(
            "fresh", "its steps cannot be counted: the optimizer's state does not say how many"
        )
    if count == step:
        return tree, None
    strange = sorted(table.keys() - CONSTANT - {*COUNTS})
    if count != step * often or strange:
        why = f"it also has {', '.join(strange)}" if strange else f"it counts {count}"
        return None, Outcome(
            "fresh",
            f"it was stepped once for each of {often} processes, and cannot be divided: {why}",
        )
    made = table | {"last_epoch": step}
    if "_step_count" in table:
        made["_step_count"] = step + 1
    return made, Outcome(
        "derived", f"it was stepped once for each of {often} processes: {count} became {step}"
    )


def start_of(data: Position, source: ForeignCheckpoint) -> tuple[dict[str, Any], Outcome]:
    """The state of a loader that goes on in the epoch that the checkpoint was in, from its start.

    Which samples of that epoch were seen is unknown, as the other tool's order is its own.
    """
    now = data.state_dict()
    epoch = 0.0 if source.epoch is None else source.epoch
    samples = round(epoch * now["n"]) if source.samples is None else source.samples
    made = now | {"epoch": int(epoch), "step": source.step or 0, "samples": samples}
    if source.epoch is None:
        return made, Outcome("fresh", "the checkpoint does not say how far the data was")
    if epoch == int(epoch):
        return made, Outcome("derived", f"{int(epoch)} whole epochs: the next one begins")
    seen = round((epoch - int(epoch)) * now["n"])
    return made, Outcome(
        "fresh",
        f"epoch {int(epoch)} begins again: the checkpoint was {epoch - int(epoch):.0%} into it, in "
        f"an order of its tool's, so about {seen} samples are seen twice",
    )


def unused(source: Mapping[str, Any], used: set[str]) -> list[str]:
    """Names in the source that nothing here took."""
    return sorted(source.keys() - used)
