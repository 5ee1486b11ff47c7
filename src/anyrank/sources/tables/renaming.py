"""`rename=`: maps keys of a source to names of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from anyrank.errors import LoadError, WrongType
from anyrank.tensors.names import Rename

Renamer = Callable[[str], str]


def renamer(rename: Rename) -> Renamer:
    """Return a function for any of the three forms of `rename=`.

    The forms are a dict of keys or prefixes, pairs of regex and replacement that are applied in
    order, and a callable.

    Raises:
        ValueError: a regex does not compile, or an entry is not a pair.
        TypeError: a wrong type.
    """
    if rename is None:
        return lambda key: key
    if callable(rename):
        return _by_function(cast("Callable[[str], object]", rename))
    if isinstance(rename, Mapping):
        return _by_mapping(dict(rename))
    return _by_pairs(rename)


def _by_function(function: Callable[[str], object]) -> Callable[[str], str]:
    def by_function(key: str) -> str:
        try:
            name = function(key)
        except Exception as error:
            raise LoadError(f"rename= failed for {key}: {type(error).__name__}: {error}") from error
        if not isinstance(name, str):
            raise WrongType(
                f"rename= returned {name!r} for {key}: expected a str, got {type(name).__name__}"
            )
        return name

    return by_function


def _by_mapping(names: dict[str, str]) -> Callable[[str], str]:
    """Rename whole keys, and the longest prefix of others.

    Raises:
        TypeError: a key or a name is not a str.
    """
    wrong = [(old, new) for old, new in names.items() if not _are_texts(old, new)]
    if wrong:
        old, new = wrong[0]
        raise TypeError(f"rename={{{old!r}: {new!r}}}: expected keys and names of type str")

    def by_mapping(key: str) -> str:
        if key in names:
            return names[key]
        prefixes = [old for old in names if key.startswith(old if old.endswith(".") else f"{old}.")]
        if not prefixes:
            return key
        old = max(prefixes, key=len)
        return (names[old] + key[len(old) :]).lstrip(".")

    return by_mapping


def _by_pairs(rename: Iterable[tuple[str, str]]) -> Callable[[str], str]:
    """Apply each regex, in order.

    Raises:
        ValueError, TypeError: as for `renamer`.
    """
    try:
        pairs = [(re.compile(pattern), replacement) for pattern, replacement in rename]
        wrong = [replacement for _, replacement in pairs if not _are_texts(replacement)]
        if wrong:
            raise TypeError(
                f"replacement {wrong[0]!r}: expected a str, got {type(wrong[0]).__name__}"
            )
        for pattern, replacement in pairs:
            pattern.sub(replacement, "")  # raises an error for a group that the pattern lacks
    except (re.error, TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(
            f"rename=: expected a dict, a list of (regex, replacement) or a callable ({error})"
        ) from error

    def by_pairs(key: str) -> str:
        for pattern, replacement in pairs:
            key = pattern.sub(replacement, key)
        return key

    return by_pairs


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)
