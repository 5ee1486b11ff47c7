"""What a script gives otherwise than the saved run's script gave: compared at a resume.

With settings="saved" the saved run's settings stay, and the report names what differs; with
"script" those of the script are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer

from anyrank.runs.resume.settings.differences import RATES, differences, group_differences
from anyrank.runs.resume.settings.driven import Driven, all_driven, begin_rates, take_last_rates
from anyrank.runs.resume.settings.replay import count_of, is_replayed
from anyrank.runs.resume.settings.taking import take_groups, take_values
from anyrank.runs.state.accelerate_wrappers import innermost
from anyrank.runs.state.optimizer_groups import in_groups
from anyrank.runs.state.part_types import PartMatch
from anyrank.runs.state.plain_values import as_json
from anyrank.runs.state.resume_report import Outcome
from anyrank.runs.state.script_settings import FUNCTIONS, ScriptSettings, Settings, optimizer_of

SHOWN_GROUPS = 8


@dataclass(frozen=True)
class Change:
    """A setting that the script gives otherwise than the saved run's script gave.

    Attributes:
        part: of the state.
        key: of the setting; within a schedule of schedules with a path, "schedulers.1.T_max".
        value, saved: both, as text.
        group: of the optimizer's, by number; None in other parts.
        groups: that the optimizer has.
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
            saved = cast("dict[str, Any]", before)
            current = cast("dict[str, Any]", now)
            self._changes += [Change(part, *row) for row in differences(current, saved)]
            # No checkpoint holds these, so those of the script are the ones that are used.
            self._kept[part] = (
                {**saved, FUNCTIONS: current[FUNCTIONS]} if FUNCTIONS in current else saved
            )
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

    def problems(self) -> list[str]:
        """What cannot be used: options whose state an optimizer makes in its first step, and rates
        of a schedule whose optimizer has other groups, and is not restored.
        """
        options = [
            f"{change.part} {change.key}: {change.value} here, {change.saved} in the saved run, "
            f"whose state has nothing for it: leave it as it was, or skip=[{change.part!r}]"
            for change in self._changes
            if self._used == "script" and self._cannot_take(change)
        ]
        optimizers = all_driven(self._script, self._matched, self._new_groups)
        return options + [
            problem for driven in optimizers for problem in self._group_problems(driven)
        ]

    def _group_problems(self, driven: Driven) -> list[str]:
        """Of an optimizer that is not restored: its schedules, which know the rates of the saved
        run's groups, and not which of its own these are.
        """
        before, now = self._saved.get(driven.owner or ""), len(driven.optimizer.param_groups)
        if driven.is_restored or not isinstance(before, list):
            return []
        count = len(cast("list[Any]", before))
        return [
            f"{part}: the saved run's optimizer has {count} groups and this one {now}, so it is "
            f"not known which rate each has: skip={[driven.owner, part]!r} begins with the script's"
            for part, schedule in driven.restored.items()
            if count != now and (self._used == "saved" or not is_replayed(schedule))
        ]

    def _cannot_take(self, change: Change) -> bool:
        if change.key in ("amsgrad", "centered"):
            return change.value == "True"
        is_first_momentum = (change.key, change.saved) == ("momentum", "0")
        optimizer = innermost(self._script.parts[change.part])
        return is_first_momentum and isinstance(optimizer, torch.optim.RMSprop)

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
        if self._used == "script":
            self._take(all_of_them)
        for driven in all_of_them:
            self._begin(driven)
        script.kept |= self._kept

    def _keep_groups(self, driven: Driven) -> None:
        """The settings of groups that were not restored, and whose schedules were."""
        part, saved = driven.owner, self._saved.get(driven.owner or "")
        if part is not None and isinstance(saved, list):
            now = as_json(self._script.initial[part])
            if len(now) == len(saved):
                rows = zip(now, cast("list[Any]", saved), strict=True)
                self._kept[part] = [{**row, **_rates_in(old)} for row, old in rows]

    def _take(self, all_of_them: Sequence[Driven]) -> None:
        """Use the settings of the script."""
        script, matched = self._script, self._matched
        known = {part: self._kept[part] for part in self._kept if part in self._saved}
        in_groups_of = [driven for driven in all_of_them if driven.owner is not None]
        replayed = {p: d for d in in_groups_of for p in d.restored if is_replayed(d.restored[p])}
        for part, driven in replayed.items():
            sources = matched[driven.owner or ""].groups if driven.is_restored else None
            if part in known and sources is not None:
                known[part] = in_groups(known[part], as_json(script.initial[part]), sources)
        changed: list[str] = []
        for part in [part for part in script.initial if part in matched]:
            is_other = not isinstance(script.parts[part], Optimizer) and part not in replayed
            changed += [part] if is_other and take_values(script, known, part) else []
        saved = self._saved.items()
        lost_parts = [p for p, row in saved if p not in script.parts and _is_schedule(row)]
        for driven in in_groups_of:
            if not (driven.is_restored or driven.restored):
                continue
            parts, reason = take_groups(script, known, driven, lost_parts)
            changed += [part for part in parts if part in matched]
            if reason:
                self._notes.append(
                    f"{driven.owner} lr: the saved run's settings could not be followed to its "
                    f"step, so the saved rate stays, times new base rate / saved one ({reason})"
                )
        for name in changed:
            part = matched[name]
            reasons = [part.outcome.reason, 'settings as the script gives them (settings="script")']
            part.outcome = Outcome("derived", "; ".join(filter(None, reasons)))
        self._kept = {part: as_json(initial) for part, initial in script.initial.items()}

    def _begin(self, driven: Driven) -> None:
        """Let schedules that were not restored begin with rates of their own."""
        kept = self._kept if self._used == "saved" else {}
        rows = begin_rates(self._script, kept, driven)
        if rows is None or driven.owner is None:
            return
        owner, (filled, begun) = driven.owner, rows
        now = as_json(self._script.initial[owner])
        of_script = [
            {key: row_now[key] for key in row} for row_now, row in zip(now, begun, strict=True)
        ]
        self._kept[owner] = [
            {**row, **row_now}
            for row, row_now in zip(self._kept.get(owner, now), of_script, strict=True)
        ]
        self._changes = [c for c in self._changes if c.part != owner or c.key not in begun[0]]
        before, after = _rates_text(filled), _rates_text(begun)
        if before != after:
            self._notes.append(
                f"{owner} lr: {after}, as {', '.join(driven.begun)} begins with, which is not "
                f"restored; the saved run had {before}"
            )

    def warnings(self) -> list[str]:
        """What people have to know of it, in sentences."""
        new_groups = self._notes_on_new_groups() if self._used == "saved" else []
        return [*new_groups, *self._notes, *_notes_on(self._changes, self._used)]

    def _notes_on_new_groups(self) -> list[str]:
        """A sentence for each optimizer whose new groups begin at a schedule's first rate."""
        parts = self._script.parts
        schedules = [(p, parts[p]) for p in self._matched if is_replayed(parts.get(p))]
        return [
            f"{owner} group {', '.join(map(str, numbers))}: new, so its rate begins as at the "
            f"first step of {part}, which is at step {count}; "
            'settings="script" gives it the rate that the schedule has there'
            for owner, numbers in self._new_groups.items()
            for part, thing in schedules
            if numbers and optimizer_of(thing) is innermost(parts[owner])
            if (count := count_of(thing.state_dict()))
        ]


def _rates_in(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group's options its rates."""
    return {key: options[key] for key in RATES if key in options}


def _rates_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rates of groups, once if they are alike."""
    texts = [f"{float(row['lr']):g}" for row in rows]
    shown = texts[:1] if len({*texts}) == 1 else texts[:SHOWN_GROUPS]
    return ", ".join(shown) + (", ..." if len(texts) > SHOWN_GROUPS == len(shown) else "")


def _is_schedule(settings: Any) -> bool:
    """Whether settings are those of a schedule that goes by its count."""
    keys = set(cast("dict[str, Any]", settings)) if isinstance(settings, dict) else set[str]()
    return "best" not in keys and not keys.isdisjoint(("last_epoch", "_schedulers"))


def _notes_on(changes: Sequence[Change], settings: Settings) -> list[str]:
    """A sentence for each value that differs; groups that differ alike share one."""
    used = "the saved one is used" if settings == "saved" else "this script's is used"
    alike: dict[tuple[str, str, str, str], list[Change]] = {}
    for change in changes:
        row = (change.part, change.key, change.value, change.saved)
        alike.setdefault(row, []).append(change)
    notes: list[str] = []
    for (part, key, value, saved), rows in alike.items():
        is_unsaved = key.startswith(FUNCTIONS)
        how = "this script's is used, as no checkpoint holds it" if is_unsaved else used
        where = f"{part} {key.removeprefix(f'{FUNCTIONS}.')}"
        if len(rows) < rows[0].groups:  # then they are not all of the optimizer's
            numbers = ", ".join(str(change.group) for change in rows[:SHOWN_GROUPS])
            more = ", ..." if len(rows) > SHOWN_GROUPS else ""
            where += f" of group{'s' if len(rows) > 1 else ''} {numbers}{more}"
        notes.append(f"{where}: {value} here, {saved} in the saved run; {how}")
    if any(used in note for note in notes) and settings == "saved":
        notes.append('settings="script" uses what this script gives')
    return notes
