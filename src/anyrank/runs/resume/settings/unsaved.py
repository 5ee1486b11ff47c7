"""What parts of a run are made with, and no checkpoint has: numbers of functions, decays."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

MOST_NUMBERS = 64  # of a list that is compared


def numbers_of(name: str, value: Any) -> list[dict[str, Any]]:
    """A row of numbers by name: of a number the number, of a function, or of each of a list, those
    that it is made with.
    """
    if isinstance(value, int | float):
        return [{name: value}]
    return [_constants(function) for function in _functions_in(value)]


def _functions_in(value: Any) -> list[Callable[..., Any]]:
    values = cast("list[Any]", value if isinstance(value, list) else [value])
    return [function for function in values if callable(function)]


def _constants(function: Any) -> dict[str, Any]:
    """The numbers that a function is made with: a partial's arguments, defaults, variables around
    it.
    """
    if isinstance(function, functools.partial):
        inner: Any = function.func
        arguments = {f"argument {n}": value for n, value in enumerate(function.args)}
        return {**_constants(inner), **_numbers({**arguments, **function.keywords})}
    function = inspect.unwrap(function)  # of decorators, as torch.no_grad()
    if not inspect.isfunction(function):
        return {}  # an object, whose attributes are in the schedule's state_dict()
    around = inspect.getclosurevars(function)
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return _numbers({**around.globals, **around.nonlocals, **defaults})


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers among values, and the short lists of them."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, int | float):
            kept[key] = value
        elif isinstance(value, list | tuple):
            items = cast("Sequence[Any]", value)
            if len(items) <= MOST_NUMBERS and all(isinstance(item, int | float) for item in items):
                kept[key] = [*items]
    return kept
