"""Applies the settings of the script, where they are used, to a state that was filled."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.runs.resume.settings.comparison import SettingsDiff
from anyrank.runs.resume.settings.differences import changed_settings, rates_as_text, rates_in
from anyrank.runs.resume.settings.scheduled import (
    ScheduledOptimizer,
    fit_plateaus,
    set_group_options,
    step_to_counts,
)
from anyrank.runs.state.part_types import PartMatch
from anyrank.runs.state.plain_values import as_json
from anyrank.runs.state.resume_report import Outcome
from anyrank.runs.state.script_settings import ScriptSettings, is_schedule


def apply_settings(
    script: ScriptSettings, diff: SettingsDiff, filled: Mapping[str, PartMatch]
) -> list[str]:
    """Apply the settings of the script where a difference says so; the others are in place.

    Args:
        script: the settings of the script.
        diff: difference between them and those of the saved run.
        filled: parts that are filled; their outcomes are updated.

    Returns:
        A sentence for each optimizer whose learning rates are not those of the saved run.

    Raises:
        CheckpointError: a scheduler cannot be stepped to the step of the run, or a part's own code
            does not accept its settings.
    """
    changed: set[str | None] = {
        part for part in diff.other_parts if _set_values(script, diff, part)
    }
    notes: list[str] = []
    for scheduled in diff.scheduled:
        before = scheduled.last_rates
        if scheduled in diff.replaced:
            restored = _states_of(scheduled)
            step_to_counts(script, scheduled)
            now = _states_of(scheduled)
            # Settings of another tool's run are unknown; a state that is equal shows that they are
            # the script's.
            unchanged = {part for part in now if now[part] == restored[part]}
            changed |= {scheduled.part, *now} & diff.different - unchanged
            if not scheduled.is_restored:
                fit_plateaus(script, scheduled)
        if scheduled.restarts_rates:
            set_group_options(scheduled.optimizer, [*map(rates_in, scheduled.initial)])
        if before and rates_as_text(before) != rates_as_text(scheduled.rates):
            notes.append(_note_on_rates(scheduled, before))
            if scheduled in diff.replaced:
                changed.add(scheduled.part)
    for part in filled.keys() & changed:
        reasons = [filled[part].outcome.reason, "this script's settings"]
        filled[part].outcome = Outcome("derived", "; ".join(filter(None, reasons)))
    script.in_use = diff.in_use
    return notes


def _states_of(scheduled: ScheduledOptimizer) -> dict[str, Any]:
    return {part: as_json(thing.state_dict()) for part, thing in scheduled.counting.items()}


def _set_values(script: ScriptSettings, diff: SettingsDiff, part: str) -> bool:
    """Apply the script's differing settings to a part that is neither an optimizer nor a scheduler
    that depends only on its step count; return True if there are any.

    Raises:
        CheckpointError: its own code does not accept them.
    """
    thing, initial = script.parts[part], script.initial[part]
    values = {key: initial[key] for key in changed_settings(initial, diff.saved.get(part))}
    if not values:
        return False
    if not is_schedule(thing):
        for key, value in values.items():
            setattr(thing, key, value)
        return True
    try:
        thing.load_state_dict({**thing.state_dict(), **copy.deepcopy(values)})
    except Exception as error:  # of the user's code
        raise CheckpointError(
            f"{part}: load_state_dict() of {type(thing).__name__} does not accept the script's "
            f"settings: {type(error).__name__}: {error}"
        ) from error
    return True


def _note_on_rates(scheduled: ScheduledOptimizer, before: Sequence[float]) -> str:
    why = "from this script's settings at the run's step"
    if scheduled.restarts_rates:
        why = f"the initial value of {', '.join(scheduled.new)}, which is not restored"
    name = scheduled.part or type(scheduled.optimizer).__name__
    now = rates_as_text(scheduled.rates)
    return f"{name} lr: {now}, {why}; it was {rates_as_text(before)} in the saved run"
