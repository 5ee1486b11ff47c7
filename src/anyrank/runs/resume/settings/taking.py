"""Gives a filled state the settings of its script: settings="script"."""

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
    """Give a part that is no optimizer, and does not go by its count, what the script gives
    otherwise.

    Args:
        script: what the script gives.
        kept: the settings of the saved script; a part that it lacks gets all of the script's.
        part: part that is filled.

    Returns:
        Whether there was something.

    Raises:
        CheckpointError: its own code does not take it.
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
            f"{part}: load_state_dict() of {type(thing).__name__} does not take the script's "
            f"settings: {type(error).__name__}: {error}"
        ) from error
    return True


def take_groups(script: ScriptSettings, kept: Mapping[str, Any], driven: Driven) -> list[str]:
    """Give an optimizer's groups what the script gives otherwise, and the schedules that go by
    their count the script's settings, at that count.

    Rates are as the script's schedules give them there, if the script gives a schedule or a rate
    otherwise, and else stay, with what a plateau or a hand has done to them.

    Args:
        script: what the script gives.
        kept: the settings of the saved script, for the groups of now; what it lacks is unknown.
        driven: an optimizer that has an owner, with its schedules.

    Returns:
        Names of the parts that have other settings now.

    Raises:
        CheckpointError: a schedule cannot go as far as the run is.
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
    """Keys of a group's options to take: what has changed, and with it what schedules drive."""
    return changed | {*rates_in(dict(options))} if is_rated else changed
