"""Gives a filled state the settings of its script: settings="script"."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.runs.resume.settings.differences import changed_keys, raw_changes
from anyrank.runs.resume.settings.driven import Driven
from anyrank.runs.resume.settings.replay import (
    Options,
    count_of,
    give,
    is_replayed,
    options_of,
    replay,
    restored_settings,
    scaled,
)
from anyrank.runs.state.plain_values import as_json
from anyrank.runs.state.script_settings import FUNCTIONS, ScriptSettings, is_schedule

NOISE = 1e-9  # of a base rate: less is the rounding of a schedule that has ended


def take_values(script: ScriptSettings, kept: Mapping[str, Any], part: str) -> bool:
    """Give a part that is no optimizer, and not replayed, what the script gives otherwise.

    Args:
        script: what the script gives.
        kept: the settings of the saved script; a part that it lacks gets all of the script's.
        part: that is filled.

    Returns:
        Whether there was something.

    Raises:
        CheckpointError: its own code does not take it.
    """
    thing, initial = script.parts[part], script.initial[part]
    changed = raw_changes(as_json(initial), kept.get(part)) - {FUNCTIONS}
    values = {key: initial[key] for key in changed}
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


def take_groups(
    script: ScriptSettings, kept: Mapping[str, Any], driven: Driven, lost_parts: Sequence[str]
) -> tuple[list[str], str]:
    """Give an optimizer's groups, and the schedules that go by their count, the script's settings.

    A rate becomes what the script's settings give at the run's count, times what the run's rate was
    of that by the saved settings: what a plateau or a hand did to it stays. Functions are in no
    file, so those of the script are in both, and cancel out.

    Args:
        script: what the script gives.
        kept: the settings of the saved script, for the groups of now; what it lacks is unknown.
        driven: an optimizer that has an owner, with its schedules.
        lost_parts: schedules of the saved run that the script has not.

    Returns:
        Names of the parts that have other settings now; why the saved settings were not replayed.

    Raises:
        CheckpointError: a schedule cannot go as far as the run is.
    """
    optimizer, owner = driven.optimizer, driven.owner
    assert owner is not None
    schedules = {part: thing for part, thing in driven.restored.items() if is_replayed(thing)}
    names = [owner, *schedules]
    initial = {part: script.initial[part] for part in names}
    if not driven.new_groups and not any(_differ(initial[p], kept.get(p)) for p in names):
        return [], ""
    filled = options_of(optimizer)
    states = {part: copy.deepcopy(thing.state_dict()) for part, thing in schedules.items()}
    counts = {part: count_of(state) for part, state in states.items()}
    reason = f"this script has no {', '.join(lost_parts)}" if lost_parts else ""
    before: Sequence[Options] | None = None
    if not lost_parts and all(part in kept for part in names):
        rows = zip(initial[owner], kept[owner], filled, strict=True)
        groups = [restored_settings(*row) for row in rows]
        starts = {p: restored_settings(initial[p], kept[p], states[p]) for p in schedules}
        try:
            before = replay(optimizer, schedules, counts, groups, starts)
        except CheckpointError as error:
            reason = str(error)
    now = replay(optimizer, schedules, counts, initial[owner], initial)
    if reason:  # the rates that the run has stay, but for another base rate
        now, before = _by_base(now, initial[owner]), _by_base(kept[owner], kept[owner])
    used = list[Options]()
    for number, row in enumerate(now):
        old = None if before is None or number in driven.new_groups else before[number]
        used.append(row if old is None else _used(filled[number], row, old))
    give(optimizer, used)
    rates = [row["lr"] for row in used]
    for schedule in schedules.values():
        schedule.load_state_dict({**schedule.state_dict(), "_last_lr": copy.deepcopy(rates)})
    has_moved = as_json(rates) != as_json([row["lr"] for row in filled])
    changed = {owner} if as_json(used) != as_json(filled) else set[str]()
    changed |= {p for p in schedules if has_moved or raw_changes(initial[p], kept.get(p))}
    return [part for part in names if part in changed], reason


def _differ(initial: Any, kept: Any) -> bool:
    """Whether a script gives a part other settings than the saved one, or that is unknown."""
    if kept is None:
        return True
    if isinstance(initial, Mapping):
        return bool(changed_keys(as_json(initial), kept))
    return any(changed_keys(*rows) for rows in zip(as_json(initial), kept, strict=True))


def _by_base(rows: Sequence[Options], bases: Sequence[Options]) -> list[Options]:
    """Options of groups, with the rates that the groups' schedules begin from."""
    pairs = zip(rows, bases, strict=True)
    return [{**row, "lr": base.get("initial_lr", base["lr"])} for row, base in pairs]


def _used(filled: Options, now: Options, before: Options) -> Options:
    """The options of a group: what the schedules of now give otherwise is theirs, the rest stays.

    Args:
        filled: the run's.
        now, before: by the settings of now, and by those of before.
    """
    changed = changed_keys(as_json(now), as_json(before))
    used = {key: now[key] if key in changed else value for key, value in filled.items()}
    if "lr" in changed:
        noise = NOISE * abs(float(now.get("initial_lr", 0)))
        used["lr"] = scaled(filled["lr"], now["lr"], before["lr"], noise)
    return used
