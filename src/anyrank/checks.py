"""Argument checks. Each error names the argument, its value, and what is allowed."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any

from torch import nn

from anyrank.wording import alternatives

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


def _short_text(value: object) -> str:
    """Return a value's text for a message; only its type if the text has lines or an address."""
    text = _short.repr(value)
    return f"<{type(value).__name__}>" if "\n" in text or " at 0x" in text else text


def _wrong_type(name: str, value: object, expected: str) -> TypeError:
    text = f"{name}={_short_text(value)}: expected {expected}, got {type(value).__name__}"
    return TypeError(text)


def check_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Check that a value is an instance of `kinds`; a bool does not count as an int.

    Raises:
        TypeError: names what is `expected`, and the type found.
    """
    kinds_tuple = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds_tuple):
        raise _wrong_type(name, value, expected)


def check_bool(**arguments: object) -> None:
    """Check that each argument is True or False.

    Raises:
        TypeError: names the argument that is not.
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
    """Return the value as an int within the bounds.

    Raises:
        TypeError: not an instance of `kind`.
        ValueError: below `minimum`, or above `maximum`.
    """
    check_type(name, value, kind, "an int")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}={value}: must be at least {minimum}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name}={value}: must be at most {maximum}")
    return int(value)


def check_number(name: str, value: Any) -> None:
    """Check that a value is a number of at least 0; NaN is not.

    Raises:
        TypeError: not a real number.
        ValueError: below 0.
    """
    check_type(name, value, Real, "a number")
    if not value >= 0:
        raise ValueError(f"{name}={value}: must be at least 0")


def as_float(name: str, value: Any) -> float:
    """Return a number as a float.

    Raises:
        ValueError: an int that is too large for a float.
    """
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name}= is too large for a float: must be at most 1.8e308") from error


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that a value is one of the choices.

    Raises:
        ValueError: names the choices.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={_short_text(value)}: must be {alternatives(choices)}")


def check_function(name: str, value: object, expected: str = "a function") -> None:
    """Check that a value can be called.

    Raises:
        TypeError: names what is `expected`, and the type found.
    """
    if not callable(value):
        raise _wrong_type(name, value, expected)


def check_path(name: str, value: Any) -> str:
    """Return a path or a URL as text.

    Raises:
        TypeError: neither text nor a path.
        ValueError: empty, or a path of bytes.
    """
    check_type(name, value, (str, os.PathLike), "a path or a URL")
    path: object = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise ValueError(f"{name}={_short_text(value)}: must be a non-empty path or URL")
    return path


def check_names(name: str, value: Any) -> None:
    """Check that a value is a list of names; a str would be read as a list of its letters.

    Raises:
        TypeError: names the type found.
    """
    if not isinstance(value, Collection) or isinstance(value, (str, bytes)):
        raise _wrong_type(name, value, "a list of names")
    for item in value:
        if not isinstance(item, str):
            text = f"{name}={_short_text(value)}: expected a list of names"
            raise TypeError(f"{text}, got {type(item).__name__} in it")


def check_model(model: object, name: str = "model") -> None:
    """Check that an argument is a module.

    Raises:
        TypeError: names the type found.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}=: expected a torch.nn.Module, got {type(model).__name__}")
