"""Differences between the settings of two scripts: rows of key, current value, saved value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from anyrank.runs.state.optimizer_groups import BY_GROUP
from anyrank.runs.state.plain_values import as_json

# Entries that a scheduler derives from its other settings and from its optimizer's, or counts.
DERIVED = {
    *("base_lrs", "base_momentums", "max_momentums", "default_min_lr", "mode_worse", "T_i"),
    *("last_epoch", "T_cur", "best", "num_bad_epochs", "cooldown_counter", "scale"),
    *("_last_lr", "_step_count"),
}
RATES = ("max_lr", "initial_lr", "lr", "min_lr")  # one of them may be derived from another
MOMENTA = ("momentum", "betas", "base_momentum", "max_momentum")  # changed by cyclic schedulers
SHOWN_GROUPS = 8
SHOWN = 60  # maximum number of characters of a value


def differences(
    now: Mapping[str, Any], before: Mapping[str, Any], where: str = ""
) -> list[tuple[str, str, str]]:
    """List rows of key, current value, saved value, for settings that both scripts have.

    Private settings are counts, or derived from public ones: differing text and lists among them
    are listed only if no public setting of the same object differs.
    """
    rows: list[tuple[str, str, str]] = []
    inner: list[tuple[str, str, str]] = []
    private: list[tuple[str, str, str]] = []
    for key in now.keys() & before.keys():
        value, saved = now[key], before[key]
        if key in DERIVED or _is_same(key, value, saved):
            continue
        name = where + key.lstrip("_")
        if key == "_schedulers" and isinstance(saved, list):
            for number, pair in enumerate(zip(value, saved, strict=False)):
                if all(isinstance(row, dict) for row in pair):
                    inner += differences(*pair, f"{name}.{number}.")
        elif not key.startswith("_"):
            rows.append((name, _text(value), _text(saved)))
        elif isinstance(value, str | list):
            private.append((name, _text(value), _text(saved)))
    return sorted({*(rows or private), *inner})


def group_differences(now: Any, before: Any) -> list[tuple[str, str, str]]:
    """List the differences of one group; a rate that follows from another one is listed once."""
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
    """Return the keys that both scripts have with different settings."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return set()
    value, saved = cast("dict[str, Any]", now), cast("dict[str, Any]", before)
    keys = value.keys() & saved.keys()
    return {key for key in keys if not _is_same(key, value[key], saved[key])}


def _is_same(key: str, value: Any, saved: Any) -> bool:
    """Return True if two settings are equal; for a list by group, in the groups that both have."""
    if key in BY_GROUP and isinstance(value, list) and isinstance(saved, list):
        pairs = zip(cast("list[Any]", value), cast("list[Any]", saved), strict=False)
        return all(_is_same("", item, before) for item, before in pairs)
    if isinstance(value, float) and isinstance(saved, float):
        return math.isclose(value, saved, rel_tol=1e-7)  # a rate may be a float32 tensor
    return value == saved


def changed_settings(initial: Mapping[str, Any], saved: Any) -> set[str]:
    """Return the keys of a part's settings that differ; all of them if the saved are unknown."""
    now = as_json(initial)
    return (_changed_keys(now, saved) if isinstance(saved, dict) else {*now}) - DERIVED


def rates_in(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a group's options that schedulers set."""
    is_cycle = not {"base_momentum", "max_momentum"}.isdisjoint(options)
    keys = (*RATES, *MOMENTA) if is_cycle else RATES
    return {key: options[key] for key in keys if key in options}


def _text(value: Any) -> str:
    text = str(value)
    if isinstance(value, float) and float(f"{value:g}") == value:
        text = f"{value:g}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def rates_as_text(rates: Sequence[float]) -> str:
    """Return the learning rates of groups as text; only one if they are all the same."""
    texts = [f"{rate:g}" for rate in rates]
    shown = texts[:1] if len({*texts}) == 1 else texts[:SHOWN_GROUPS]
    return ", ".join(shown) + (", ..." if len(texts) > SHOWN_GROUPS == len(shown) else "")
