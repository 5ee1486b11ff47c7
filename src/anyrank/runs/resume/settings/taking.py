"""Applies the settings of the script to a filled state: settings="script"."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.runs.resume.settings.differences import changed_keys, raw_changes
from anyrank.runs.resume.settings.rates import Driven, give, options_of, rates_in, step_to_counts
from anyrank.runs.state.plain_values import as_json
from anyrank.runs.state.script_settings import ScriptSettings, is_schedule


def take_values(script: ScriptSettings, kept: Mapping[str, Any], part: str) -> bool:
    """Apply the script's differing settings to a part that is not an optimizer and that does not
    depend only on its count.

    Args:
        script: the settings of the script.
        kept: the settings of the saved script; a part that it lacks gets all of the script's.
        part: part that is filled.

    Returns:
        True if a setting differed.

    Raises:
        CheckpointError: its own code does not accept them.
    """
    thing, initial = script.parts[part], script.initial[part]
    values = {key: initial[key] for key in raw_changes(as_json(initial), kept.get(part))}
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


def take_groups(script: ScriptSettings, kept: Mapping[str, Any], driven: Driven) -> list[str]:
    """Apply the script's differing settings to an optimizer's groups, and the script's settings to
    the schedulers that depend only on their count, at that count.

    If a schedule or a rate differs, the rates are those of the script's schedules at that count;
    otherwise they stay, including changes by a plateau scheduler or by hand.

    Args:
        script: the settings of the script.
        kept: the settings of the saved script, in the current groups; what it lacks is unknown.
        driven: an optimizer that has an owner, with its schedules.

    Returns:
        Names of the parts whose settings have changed.

    Raises:
        CheckpointError: a scheduler cannot be stepped to the step of the run.
    """
    owner = driven.owner
    assert owner is not None
    filled, initial = options_of(driven.optimizer), script.initial[owner]
    changes = [
        {*row} if owner not in kept else changed_keys(as_json(row), kept[owner][number])
        for number, row in enumerate(initial)
    ]
    others = [p for p in driven.counting if raw_changes(as_json(script.initial[p]), kept.get(p))]
    rated = [
        bool(others) or number in driven.new_groups or not keys.isdisjoint(rates_in(row))
        for number, (keys, row) in enumerate(zip(changes, initial, strict=True))
    ]
    if not any(rated) and not any(changes):
        return []
    counting = bool(driven.counting) and any(rated)
    now = step_to_counts(script, driven) if counting else initial
    used = [
        {**row, **{k: new[k] for k in _keys_to_take(keys, new, is_rated and counting) if k in row}}
        for row, new, keys, is_rated in zip(filled, now, changes, rated, strict=True)
    ]
    give(driven.optimizer, used)
    for schedule in driven.counting.values():
        rates = [copy.deepcopy(row["lr"]) for row in used]
        schedule.load_state_dict({**schedule.state_dict(), "_last_lr": rates})
    is_other = as_json(used) != as_json(filled)
    return [*others, *([owner] if is_other else [])]


def _keys_to_take(changed: set[str], options: Mapping[str, Any], is_rated: bool) -> set[str]:
    """Return the keys of a group's options to change: the differing ones, and scheduled ones."""
    return changed | {*rates_in(dict(options))} if is_rated else changed
