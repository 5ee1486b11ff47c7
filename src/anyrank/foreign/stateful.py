"""Schedulers, scalers and other parts with a `state_dict()` that another tool saved."""

from __future__ import annotations

from typing import Any, cast

from torch.optim.lr_scheduler import LRScheduler

from anyrank.data.position import ElasticData
from anyrank.errors import CheckpointError
from anyrank.files.json_codec import to_json
from anyrank.foreign.checkpoint import ForeignCheckpoint
from anyrank.state.report import Outcome
from anyrank.tensors.spec import StoredTensor

# What a scheduler keeps besides its count that its steps change; it cannot be divided.
COUNTERS = {"_schedulers", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"}


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
        return f"the checkpoint holds what is not read: {str(error).partition(': a ')[2]}", {}
    record = {"kind": "stateful", "class": type(thing).__name__, "layout": "", "tree": tree}
    return record, tensors


def problem_of(part: str, thing: Any, tree: Any) -> str | None:
    """Whether a saved state is one of another kind of scheduler."""
    if not isinstance(thing, LRScheduler) or not isinstance(tree, dict):
        return None
    saved = {str(key) for key in cast("dict[Any, Any]", tree)}
    now = set(thing.state_dict())
    differ = sorted(name for name in saved ^ now if not name.startswith("_") and name != "verbose")
    if not differ:
        return None
    return (
        f"{part}: is a {type(thing).__name__}, and the checkpoint's is of another class (only one "
        f"of them has {', '.join(differ)}): make it as it was, or leave it with skip=[{part!r}]"
    )


def in_optimizer_steps(
    part: str, thing: Any, tree: Any, source: ForeignCheckpoint
) -> tuple[Any, Outcome | None]:
    """A scheduler's state as it is when it is stepped once in each optimizer step.

    Accelerate steps it once for each process: its count is divided, and its other constants, which
    that number multiplied, are those that it is made with now.

    Returns:
        The state, and what became of it if it is not the saved one.

    Raises:
        CheckpointError: it cannot be divided.
    """
    often, step = source.scheduler_steps, source.step
    if often == 1 or not isinstance(tree, dict):
        return tree, None
    table = cast("dict[str, Any]", tree)
    count = table.get("last_epoch")
    if step is not None and count == step:
        return tree, None
    strange = sorted(table.keys() & COUNTERS)
    if step is None or count != step * often or strange:
        why = f"it counts {count}" + (f", and has {', '.join(strange)}" if strange else "")
        why += ", and the optimizer's state does not count steps" if step is None else ""
        raise CheckpointError(
            f"{part}: {source.tool} steps it once for each process, {often} times in a step, which "
            f"cannot be undone here: {why}: leave it with skip=[{part!r}], and set it to the "
            "steps that the run has"
        )
    made: dict[str, Any] = {**table, **thing.state_dict()}
    made |= {key: table[key] for key in ("base_lrs", "_last_lr") if key in table}
    made |= {"last_epoch": step}
    made |= {"_step_count": step + 1} if "_step_count" in made else {}
    return made, Outcome(
        "derived", f"it was stepped once for each of {often} processes: {count} became {step}"
    )


def start_of(data: ElasticData, source: ForeignCheckpoint) -> tuple[dict[str, Any], Outcome]:
    """The state of a loader that goes on in the epoch that the checkpoint was in, from its start.

    Which samples of that epoch were seen is unknown, as the other tool's order is its own.
    """
    now = data.state_dict()
    epoch = 0.0 if source.epoch is None else source.epoch
    samples = round(epoch * now["n"]) if source.samples is None else source.samples
    made = now | {"epoch": int(epoch), "step": source.step or 0, "samples": samples}
    if source.epoch is None:
        return made, Outcome("fresh", "the checkpoint does not say how far the data was")
    if source.batches:
        return made, Outcome(
            "fresh",
            f"epoch {int(epoch)} begins again: the checkpoint was {source.batches} batches "
            "into it, in an order of its tool's, and their samples are seen twice",
        )
    if epoch == int(epoch):
        return made, Outcome("derived", f"{int(epoch)} whole epochs: the next one begins")
    seen = round((epoch - int(epoch)) * now["n"])
    return made, Outcome(
        "fresh",
        f"epoch {int(epoch)} begins again: the checkpoint was {epoch - int(epoch):.0%} into it, in "
        f"an order of its tool's, so about {seen} samples are seen twice",
    )
