"""The numbers in the record of an optimizer: its groups' options, and what its state has of them.

A record is JSON as `files.json_codec` makes it, and is equal on all ranks. Tensors in it are names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from anyrank.files.schema import ANY, Table

# How a step is computed, not what: a run goes on with what its optimizer is made with now.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
RECORD = {"groups": [{"options": Table(ANY)}], "state": Table(ANY), "extra": ANY}
HOLDS_NUMBERS = ("~float", "~tuple")  # of the values that JSON has not


def is_optimizer(record: Any) -> bool:
    """Whether a part's record is of an optimizer that is saved by its parameters' names."""
    return isinstance(record, dict) and record.get("kind") == "optimizer" and "opaque" not in record


def optimizer_numbers(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> number, bool, text or None, of all optimizers among the parts of a manifest."""
    found: dict[str, Any] = {}
    for part, record in parts.items():
        if not is_optimizer(record):
            continue
        for number, group in enumerate(record["groups"]):
            for name, tree in group["options"].items():
                if name not in IMPLEMENTATION:
                    found.update(_numbers(tree, f"{part}.param_groups.{number}.{name}"))
        for name in ("state", "extra"):
            found.update(_numbers(record[name], f"{part}.{name}"))
    return dict(sorted(found.items()))


def _numbers(tree: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, list):
        for number, item in enumerate(cast("list[Any]", tree)):
            yield from _numbers(item, f"{where}.{number}")
    elif isinstance(tree, dict):
        table = cast("dict[str, Any]", tree)
        mark = next(iter(table), "")
        if mark in HOLDS_NUMBERS:
            yield from _numbers(table[mark], where)
        elif not mark.startswith("~"):
            for name, item in table.items():
                yield from _numbers(item, f"{where}.{name}")
    else:
        yield where, tree
