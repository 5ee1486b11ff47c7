"""Compares the settings of a script, at a resume, with those of the saved run's script.

With settings="saved" the saved run's settings are used, and the report names the differences. With
settings="script", if any setting of an optimizer or of its schedules differs, all of them are the
script's, with the schedules at their step counts. The same is done for an optimizer that is not
restored but whose schedules are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from anyrank.runs.resume.settings.differences import (
    SHOWN_GROUPS,
    differences,
    group_differences,
    rates_in,
)
from anyrank.runs.resume.settings.scheduled import (
    ScheduledOptimizer,
    count_of,
    scheduled_optimizers,
)
from anyrank.runs.state.accelerate_wrappers import innermost
from anyrank.runs.state.optimizer_groups import in_groups
from anyrank.runs.state.part_types import PartMatch
from anyrank.runs.state.plain_values import as_json
from anyrank.runs.state.script_settings import ScriptSettings, Settings


@dataclass(frozen=True)
class Change:
    """A setting that differs between the script and the saved run's script.

    Attributes:
        part: part of the state.
        key: key of the setting; for an inner scheduler with a path, "schedulers.1.T_max".
        value, saved: both, as text.
        group: number of the optimizer's group; None in other parts.
        groups: number of groups of the optimizer.
    """

    part: str
    key: str
    value: str
    saved: str
    group: int | None = None
    groups: int = 0


@dataclass(frozen=True)
class SettingsDiff:
    """The difference between the settings of a script and those of the saved run's script.

    Attributes:
        used: the settings that the caller of the resume asked for.
        changes: settings that differ.
        saved: part -> settings of the saved run's script, in the current groups, if known.
        scheduled: the optimizers, with their schedulers.
        replaced: those of them that take all settings of the script.
        other_parts: other parts that take the script's differing settings.
        different: parts of which a setting differs, or may differ because it is unknown.
        in_use: part -> the settings that are used, as JSON, for the next saves.
    """

    used: Settings
    changes: list[Change]
    saved: dict[str, Any]
    scheduled: list[ScheduledOptimizer]
    replaced: list[ScheduledOptimizer]
    other_parts: list[str]
    different: set[str]
    in_use: dict[str, Any]


def compare(
    script: ScriptSettings,
    saved: Mapping[str, Any],
    filled: Mapping[str, PartMatch],
    used: Settings,
) -> SettingsDiff:
    """Compare the settings of a script with those of the saved run's script. Changes nothing.

    Args:
        script: the settings of the script.
        saved: `ScriptSettings.record` of the saved run.
        filled: the parts that the resume restores.
        used: which settings the caller asked for.
    """
    scheduled = scheduled_optimizers(script, filled)
    optimizers = {part: row for row in scheduled for part in (row.part, *row.restored)}
    known: dict[str, Any] = {}
    changes: list[Change] = []
    for part, initial in script.initial.items():
        now, before = as_json(initial), saved.get(part)
        if part not in filled or type(now) is not type(before):
            continue
        if isinstance(now, dict):
            sources = optimizers[part].sources if part in optimizers else None
            known[part] = before if sources is None else in_groups(before, now, sources)
            changes += [Change(part, *row) for row in differences(now, known[part])]
        else:
            known[part] = _saved_groups(optimizers[part], now, before)
            for number, pair in enumerate(zip(now, known[part], strict=True)):
                changes += [
                    Change(part, *row, number, len(now)) for row in group_differences(*pair)
                ]
    different = {change.part for change in changes} | (filled.keys() - known.keys())

    def takes_script(row: ScheduledOptimizer) -> bool:
        if not row.is_restored:
            return bool(row.restored)
        differs = not different.isdisjoint((row.part, *row.counting))
        return used == "script" and (differs or bool(row.new_groups))

    replaced = [row for row in scheduled if takes_script(row)]
    in_use = {part: as_json(initial) for part, initial in script.initial.items()}
    if used == "saved":
        from_script = {part for row in replaced for part in row.counting}
        in_use |= {part: known[part] for part in known.keys() - from_script}
    counting = {part for row in scheduled for part in row.counting}
    others = [
        part
        for part in script.initial
        if used == "script" and part in filled and part not in counting
        if not isinstance(script.parts[part], Optimizer)
    ]
    return SettingsDiff(used, changes, known, scheduled, replaced, others, different, in_use)


def _saved_groups(scheduled: ScheduledOptimizer, now: Any, before: Any) -> list[Any]:
    """Return the saved run's settings for the current groups; for a new group, the script's."""
    sources = range(len(now)) if scheduled.sources is None else scheduled.sources
    rows = [
        group if source is None or source >= len(before) else before[source]
        for group, source in zip(now, sources, strict=True)
    ]
    if scheduled.restarts_rates:
        rows = [{**row, **rates_in(group)} for row, group in zip(rows, now, strict=True)]
    return rows


def find_problems(script: ScriptSettings, diff: SettingsDiff) -> list[str]:
    """Describe settings that cannot be used: options for which the optimizer allocates state only
    in its first step, and schedulers whose rates are unknown.
    """
    problems = [
        f"{change.part}: {change.key} is {change.value} in this script but was {change.saved} in "
        "the saved run, whose state has no values for it. Set it back, or start the optimizer over "
        f"with skip=[{change.part!r}]."
        for change in diff.changes
        if diff.used == "script" and _needs_state(script.parts[change.part], change)
    ]
    for scheduled in diff.scheduled:
        if scheduled.is_restored and (counting := scheduled.counting):
            problems += [
                f"{part}: is new, but {', '.join(counting)} is restored, and both set the learning "
                f"rate of the same optimizer. Restart both with skip={[*counting, part]!r}."
                for part, schedule in scheduled.new.items()
                if not isinstance(schedule, ReduceLROnPlateau)  # which does not compute its rate
            ]
    return problems


def _needs_state(part: Any, change: Change) -> bool:
    """Return True if the script's value needs state that the saved run does not have."""
    if change.key in ("amsgrad", "centered"):
        return change.value == "True"
    is_first_momentum = (change.key, change.saved) == ("momentum", "0")
    return is_first_momentum and isinstance(innermost(part), torch.optim.RMSprop)


def notes_on(diff: SettingsDiff) -> list[str]:
    """Return sentences that users must know about the settings."""
    return [*_notes_on_new_groups(diff), *_notes_on_changes(diff)]


def _notes_on_new_groups(diff: SettingsDiff) -> list[str]:
    """Return a sentence for each optimizer whose new groups start at a first learning rate."""
    return [
        f"{row.part} group {', '.join(map(str, row.new_groups))}: new, with the learning rate of "
        f"step 0 of {part}, which is at step {steps}. "
        'settings="script" sets it to the current learning rate'
        for row in diff.scheduled
        if row.new_groups and row not in diff.replaced
        for part, schedule in row.counting.items()
        if (steps := count_of(schedule.state_dict()))
    ]


def _notes_on_changes(diff: SettingsDiff) -> list[str]:
    """Return a sentence for each difference; groups with the same difference share one."""
    same: dict[tuple[str, str, str, str], list[Change]] = {}
    for change in diff.changes:
        row = (change.part, change.key, change.value, change.saved)
        same.setdefault(row, []).append(change)
    from_script = {part for row in diff.replaced for part in row.counting}
    notes: list[str] = []
    has_saved = False
    for (part, key, value, saved), rows in same.items():
        where = f"{part} {key}"
        if len(rows) < rows[0].groups:  # otherwise all groups of the optimizer differ
            numbers = ", ".join(str(change.group) for change in rows[:SHOWN_GROUPS])
            more = ", ..." if len(rows) > SHOWN_GROUPS else ""
            where += f" of group{'s' if len(rows) > 1 else ''} {numbers}{more}"
        is_saved = diff.used == "saved" and part not in from_script
        has_saved |= is_saved
        which = "the saved value" if is_saved else "this script's value"
        notes.append(f"{where}: {value} in this script, {saved} in the saved run; {which} is used")
    if has_saved:
        notes.append('pass settings="script" to use the values of this script')
    return notes
