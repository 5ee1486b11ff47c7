"""Where schedules would be if a run had had certain settings from its first step."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anyrank.errors import CheckpointError
from anyrank.runs.state.plain_values import as_json
from anyrank.runs.state.script_settings import FUNCTIONS, NOT_SETTINGS

Options = dict[str, Any]  # of one group, without its parameters


def is_replayed(part: Any) -> bool:
    """Whether a schedule goes by its count alone."""
    return isinstance(part, LRScheduler) and not isinstance(part, ReduceLROnPlateau)


def count_of(state: Mapping[str, Any]) -> int:
    """How often a schedule was stepped."""
    while "last_epoch" not in state and state.get("_schedulers"):
        state = state["_schedulers"][0]
    return max(0, int(state.get("last_epoch", 0)))


def options_of(optimizer: Optimizer) -> list[Options]:
    """A copy of what an optimizer's groups have besides their parameters."""
    return [
        {
            key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in group.items()
            if key not in NOT_SETTINGS
        }
        for group in optimizer.param_groups
    ]


def give(optimizer: Optimizer, rows: Sequence[Mapping[str, Any]]) -> None:
    """Give an optimizer's groups options; a tensor stays the tensor that it is."""
    for group, row in zip(optimizer.param_groups, rows, strict=False):
        for key, value in row.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = copy.deepcopy(value)


def replay(
    optimizer: Optimizer,
    schedules: Mapping[str, Any],
    counts: Mapping[str, int],
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
) -> list[Options]:
    """Bring schedules to a count from their start, as most compute a rate from the one before.

    Args:
        optimizer: whose groups they drive.
        schedules: by part.
        counts: of each, how often it is stepped.
        groups: what the optimizer's groups have at the start.
        states: of each schedule at its start.

    Returns:
        What the groups have then, which is theirs now, as the states are the schedules'.

    Raises:
        CheckpointError: a schedule cannot go so far.
    """
    give(optimizer, groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a schedule that steps before its optimizer
        for part, schedule in schedules.items():
            state = {key: value for key, value in states[part].items() if key != FUNCTIONS}
            schedule.load_state_dict(copy.deepcopy(state))
        for number in range(max(counts.values(), default=0)):
            for part, schedule in schedules.items():
                if number < counts[part]:
                    _step(part, schedule, counts[part])
    return options_of(optimizer)


def _step(part: str, schedule: Any, count: int) -> None:
    try:
        schedule.step()
    except Exception as error:  # of a schedule that is shorter, or of the user's function
        raise CheckpointError(
            f"{part}: as the script makes it, it cannot be stepped {count} times, as often as the "
            f"run has stepped it ({type(error).__name__}: {error}): make it longer, or leave out "
            'settings="script"'
        ) from error


def restored_settings(
    initial: Mapping[str, Any], before: Mapping[str, Any], filled: Mapping[str, Any]
) -> dict[str, Any]:
    """What the saved script gave a schedule or a group.

    Args:
        initial: what the script gives, of which the saved one's has the types.
        before: what the saved one gave, as JSON.
        filled: the restored values, which have types that JSON has not.
    """
    result = dict(initial)
    for key in initial.keys() & before.keys():
        value, saved = initial[key], before[key]
        if as_json(value) == saved:
            continue
        if key == "_schedulers":
            rows = zip(value, saved, filled[key], strict=True)
            result[key] = [restored_settings(*row) for row in rows]
        elif key in filled and as_json(filled[key]) == saved:
            result[key] = filled[key]
        else:
            result[key] = tuple(saved) if isinstance(value, tuple) else saved
    return result


def scaled(saved: Any, now: Any, before: Any, noise: float) -> Any:
    """A rate by the settings of now, with what else has changed it: a plateau, or a hand.

    Args:
        saved: the run's.
        now, before: what the schedules give at its count by the settings of now, and by those of
            before.
        noise: a rate that counts as zero.
    """
    rate, new, old = float(saved), float(now), float(before)
    if new == old:
        return saved
    if math.isclose(rate, old, rel_tol=1e-6, abs_tol=noise):
        return now
    # A rate that was set where the schedules give none is nobody's multiple.
    return saved if abs(old) <= noise else rate * (new / old)
