"""What the script gives optimizers and schedules: compared with the saved run's script at a resume.

A state_dict() brings the saved run's settings back (T_max, betas), also where the script has been
changed since. So a save keeps what the script gave before anything was filled, and a resume names
what it gives otherwise now. With settings="script" that is used.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anyrank.errors import CheckpointError
from anyrank.files.manifest import IMPLEMENTATION
from anyrank.state.plain_values import ABSENT, as_json, plain
from anyrank.state.stateful import BY_GROUP
from anyrank.state.wrappers import innermost

Settings = Literal["saved", "script"]

NOT_SETTINGS = ("params", "param_names", *IMPLEMENTATION)
FUNCTIONS = "functions"  # what the functions of a schedule are made with: no checkpoint has it
# What a schedule derives from its other settings and from its optimizer's, or counts.
DERIVED = {
    *("base_lrs", "base_momentums", "max_momentums", "default_min_lr", "mode_worse", "T_i"),
    *("last_epoch", "T_cur", "best", "num_bad_epochs", "cooldown_counter", "scale"),
    *("_last_lr", "_step_count"),
}
RATES = ("max_lr", "initial_lr", "lr", "min_lr")  # one of them may be derived from another
DRIVEN = {*RATES, "momentum", "betas", "max_momentum", "base_momentum"}  # what schedules move
SHOWN_GROUPS = 8
SHOWN = 60  # characters of a value


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


class ScriptSettings:
    """The settings of a state's parts as the script made them.

    Attributes:
        initial: part -> its settings, as they were when the state was made.
        kept: the same as JSON, for the next saves: of a setting that the script has changed and
            that is not used, the value of the saved run's script.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = parts
        self.initial = {
            name: initial
            for name, part in parts.items()
            if name != "data" and (initial := _initial(part)) is not None
        }
        self.kept = {name: as_json(initial) for name, initial in self.initial.items()}
        self.new_groups = dict[str, list[int]]()  # of optimizers: those that the saved run lacks

    def record(self, records: Mapping[str, Any]) -> dict[str, Any]:
        """What a save keeps. `records` are the parts', to leave out what they do not bring back."""
        kept: dict[str, Any] = {}
        for name, initial in self.kept.items():
            tree = records.get(name, {}).get("tree")
            is_whole = _is_schedule(self.parts[name]) or isinstance(self.parts[name], Optimizer)
            restored = cast("dict[str, Any]", tree) if isinstance(tree, dict) else {}
            # An empty table says that the part brings no setting back: then none is to be taken.
            kept[name] = initial if is_whole else {k: initial[k] for k in initial if k in restored}
        return kept

    def compare(
        self,
        saved: Mapping[str, Any],
        groups: Mapping[str, Sequence[int | None]],
        filled: Collection[str],
    ) -> tuple[list[Change], dict[str, Any]]:
        """What the script gives otherwise than the saved run's script gave.

        Args:
            saved: `record` of the saved run.
            groups: of an optimizer, the saved group that each of its groups goes on from.
            filled: names of the parts that the saved run fills.

        Returns:
            The changes; and the settings of the saved script in the order of now, for the next
            saves.
        """
        changes: list[Change] = []
        kept: dict[str, Any] = {}
        for part, initial in self.initial.items():
            now, before = as_json(initial), saved.get(part) if part in filled else None
            if isinstance(now, dict) and isinstance(before, dict):
                table = cast("dict[str, Any]", before)
                changes += [Change(part, *row) for row in _differences(now, table)]
                kept[part] = {**table, FUNCTIONS: now[FUNCTIONS]} if FUNCTIONS in now else table
            elif isinstance(now, list) and isinstance(before, list):
                kept[part] = now
                added = [n for n, source in enumerate(groups.get(part, ())) if source is None]
                self.new_groups[part] = added
                for number, (group, source) in enumerate(
                    zip(now, groups.get(part, range(len(now))), strict=False)
                ):
                    if source is None or source >= len(before):
                        continue
                    old = kept[part][number] = before[source]
                    rows = _group_differences(group, old)
                    changes += [Change(part, *row, number, len(now)) for row in rows]
        return changes, kept

    def take(
        self, saved: Mapping[str, Any], kept: Mapping[str, Any], filled: Collection[str]
    ) -> list[str]:
        """Use what the script gives otherwise than the saved run's script, in filled parts.

        Args:
            saved: `record` of the saved run; a part that it lacks gets all that the script gives.
            kept: the second result of `compare`.
            filled: names of the parts that are filled.

        Returns:
            Names of the parts that have other settings now.

        Raises:
            CheckpointError: a schedule cannot go as far as the run is.
        """
        changed_parts: list[str] = []
        moved = set[int]()  # ids of the optimizers whose rates are those of the script
        schedules: dict[Optimizer, dict[str, Any]] = {}
        for part in [part for part in self.initial if part in filled]:
            thing, initial = self.parts[part], self.initial[part]
            before = kept.get(part) if part in saved else None
            if isinstance(thing, Optimizer):
                changed, has_rates = _take_groups(thing, initial, before)
                is_moved = has_rates or bool(self.new_groups.get(part))
                moved |= {id(innermost(thing))} if is_moved else set()
            else:
                changed = _raw_changes(as_json(initial), before)
                if _is_replayed(thing):
                    schedules.setdefault(_optimizer_of(thing), {})[part] = thing
                    moved |= {id(_optimizer_of(thing))} if changed else set()
                elif changed:
                    _take_values(part, thing, {key: initial[key] for key in changed})
            changed_parts += [part] if changed else []
        for optimizer, of_optimizer in schedules.items():
            # No checkpoint holds functions, so the rates alone show whether they have changed.
            has_functions = any(_has_functions(thing) for thing in of_optimizer.values())
            if has_functions or id(optimizer) in moved:
                before = copy.deepcopy([group["lr"] for group in optimizer.param_groups])
                self._replay(optimizer, of_optimizer)
                if before != [group["lr"] for group in optimizer.param_groups]:
                    changed_parts += [part for part in of_optimizer if part not in changed_parts]
        self.kept = {part: as_json(initial) for part, initial in self.initial.items()}
        return changed_parts

    def problems(self, changes: Sequence[Change]) -> list[str]:
        """What `take` cannot take: options whose state an optimizer makes in its first step."""
        return [
            f"{change.part} {change.key}: {change.value} here, {change.saved} in the saved run, "
            f"whose state has nothing for it: leave it as it was, or skip=[{change.part!r}]"
            for change in changes
            if (change.key in ("amsgrad", "centered") and change.value == "True")
            or (
                (change.key, change.saved) == ("momentum", "0")
                and isinstance(innermost(self.parts[change.part]), torch.optim.RMSprop)
            )
        ]

    def notes_on_new_groups(self, filled: Collection[str]) -> list[str]:
        """A sentence for each optimizer whose new groups begin at a schedule's first rate."""
        schedules = [(p, self.parts[p]) for p in filled if _is_replayed(self.parts.get(p))]
        return [
            f"{owner} group {', '.join(map(str, numbers))}: new, so its rate begins as at the "
            f"first step of {part}, which is at step {count}; "
            'settings="script" gives it the rate that the schedule has there'
            for owner, numbers in self.new_groups.items()
            for part, thing in schedules
            if numbers and _optimizer_of(thing) is innermost(self.parts[owner])
            if (count := _count_of(thing.state_dict()))
        ]

    def _replay(self, optimizer: Optimizer, schedules: Mapping[str, Any]) -> None:
        """Bring schedules, as the script makes them, to the count that they have, from their start:
        most compute a rate from the one before.
        """
        counts = {part: _count_of(thing.state_dict()) for part, thing in schedules.items()}
        owners = [p for p in self.initial if isinstance(self.parts[p], Optimizer)]
        part = next((p for p in owners if innermost(self.parts[p]) is optimizer), None)
        groups = optimizer.param_groups
        now = [{**group} for group in groups]
        initial = [dict(group) for group in self.initial[part]] if part is not None else now
        for group, options in zip(groups, initial, strict=False):
            group.update(copy.deepcopy({k: v for k, v in options.items() if k in group}))
        driven = {"lr"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a schedule that steps before its optimizer
            for part, thing in schedules.items():
                thing.load_state_dict(copy.deepcopy(_state_of(self.initial[part])))
            for number in range(max(counts.values(), default=0)):
                for part, thing in schedules.items():
                    if number < counts[part]:
                        _step(part, thing, counts[part])
                if number == 0:
                    driven |= _changed_options(groups, initial)
        driven |= _changed_options(groups, initial)
        for group, options in zip(groups, now, strict=True):
            for key in options.keys() - driven - {"params"}:
                group[key] = options[key]


def notes_on(changes: Sequence[Change], settings: Settings) -> list[str]:
    """A sentence for each value that differs; groups that differ alike share one."""
    used = "the saved one is used" if settings == "saved" else "this script's is used"
    alike: dict[tuple[str, str, str, str], list[Change]] = {}
    for change in changes:
        row = (change.part, change.key, change.value, change.saved)
        alike.setdefault(row, []).append(change)
    notes: list[str] = []
    for (part, key, value, saved), rows in alike.items():
        is_function = key.startswith(FUNCTIONS)
        how = "this script's is used, as no checkpoint holds functions" if is_function else used
        where = f"{part} {key.removeprefix(f'{FUNCTIONS}.')}"
        if len(rows) < rows[0].groups:  # then they are not all of the optimizer's
            numbers = ", ".join(str(change.group) for change in rows[:SHOWN_GROUPS])
            more = ", ..." if len(rows) > SHOWN_GROUPS else ""
            where += f" of group{'s' if len(rows) > 1 else ''} {numbers}{more}"
        notes.append(f"{where}: {value} here, {saved} in the saved run; {how}")
    if any(used in note for note in notes) and settings == "saved":
        notes.append('settings="script" uses what this script gives')
    return notes


# -- what a part is made with ---------------------------------------------------------------------


def _initial(part: Any) -> Any:
    """The settings of one part: of an optimizer a list by group, of others a table; None if it has
    none. Calls nothing of a class that is not known to be cheap.
    """
    if isinstance(part, Optimizer):
        return [
            {k: _detached(v) for k, v in group.items() if k not in NOT_SETTINGS}
            for group in part.param_groups
        ]
    if isinstance(part, torch.nn.Module):
        return None
    if _is_schedule(part):
        try:
            initial = copy.deepcopy(part.state_dict())
        except Exception:  # of the user's code, which the save will raise
            return None
        functions = [_constants(function) for function in _functions_of(part)]
        return {**initial, FUNCTIONS: functions} if any(functions) else initial
    names = inspect.signature(type(part)).parameters if _has_signature(type(part)) else ()
    values = vars(part) if hasattr(part, "__dict__") else {}
    plain_values = {name: values[name] for name in names if name in values}
    return {k: v for k, v in plain_values.items() if plain(v) is not ABSENT} or None


def _is_schedule(part: Any) -> bool:
    """Whether a part's whole state, when it is made, is what the script gives."""
    if isinstance(part, LRScheduler | torch.amp.GradScaler):
        return True
    return not isinstance(part, Optimizer) and _optimizer_of(part) is not None


def _is_replayed(part: Any) -> bool:
    """Whether a schedule goes by its count alone."""
    return isinstance(part, LRScheduler) and not isinstance(part, ReduceLROnPlateau)


def _optimizer_of(part: Any) -> Any:
    """The optimizer inside a schedule's, without wrappers."""
    optimizer: Any = getattr(part, "optimizer", None)
    return innermost(optimizer) if isinstance(optimizer, Optimizer) else None


def _state_of(initial: Mapping[str, Any]) -> dict[str, Any]:
    """The state_dict() among a schedule's settings."""
    return {key: value for key, value in initial.items() if key != FUNCTIONS}


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _has_signature(kind: type) -> bool:
    try:
        inspect.signature(kind)
    except (TypeError, ValueError):
        return False
    return True


def _functions_of(schedule: Any) -> Iterator[Callable[..., Any]]:
    """The functions of a LambdaLR or MultiplicativeLR, in their order."""
    functions = getattr(schedule, "lr_lambdas", None)
    yield from (f for f in functions if callable(f)) if isinstance(functions, list) else ()


def _has_functions(schedule: Any) -> bool:
    """Whether rates are a function's, also in a schedule of schedules."""
    inner = cast("Sequence[Any]", getattr(schedule, "_schedulers", ()))
    return any(_functions_of(schedule)) or any(_has_functions(part) for part in inner)


def _constants(function: Any) -> dict[str, Any]:
    """The numbers that a function is made with: a partial's arguments, variables around it."""
    if isinstance(function, functools.partial):
        inner: Any = function.func
        arguments = {f"argument {n}": value for n, value in enumerate(function.args)}
        return {**_constants(inner), **_numbers({**arguments, **function.keywords})}
    if not inspect.isfunction(function):
        return {}  # an object, whose attributes are in the schedule's state_dict()
    around = inspect.getclosurevars(function)
    return _numbers({**around.globals, **around.nonlocals})


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


# -- compared -----------------------------------------------------------------------------------


def _differences(
    now: Mapping[str, Any], before: Mapping[str, Any], where: str = ""
) -> list[tuple[str, str, str]]:
    """Rows of key, value here, value before, of settings that both have.

    Private ones are counts, or derived from public ones: text and lists among them are named where
    no public one of the same object differs.
    """
    rows: list[tuple[str, str, str]] = []
    inner: list[tuple[str, str, str]] = []
    private: list[tuple[str, str, str]] = []
    for key in now.keys() & before.keys():
        value, saved = now[key], before[key]
        if key in DERIVED or _is_same(key, value, saved):
            continue
        name = where + key.lstrip("_")
        if key in ("_schedulers", FUNCTIONS) and isinstance(saved, list):
            for number, pair in enumerate(zip(value, saved, strict=False)):
                if all(isinstance(table, dict) for table in pair):
                    deeper = where if key == FUNCTIONS else f"{name}.{number}."
                    deeper = f"{FUNCTIONS}.{deeper}" if key == FUNCTIONS else deeper
                    inner += _differences(*pair, deeper)
        elif not key.startswith("_"):
            rows.append((name, _text(value), _text(saved)))
        elif isinstance(value, str | list):
            private.append((name, _text(value), _text(saved)))
    return sorted({*(rows or private), *inner})


def _group_differences(now: Any, before: Any) -> list[tuple[str, str, str]]:
    """The same of one group; a rate that another one implies is named once."""
    rows: list[tuple[str, str, str]] = []
    ratios: list[float] = []
    changed = _changed_keys(now, before)
    skipped = {"lr"} if "initial_lr" in now else set[str]()  # then it is the schedule's
    skipped |= {"momentum", "betas"} if "max_momentum" in now else set[str]()
    for key in (*RATES, *sorted(changed - {*RATES})):
        if key not in changed or key in skipped:
            continue
        value, saved = now[key], before[key]
        if key in RATES and isinstance(value, int | float) and isinstance(saved, int | float):
            ratio = value / saved if saved else math.inf
            if any(math.isclose(ratio, other, rel_tol=1e-6) for other in ratios):
                continue
            ratios.append(ratio)
        rows.append(("lr" if key == "initial_lr" else key, _text(value), _text(saved)))
    return rows


def _changed_keys(now: Any, before: Any) -> set[str]:
    """Keys of settings that differ, of those that both have."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return set()
    value, saved = cast("dict[str, Any]", now), cast("dict[str, Any]", before)
    keys = value.keys() & saved.keys()
    return {key for key in keys if not _is_same(key, value[key], saved[key])}


def _is_same(key: str, value: Any, saved: Any) -> bool:
    """Whether a setting is the saved one; of a list by group, in the groups that both have."""
    if key in BY_GROUP and isinstance(value, list) and isinstance(saved, list):
        pairs = zip(cast("list[Any]", value), cast("list[Any]", saved), strict=False)
        return all(item == before for item, before in pairs)
    return value == saved


def _raw_changes(now: Any, before: Any) -> set[str]:
    """Keys of a table's settings to take: those that differ, or all where nothing is known."""
    if not isinstance(before, dict):
        return set(now) - DERIVED
    return _changed_keys(now, before) - DERIVED


def _text(value: Any) -> str:
    text = str(value)
    if isinstance(value, float) and float(f"{value:g}") == value:
        text = f"{value:g}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


# -- taken ----------------------------------------------------------------------------------------


def _take_groups(
    optimizer: Optimizer, initial: Sequence[Mapping[str, Any]], before: Any
) -> tuple[set[str], bool]:
    """Give an optimizer's groups what the script gives otherwise: which, and whether a rate is."""
    changed = set[str]()
    for number, (group, options) in enumerate(zip(optimizer.param_groups, initial, strict=False)):
        now = as_json(options)
        keys = {*options} if before is None else _changed_keys(now, before[number])
        for key in keys & group.keys():
            if isinstance(group[key], torch.Tensor):
                group[key].copy_(torch.as_tensor(options[key]))
            else:
                group[key] = copy.deepcopy(options[key])
        if "initial_lr" in keys and "lr" in options:
            group["lr"] = copy.deepcopy(options["lr"])
        changed |= keys
    return changed, not changed.isdisjoint(DRIVEN)


def _take_values(part: str, thing: Any, values: Mapping[str, Any]) -> None:
    """Give a filled part some settings."""
    if not values:
        return
    if not _is_schedule(thing):
        for key, value in values.items():
            setattr(thing, key, value)
        return
    try:
        thing.load_state_dict({**thing.state_dict(), **copy.deepcopy(dict(values))})
    except Exception as error:  # of the user's code
        raise CheckpointError(
            f"{part}: load_state_dict() of {type(thing).__name__} does not take the script's "
            f"settings: {type(error).__name__}: {error}"
        ) from error


def _step(part: str, thing: Any, count: int) -> None:
    try:
        thing.step()
    except Exception as error:  # of a schedule that is shorter, or of the user's function
        raise CheckpointError(
            f"{part}: as the script makes it, it cannot be stepped {count} times, as often as the "
            f"run has stepped it ({type(error).__name__}: {error}): make it longer, or leave out "
            'settings="script"'
        ) from error


def _count_of(state: Mapping[str, Any]) -> int:
    """How often a schedule was stepped."""
    while "last_epoch" not in state and state.get("_schedulers"):
        state = state["_schedulers"][0]
    return max(0, int(state.get("last_epoch", 0)))


def _changed_options(
    groups: Sequence[Mapping[str, Any]], initial: Sequence[Mapping[str, Any]]
) -> set[str]:
    """Options that a schedule has moved."""
    return {
        key
        for group, options in zip(groups, initial, strict=False)
        for key in options.keys() & group.keys()
        if plain(group[key]) != plain(options[key])
    }
