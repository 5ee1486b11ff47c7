"""Compare the settings of a script, at a resume, with those of the saved run's script.

With settings="saved" the saved run's settings are kept, and the report names the differences; with
"script" the script's settings are used, with the schedulers at their counts.
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
from anyrank.wording import count

SHOWN_GROUPS = 8


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


class Comparison:
    """The settings of a script, and those of the saved run's script.

    Args:
        script: the settings of the script.
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
        self._kept: dict[str, Any] = {}  # of the saved script, in the current order
        self._new_groups: dict[str, list[int]] = {}  # by optimizer: groups the saved run lacks
        for part, initial in script.initial.items():
            self._compare(part, as_json(initial), saved.get(part) if part in matched else None)

    def _compare(self, part: str, now: Any, before: Any) -> None:
        """Compare the settings of one part; `before` is None if nothing is known."""
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
        first step, and schedulers whose rates are unknown.
        """
        options = [
            f"{change.part}: {change.key} is {change.value} in this script but was {change.saved} "
            "in the saved run, whose state has no values for it. Set it back, or start the "
            f"optimizer over with skip=[{change.part!r}]."
            for change in self._changes
            if self._used == "script" and self._cannot_take(change)
        ]
        for driven in all_driven(self._script, self._matched, self._new_groups):
            options += self._group_problems(driven)
            if driven.is_restored and driven.counting:  # a plateau does not compute its rate
                options += [
                    f"{part}: is new beside {', '.join(driven.counting)}, which is restored, and "
                    "both set the learning rate of one optimizer. Restart both with "
                    f"skip={[*driven.counting, part]!r}."
                    for part, schedule in driven.begun.items()
                    if not isinstance(schedule, ReduceLROnPlateau)
                ]
        return options

    def _group_problems(self, driven: Driven) -> list[str]:
        """Describe the schedulers of an optimizer that is not restored: they know the rates of the
        saved run's groups, but not which of the current groups these are.
        """
        before, now = self._saved.get(driven.owner or ""), len(driven.optimizer.param_groups)
        if driven.is_restored or not isinstance(before, list):
            return []
        then = len(cast("list[Any]", before))
        return [
            f"{part}: the saved run's optimizer has {count(then, 'group')} and this one has {now}, "
            "so the learning rate of each group is unknown. "
            f"skip={[driven.owner, part]!r} uses the script's."
            for part, schedule in driven.restored.items()
            if then != now and (self._used == "saved" or not goes_by_count(schedule))
        ]

    def _cannot_take(self, change: Change) -> bool:
        if change.key in ("amsgrad", "centered"):
            return change.value == "True"
        is_first_momentum = (change.key, change.saved) == ("momentum", "0")
        optimizer = innermost(self._script.parts[change.part])
        return is_first_momentum and isinstance(optimizer, torch.optim.RMSprop)

    # -- what is used -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Use the settings of the saved run, which are in place, or those of the script; and set
        the matching rates where only one of an optimizer and its schedulers was restored. Called
        after all parts are filled.
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
        """Record the settings of groups that were not restored, but whose schedulers were."""
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
            reasons = [part.outcome.reason, 'this script\'s settings (settings="script")']
            part.outcome = Outcome("derived", "; ".join(filter(None, reasons)))
        self._kept = {part: as_json(initial) for part, initial in script.initial.items()}

    def _begin(self, driven: Driven) -> None:
        """Start schedulers that were not restored from the script's rates."""
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
        """Record a note if an optimizer's rates differ from those of the saved run."""
        then, now = _rates_text(before), _rates_text(driven.optimizer.param_groups)
        why = "from this script's settings at the run's step"
        if driven.begins_anew:
            why = f"the initial value of {', '.join(driven.begun)}, which is not restored"
        if then != now:
            self._notes.append(f"{driven.owner} lr: {now}, {why}; it was {then} in the saved run")

    # -- what is reported -------------------------------------------------------------------------

    def warnings(self) -> list[str]:
        """Return sentences that users must know about the settings."""
        new_groups = self._notes_on_new_groups() if self._used == "saved" else []
        return [*new_groups, *self._notes, *_notes_on(self._changes, self._used)]

    def _notes_on_new_groups(self) -> list[str]:
        """Return a sentence for each optimizer whose new groups start at a first learning rate."""
        parts = self._script.parts
        schedules = [(p, parts[p]) for p in self._matched if goes_by_count(parts.get(p))]
        return [
            f"{owner} group {', '.join(map(str, numbers))}: new, with the learning rate of step 0 "
            f"of {part}, which is at step {steps}. "
            'settings="script" sets it to the current learning rate'
            for owner, numbers in self._new_groups.items()
            for part, thing in schedules
            if numbers and optimizer_of(thing) is innermost(parts[owner])
            if (steps := count_of(thing.state_dict()))
        ]


def _rates_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the learning rates of groups as text; only one if they are all the same."""
    texts = [f"{float(row['lr']):g}" for row in rows]
    shown = texts[:1] if len({*texts}) == 1 else texts[:SHOWN_GROUPS]
    return ", ".join(shown) + (", ..." if len(texts) > SHOWN_GROUPS == len(shown) else "")


def _notes_on(changes: Sequence[Change], settings: Settings) -> list[str]:
    """Return a sentence for each difference; groups with the same difference share one."""
    used = "the saved value is used" if settings == "saved" else "this script's value is used"
    alike: dict[tuple[str, str, str, str], list[Change]] = {}
    for change in changes:
        row = (change.part, change.key, change.value, change.saved)
        alike.setdefault(row, []).append(change)
    notes: list[str] = []
    for (part, key, value, saved), rows in alike.items():
        where = f"{part} {key}"
        if len(rows) < rows[0].groups:  # otherwise all groups of the optimizer differ
            numbers = ", ".join(str(change.group) for change in rows[:SHOWN_GROUPS])
            more = ", ..." if len(rows) > SHOWN_GROUPS else ""
            where += f" of group{'s' if len(rows) > 1 else ''} {numbers}{more}"
        notes.append(f"{where}: {value} in this script, {saved} in the saved run; {used}")
    if notes and settings == "saved":
        notes.append('pass settings="script" to use the values of this script')
    return notes
