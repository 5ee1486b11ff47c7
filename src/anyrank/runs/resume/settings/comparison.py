"""Compare the settings of a script, at a resume, with those of the saved run's script.

With settings="saved" the saved run's settings stay, and the report names what differs; with
"script" those of the script are used, and schedules stand at their counts with these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from anyrank.runs.resume.settings.differences import RATES, differences, group_differences
from anyrank.runs.resume.settings.rates import (
    Driven,
    all_driven,
    count_of,
    give,
    goes_by_count,
    options_of,
    rates_in,
    take_last_rates,
)
from anyrank.runs.resume.settings.taking import take_groups, take_values
from anyrank.runs.state.accelerate_wrappers import innermost
from anyrank.runs.state.optimizer_groups import in_groups
from anyrank.runs.state.part_types import PartMatch
from anyrank.runs.state.plain_values import as_json
from anyrank.runs.state.resume_report import Outcome
from anyrank.runs.state.script_settings import ScriptSettings, Settings, optimizer_of

SHOWN_GROUPS = 8


@dataclass(frozen=True)
class Change:
    """A setting that the script gives otherwise than the saved run's script gave.

    Attributes:
        part: part of the state.
        key: key of the setting; within a schedule of schedules with a path, "schedulers.1.T_max".
        value, saved: both, as text.
        group: group of the optimizer's, by number; None in other parts.
        groups: groups that the optimizer has.
    """

    part: str
    key: str
    value: str
    saved: str
    group: int | None = None
    groups: int = 0


class Comparison:
    """The settings of a script, beside those of the saved run's script.

    Args:
        script: what the script gives.
        saved: `ScriptSettings.record` of the saved run.
        matched: the parts that the saved run fills.
        used: which settings are used.
    """

    def __init__(
        self,
        script: ScriptSettings,
        saved: Mapping[str, Any],
        matched: Mapping[str, PartMatch],
        used: Settings,
    ) -> None:
        self._script, self._saved, self._matched = script, saved, matched
        self._used: Settings = used
        self._changes: list[Change] = []
        self._notes: list[str] = []
        self._kept: dict[str, Any] = {}  # of the saved script, in the order of now
        self._new_groups: dict[str, list[int]] = {}  # of optimizers: those that the saved run lacks
        for part, initial in script.initial.items():
            self._compare(part, as_json(initial), saved.get(part) if part in matched else None)

    def _compare(self, part: str, now: Any, before: Any) -> None:
        """Compare the settings of one part; `before` is None where nothing is known."""
        if isinstance(now, dict) and isinstance(before, dict):
            saved, current = cast("dict[str, Any]", before), cast("dict[str, Any]", now)
            self._changes += [Change(part, *row) for row in differences(current, saved)]
            self._kept[part] = saved
        elif isinstance(now, list) and isinstance(before, list):
            own_groups, saved_groups = cast("list[Any]", now), cast("list[Any]", before)
            kept = self._kept[part] = own_groups
            sources = self._matched[part].groups
            self._new_groups[part] = [n for n, row in enumerate(sources or ()) if row is None]
            rows = range(len(own_groups)) if sources is None else sources
            for number, (group, row) in enumerate(zip(own_groups, rows, strict=False)):
                if row is None or row >= len(saved_groups):
                    continue
                old = kept[number] = saved_groups[row]
                size = len(own_groups)
                self._changes += [
                    Change(part, *values, number, size) for values in group_differences(group, old)
                ]

    # -- what cannot be used ----------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Describe settings that cannot be used: options whose state an optimizer makes in its
        first step, and schedules whose rates are not known.
        """
        options = [
            f"{change.part} {change.key}: {change.value} here, {change.saved} in the saved run, "
            f"whose state has nothing for it: leave it as it was, or skip=[{change.part!r}]"
            for change in self._changes
            if self._used == "script" and self._cannot_take(change)
        ]
        for driven in all_driven(self._script, self._matched, self._new_groups):
            options += self._group_problems(driven)
            if driven.is_restored and driven.counting:  # a plateau leaves a rate as it finds it
                options += [
                    f"{part}: begins beside {', '.join(driven.counting)}, which is restored, and "
                    "both drive the rates of one optimizer: skip="
                    f"{[*driven.counting, part]!r} lets both begin"
                    for part, schedule in driven.begun.items()
                    if not isinstance(schedule, ReduceLROnPlateau)
                ]
        return options

    def _group_problems(self, driven: Driven) -> list[str]:
        """Describe the schedules of an optimizer that is not restored: they know the rates of the
        saved run's groups, but not which of its own these are.
        """
        before, now = self._saved.get(driven.owner or ""), len(driven.optimizer.param_groups)
        if driven.is_restored or not isinstance(before, list):
            return []
        count = len(cast("list[Any]", before))
        return [
            f"{part}: the saved run's optimizer has {count} groups and this one {now}, so it is "
            f"not known which rate each has: skip={[driven.owner, part]!r} begins with the script's"
            for part, schedule in driven.restored.items()
            if count != now and (self._used == "saved" or not goes_by_count(schedule))
        ]

    def _cannot_take(self, change: Change) -> bool:
        if change.key in ("amsgrad", "centered"):
            return change.value == "True"
        is_first_momentum = (change.key, change.saved) == ("momentum", "0")
        optimizer = innermost(self._script.parts[change.part])
        return is_first_momentum and isinstance(optimizer, torch.optim.RMSprop)

    # -- what is used -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Use the settings of the saved run, which are in place, or those of the script; and give
        the rates that go with them to what only one of an optimizer and its schedules has restored.
        After all parts are filled.
        """
        script, matched = self._script, self._matched
        all_of_them = all_driven(script, matched, self._new_groups)
        for driven in all_of_them:
            if not driven.is_restored and driven.restored:
                take_last_rates(driven)
                self._keep_groups(driven)
        before = [options_of(driven.optimizer) for driven in all_of_them]
        if self._used == "script":
            self._take(all_of_them)
        for driven, options in zip(all_of_them, before, strict=True):
            self._begin(driven)
            self._note_rates(driven, options)
        script.kept |= self._kept

    def _keep_groups(self, driven: Driven) -> None:
        """The settings of groups that were not restored, and whose schedules were."""
        part, saved = driven.owner, self._saved.get(driven.owner or "")
        if part is not None and isinstance(saved, list):
            now = as_json(self._script.initial[part])
            if len(now) == len(saved):
                rows = zip(now, cast("list[Any]", saved), strict=True)
                self._kept[part] = [
                    {**row, **{key: old[key] for key in RATES if key in old}} for row, old in rows
                ]

    def _take(self, all_of_them: Sequence[Driven]) -> None:
        """Use the settings of the script."""
        script, matched = self._script, self._matched
        known = {part: self._kept[part] for part in self._kept if part in self._saved}
        in_groups_of = [driven for driven in all_of_them if driven.owner is not None]
        stepped = {part: driven for driven in in_groups_of for part in driven.counting}
        for part, driven in stepped.items():
            sources = matched[driven.owner or ""].groups if driven.is_restored else None
            if part in known and sources is not None:
                known[part] = in_groups(known[part], as_json(script.initial[part]), sources)
        changed = [
            part
            for part in script.initial
            if part in matched and not isinstance(script.parts[part], Optimizer)
            if part not in stepped and take_values(script, known, part)
        ]
        for driven in in_groups_of:
            if driven.is_restored or driven.restored:
                changed += [p for p in take_groups(script, known, driven) if p in matched]
        for name in changed:
            part = matched[name]
            reasons = [part.outcome.reason, 'settings as the script gives them (settings="script")']
            part.outcome = Outcome("derived", "; ".join(filter(None, reasons)))
        self._kept = {part: as_json(initial) for part, initial in script.initial.items()}

    def _begin(self, driven: Driven) -> None:
        """Let schedules that were not restored begin with the script's rates."""
        owner = driven.owner
        if owner is None or not driven.begins_anew:
            return
        initial = self._script.initial[owner]
        pairs = zip(options_of(driven.optimizer), initial, strict=True)
        begun = [rates_in({key: new[key] for key in old if key in new}) for old, new in pairs]
        give(driven.optimizer, begun)
        rows = zip(self._kept.get(owner, as_json(initial)), begun, strict=True)
        self._kept[owner] = [{**row, **as_json(rates)} for row, rates in rows]
        self._changes = [c for c in self._changes if c.part != owner or c.key not in begun[0]]

    def _note_rates(self, driven: Driven, before: Sequence[Any]) -> None:
        """Say if an optimizer's rates are others than those of the saved run."""
        then, now = _rates_text(before), _rates_text(driven.optimizer.param_groups)
        why = "as this script's settings give it at the run's count"
        if driven.begins_anew:
            why = f"as {', '.join(driven.begun)} begins with, which is not restored"
        if then != now:
            self._notes.append(f"{driven.owner} lr: {now}, {why}; the saved run had {then}")

    # -- what is said -----------------------------------------------------------------------------

    def warnings(self) -> list[str]:
        """Return sentences on what people have to know of it."""
        new_groups = self._notes_on_new_groups() if self._used == "saved" else []
        return [*new_groups, *self._notes, *_notes_on(self._changes, self._used)]

    def _notes_on_new_groups(self) -> list[str]:
        """A sentence for each optimizer whose new groups begin at a schedule's first rate."""
        parts = self._script.parts
        schedules = [(p, parts[p]) for p in self._matched if goes_by_count(parts.get(p))]
        return [
            f"{owner} group {', '.join(map(str, numbers))}: new, so its rate begins as at the "
            f"first step of {part}, which is at step {count}; "
            'settings="script" gives it the rate that the schedule has there'
            for owner, numbers in self._new_groups.items()
            for part, thing in schedules
            if numbers and optimizer_of(thing) is innermost(parts[owner])
            if (count := count_of(thing.state_dict()))
        ]


def _rates_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rates of groups, once if they are alike."""
    texts = [f"{float(row['lr']):g}" for row in rows]
    shown = texts[:1] if len({*texts}) == 1 else texts[:SHOWN_GROUPS]
    return ", ".join(shown) + (", ..." if len(texts) > SHOWN_GROUPS == len(shown) else "")


def _notes_on(changes: Sequence[Change], settings: Settings) -> list[str]:
    """A sentence for each value that differs; groups with the same difference share one."""
    used = "the saved one is used" if settings == "saved" else "this script's is used"
    alike: dict[tuple[str, str, str, str], list[Change]] = {}
    for change in changes:
        row = (change.part, change.key, change.value, change.saved)
        alike.setdefault(row, []).append(change)
    notes: list[str] = []
    for (part, key, value, saved), rows in alike.items():
        where = f"{part} {key}"
        if len(rows) < rows[0].groups:  # then they are not all of the optimizer's
            numbers = ", ".join(str(change.group) for change in rows[:SHOWN_GROUPS])
            more = ", ..." if len(rows) > SHOWN_GROUPS else ""
            where += f" of group{'s' if len(rows) > 1 else ''} {numbers}{more}"
        notes.append(f"{where}: {value} here, {saved} in the saved run; {used}")
    if notes and settings == "saved":
        notes.append('settings="script" uses what this script gives')
    return notes
