"""The state of a scheduler that another tool saved: whether it matches, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, cast

from torch.optim.lr_scheduler import LRScheduler

from anyrank.errors import CheckpointError
from anyrank.runs.state.resume_report import Outcome
from anyrank.sources.foreign.checkpoint import ForeignCheckpoint, is_plain_number
from anyrank.wording import count

# Entries besides its count that a scheduler changes in its steps; they cannot be divided.
COUNTERS = {"T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"}
INNER = "_schedulers"  # the states of the schedulers within one
MORE = 1.5  # times the step: a higher count is not due to steps that a GradScaler skipped


def other_kind(part: str, thing: Any, tree: Any) -> str | None:
    """Return the problem of a saved state that comes from a different class of scheduler.

    No tool saves the class, so the public entries are compared: those of the scheduler, and of
    those within it.
    """
    if not isinstance(thing, LRScheduler) or not isinstance(tree, dict):
        return None
    differ = _differing_entries(thing.state_dict(), cast("dict[Any, Any]", tree))
    if not differ:
        return None
    return (
        f"{part}: is a {type(thing).__name__}, but the checkpoint's scheduler has another class "
        f"(only one of them has {', '.join(differ)}). Use the class of the original run, or leave "
        f"it unchanged with skip=[{part!r}]."
    )


def _differing_entries(now: Mapping[Any, Any], saved: Mapping[Any, Any]) -> list[str]:
    """Return the names of entries that only one of two states of a scheduler has."""
    names = {str(key) for key in now} ^ {str(key) for key in saved}
    differ = sorted(name for name in names if not name.startswith("_") and name != "verbose")
    inner, saved_inner = _inner(now), _inner(saved)
    if not differ and len(inner) != len(saved_inner):
        return [f"{len(inner)} and {count(len(saved_inner), 'inner scheduler')}"]
    for pair in zip(inner, saved_inner, strict=False):
        differ = differ or _differing_entries(*pair)
    return differ


def _inner(state: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    """Return the states of the inner schedulers; a file may hold anything there."""
    inner: Any = state.get(INNER)
    rows = cast("list[Any]", inner) if isinstance(inner, list) else []
    return [row for row in rows if isinstance(row, dict)]


def counted(state: Any) -> int | float | None:
    """Return how often a scheduler was stepped, by its own state or that of its first inner one."""
    if not isinstance(state, dict):
        return None
    known = cast("dict[Any, Any]", state)
    inner = _inner(known)
    if "last_epoch" not in known and inner:
        return counted(inner[0])
    value = known.get("last_epoch")
    return value if is_plain_number(value) else None


def in_optimizer_steps(
    part: str, thing: Any, tree: Any, source: ForeignCheckpoint
) -> tuple[Any, Outcome | None]:
    """Convert a scheduler's state to one scheduler step per optimizer step.

    If it was stepped more often, for example by Accelerate, once per process, its count is divided.
    Its other constants, which that factor had multiplied, are taken from the current scheduler.

    Returns:
        The state, and its outcome if the saved state was changed.

    Raises:
        CheckpointError: the state cannot be divided.
    """
    often, step = source.scheduler_steps, source.step
    total = counted(tree)
    if often == 1 or total is None or (total == step and not source.says_scheduler_steps):
        return tree, None
    if source.says_scheduler_steps and total % often == 0:
        step = int(total) // often
    saved = cast("dict[Any, Any]", tree)
    strange = sorted(_counters(saved))
    if step is None or total != step * often or strange:
        why = f"its count is {total:g}" + (f", and it has {', '.join(strange)}" if strange else "")
        why += ", and the optimizer's state does not count steps" if step is None else ""
        why += "" if step is None else f" at step {step}"
        raise CheckpointError(
            f"{part}: {_stepped(source)}, {often} times per optimizer step, which cannot be undone "
            f"here, because {why}. Pass the true factor with scheduler_steps=, or restart it with "
            f"skip=[{part!r}]."
        )
    reason = (
        f"{_stepped(source)}, {often} times per optimizer step, so {total:g} became {step}; a "
        f"schedule f(step) that was not stretched by {often} is now f({often} * step)"
    )
    return _at_count(thing.state_dict(), saved, step), Outcome("derived", reason)


def _stepped(source: ForeignCheckpoint) -> str:
    if source.says_scheduler_steps:
        return f"it was stepped according to scheduler_steps={source.scheduler_steps}"
    return f"{source.tool} steps it once per process"


def _counters(state: Mapping[Any, Any]) -> set[str]:
    """Return the names of what a scheduler, or an inner one, counts besides its steps."""
    counters = {str(key) for key in state} & COUNTERS
    return counters.union(*(_counters(row) for row in _inner(state)))


def _at_count(now: Mapping[str, Any], saved: Mapping[Any, Any], steps: int) -> dict[str, Any]:
    """Return the state of a scheduler made as `now`, after `steps`, with the saved learning
    rates."""
    state: dict[str, Any] = {**saved, **now}
    state |= {key: saved[key] for key in ("base_lrs", "_last_lr") if key in saved}
    state |= {"last_epoch": steps} if "last_epoch" in now else {}
    state |= {"_step_count": steps + 1} if "_step_count" in state else {}
    rows = [*zip(_inner(now), _inner(saved), strict=False)]
    if rows:
        ends = [*now["_milestones"], inf] if "_milestones" in now else [inf] * len(rows)
        # A SequentialLR starts the next one at a milestone; a ChainedScheduler steps all of them.
        begins = [0, *ends[:-1]] if "_milestones" in now else [0] * len(rows)
        counts = [
            max(0, min(steps, end - 1) - begin) for begin, end in zip(begins, ends, strict=True)
        ]
        state[INNER] = [
            _at_count(*row, int(number)) for row, number in zip(rows, counts, strict=True)
        ]
    return state


def count_warnings(part: str, tree: Any, source: ForeignCheckpoint) -> list[str]:
    """Return warnings for the report if a scheduler's count cannot be the step's."""
    total, step = counted(tree), source.step
    if total is None or step is None or source.says_scheduler_steps:
        return []
    if total <= max(step + 1, MORE * step):  # also a scheduler of epochs, or of each n-th step
        return []
    often = f" ({total / step:g} times as many)" if step else ""
    way_out = f"skip=[{part!r}] restarts it"
    if step and total % step == 0:
        times = int(total) // step
        way_out = f"resume(path, scheduler_steps={times}) uses {step} instead"
    return [
        f"{part}: the scheduler has stepped {total:g} times at optimizer step {step}{often}, so "
        "each process or microbatch probably stepped it. Its learning rate is that of count "
        f"{total:g}; {way_out}."
    ]
