"""The names of the tables of a source, by whole keys.

A *whole key* starts with the names of all tables that contain the tensor, as `app.model.0.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from typing import TypeVar

from anyrank.files.listing import Listing
from anyrank.sources.part_names import NESTED, is_other_part
from anyrank.tensors.spec import StoredTensor

T = TypeVar("T")


def whole_keys(listing: Listing) -> dict[str, StoredTensor]:
    """Return every tensor of every table."""
    return _below_table(listing, listing.tensors) | listing.beside


def whole_unread(listing: Listing) -> dict[str, str]:
    """Return every tensor of every table that is not read, with its kind."""
    return _below_table(listing, listing.unreadable) | listing.unread_beside


def _below_table(listing: Listing, table: Mapping[str, T]) -> dict[str, T]:
    prefix = f"{listing.table}." if listing.table else ""
    return {f"{prefix}{key}": value for key, value in table.items()}


def outer_name(keys: Iterable[str], tables: Collection[str] | None = None) -> str:
    """Return the one name above all keys, such as `app` in {"app": {"model": ...}}; "" for none.

    Args:
        keys: keys of tensors.
        tables: the tables of the source. If they are given, a name in `NESTED` is that of the
            weights themselves, unless a table below it is an optimizer or a similar part. By
            default the caller decides that by the names of a model.
    """
    name, *others = {key.partition(".")[0] for key in keys} or {""}
    if others:
        return ""
    if tables is None or name not in NESTED:
        return name
    below = (table.removeprefix(f"{name}.") for table in tables if table.startswith(f"{name}."))
    return name if any(map(is_other_part, below)) else ""


class TableNames:
    """Finds the table and the part of a checkpoint that a whole key belongs to.

    Args:
        listing: the source.
    """

    def __init__(self, listing: Listing) -> None:
        self.listing = listing

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor of every table."""
        return whole_keys(self.listing)

    @cached_property
    def outer(self) -> str:
        """The one name above all tables; "" for none."""
        return outer_name(self.tensors, self.listing.tables)

    @cached_property
    def optimizers(self) -> set[str]:
        """The tables that are an optimizer's state_dict(), whatever their names are."""
        parts = (key.split(".") for key in (*self.listing.tables, *self.listing.skipped))
        return {".".join(p[: p.index("param_groups")]) for p in parts if "param_groups" in p}

    def table_of(self, key: str) -> str:
        """Return the table that a key is directly in; "" for none."""
        listing = self.listing
        if listing.table or key in listing.beside or key in listing.unread_beside:
            return key.partition(".")[0]
        parts = key.split(".")
        tables = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
        return next((table for table in tables if table in listing.tables), "")

    def part_of(self, key: str) -> str:
        """Return the part of the checkpoint that a key is in: the outermost table below the one
        name above all, such as `model` or `app.model`; "" for a tensor outside of tables.
        """
        first, second = _first_two(key)
        part = f"{first}.{second}" if first == self.outer else first
        return part if part in self.listing.tables else ""

    def other_part_of(self, key: str) -> str:
        """Return the part without weights, such as an optimizer, that a key is in; "" for none.

        It is the first name, or the second if both are tables.
        """
        first, second = _first_two(key)
        if is_other_part(first) or first in self.optimizers:
            return first
        inner = f"{first}.{second}"
        is_other = is_other_part(second) or inner in self.optimizers
        return inner if is_other and {first, inner} <= self.listing.tables else ""

    def leaves(self, key: str, name: str) -> bool:
        """Return whether the new name of a key is outside of the key's table.

        A regex that renames keys within their table returns False.
        """
        parts = self.table_of(key).split(".")
        table = parts[1] if self.outer and len(parts) > 1 else parts[0]
        return name not in ("", key) and name.split(".").count(table) < key.split(".").count(table)


def _first_two(key: str) -> tuple[str, str]:
    first, _, rest = key.partition(".")
    return first, rest.partition(".")[0]
