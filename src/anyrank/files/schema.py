"""Schemas of JSON, so that a file is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

ANY = object()  # checked where it is used
COUNT = object()  # a whole number from 0 to 2**63
DIGEST = object()  # 16 hex digits, of an xxh3-64
MOST = 1 << 63

# A type, one of the three above, [of each], (of one, [of each]), Table(of each), {field: schema}.
Schema = Any


@dataclass(frozen=True)
class Table:
    """A JSON object of any keys, whose values all have one schema."""

    values: Schema


@dataclass(frozen=True)
class Optional:
    """A field that may be absent."""

    schema: Schema


def check(value: Any, schema: Schema, where: str) -> None:
    """Compare a value with its schema.

    Raises:
        ValueError: names the first place that is wrong.
    """
    if isinstance(schema, Mapping):
        _check_fields(value, cast("Mapping[str, Schema]", schema), where)
    elif isinstance(schema, Table):
        for name, item in cast("dict[str, Any]", _of(value, dict, where)).items():
            check(item, schema.values, f"{where}.{name}")
    elif isinstance(schema, list):
        for number, item in enumerate(cast("list[Any]", _of(value, list, where))):
            check(item, cast("list[Schema]", schema)[0], f"{where}.{number}")
    elif isinstance(schema, tuple):
        kinds = cast("tuple[Schema, ...]", schema)
        check(value, kinds[isinstance(value, list)], where)
    elif schema is COUNT:
        if not 0 <= cast("int", _of(value, int, where)) < MOST:
            raise ValueError(f"{where}: {value} is out of range")
    elif schema is DIGEST:
        text = cast("str", _of(value, str, where))
        if len(text) != 16 or set(text) - set("0123456789abcdef"):
            raise ValueError(f"{where}: {text[:40]!r} is not a checksum")
    elif schema is not ANY:
        _of(value, schema, where)


def _of(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:  # exactly: True is not a number
        raise ValueError(f"{where}: {str(value)[:40]!r} is not of type {kind.__name__}")
    return value


def _check_fields(value: Any, schema: Mapping[str, Schema], where: str) -> None:
    table = cast("dict[str, Any]", _of(value, dict, where))
    for name, inner in schema.items():
        if name in table:
            inner = inner.schema if isinstance(inner, Optional) else inner
            check(table[name], inner, f"{where}.{name}")
        elif not isinstance(inner, Optional):
            raise ValueError(f"{where}: lacks {name}")
