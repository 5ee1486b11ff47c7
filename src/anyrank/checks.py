"""Checks of arguments. Each error names the argument, the value and what to give."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any

from torch import nn

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


def _short_text(value: object) -> str:
    """A value for a message; the type alone if its text has several lines or an address."""
    text = _short.repr(value)
    return f"<{type(value).__name__}>" if "\n" in text or " at 0x" in text else text


def check_type(name: str, value: object, kinds: type | tuple[type, ...], give: str) -> None:
    """Refuse a value of another type; a bool does not count as an int.

    Raises:
        TypeError: says what to `give`.
    """
    kinds_tuple = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds_tuple):
        raise TypeError(f"{name}={_short_text(value)}: give {give}")


def check_bool(**arguments: object) -> None:
    """Refuse anything but True and False.

    Raises:
        TypeError: names the argument.
    """
    for name, value in arguments.items():
        check_type(name, value, bool, "True or False")


def check_int(
    name: str,
    value: Any,
    minimum: int | None = None,
    maximum: int | None = None,
    kind: type = Integral,
) -> int:
    """Return the value as a whole number within the bounds.

    Raises:
        TypeError: not of this `kind`.
        ValueError: below `minimum`, or above `maximum`.
    """
    check_type(name, value, kind, "an int")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}={value}: give at least {minimum}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name}={value}: give at most {maximum}")
    return int(value)


def check_number(name: str, value: Any) -> None:
    """Refuse anything but a number of at least 0; NaN is refused too.

    Raises:
        TypeError: not a real number.
        ValueError: below 0.
    """
    check_type(name, value, Real, "a number")
    if not value >= 0:
        raise ValueError(f"{name}={value}: give at least 0")


def as_float(name: str, value: Any) -> float:
    """Return a number as a float.

    Raises:
        ValueError: an int that is too large for a float.
    """
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name}= is too large for a float: give at most 1.8e308") from error


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse anything but the choices.

    Raises:
        ValueError: names the choices.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{name}={_short_text(value)} is unknown: give one of {', '.join(choices)}"
        )


def check_function(name: str, value: object, give: str = "a function") -> None:
    """Refuse a value that cannot be called.

    Raises:
        TypeError: says what to `give`.
    """
    if not callable(value):
        raise TypeError(f"{name}={_short_text(value)}: give {give}")


def check_path(name: str, value: Any) -> str:
    """Return a path or a URL as text.

    Raises:
        TypeError: neither text nor a path.
        ValueError: it is empty.
    """
    check_type(name, value, (str, os.PathLike), "a path or a URL")
    path: object = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise ValueError(f"{name}={_short_text(value)}: give a path or a URL")
    return path


def check_names(name: str, value: Any) -> None:
    """Refuse anything but a list of names; text alone would be read as its letters.

    Raises:
        TypeError: says what to give.
    """
    is_list = isinstance(value, Collection) and not isinstance(value, (str, bytes))
    if not is_list or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name}={_short_text(value)}: give a list of names")


def check_model(model: object, name: str = "model") -> None:
    """Refuse anything but a module.

    Raises:
        TypeError: names the type.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}= takes a torch.nn.Module, not {type(model).__name__}")
