"""Compare two steps of runs without their tensors: position, options, plain values.

The module compares the JSON of the manifests, as written by `files.json_codec`. For each part, it
reports the first path that differs. It ignores values that may differ between equal runs: layouts
on ranks, implementation options of an optimizer, and the source of a frozen part. If the rank
counts differ, it also ignores a part that each rank saved for itself.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, cast

from anyrank.files.json_codec import reading_record
from anyrank.files.manifest import IMPLEMENTATION, Manifest
from anyrank.runs.state.part_types import TENSOR_TAGS

PROGRESS = ("step", "epoch", "samples")
POSITION = {"seed", "epoch", "step", "samples", "receipt"}  # the fields of anyrank's loaders
NO_POSITION = ("version", "receipts", "exact")  # fields that may differ between equal runs
TENSORS = (*TENSOR_TAGS, "~array")  # compared elsewhere
NOT_COMPARED = ("kind", "layout")
COMPARED_APART = ("tree", "by_rank", "groups")
ABSENT = object()

Pair = tuple[Any, Any]
Ignore = Callable[[str], bool]


def record_differences(
    a: Manifest, b: Manifest, ignore: Ignore
) -> tuple[dict[str, Pair], dict[str, Pair]]:
    """Compare two steps without their tensors, in the parts that both have.

    Args:
        a, b: the manifests of the steps.
        ignore: returns whether to ignore a name.

    Returns:
        The first difference in each part -> both values, "absent" for a missing one. And for two
        ElasticLoaders, the differences between their states.

    Raises:
        CorruptCheckpoint: the record of a part is not one that a save writes.
    """
    data: dict[str, Pair] = {}
    positions = _position(a), _position(b)
    if positions[0] is not None and positions[1] is not None:
        pairs = _data_differences(positions[0], positions[1])
        data = {name: pair for name, pair in pairs.items() if not ignore(f"data.{name}")}
    numbers: dict[str, Pair] = {}
    for name in PROGRESS:
        x, y = getattr(a, name), getattr(b, name)
        if x != y and name not in data and not ignore(name):
            numbers[name] = (x, y)
    same_ranks = a.saved_on["ranks"] == b.saved_on["ranks"]
    for part in a.parts.keys() & b.parts.keys():
        if part == "data" and None not in positions:
            continue
        with reading_record(f"{part} in the manifest of one of the two steps"):
            x, y = (_compared(step.parts[part], same_ranks) for step in (a, b))
            numbers |= _first_difference(part, x, y, ignore)
    return dict(sorted(numbers.items())), data


def _position(manifest: Manifest) -> Mapping[str, Any] | None:
    """Return the state of an ElasticLoader; None for any other loader, or without one."""
    record = manifest.parts.get("data")
    tree = cast("Any", record).get("tree") if isinstance(record, dict) else None
    return tree if isinstance(tree, dict) and tree.keys() >= POSITION else None


def _data_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the differences between the states of two loaders: name -> both values."""
    names = [name for name in {**a, **b} if name not in NO_POSITION]
    return {n: (a.get(n), b.get(n)) for n in names if a.get(n) != b.get(n)}


def _compared(record: Mapping[str, Any], same_ranks: bool) -> dict[str, Any]:
    """Return a record without values that may differ between equal runs.

    The `state_dict()` of the part is under "tree".
    """
    left_out = (*NOT_COMPARED, *COMPARED_APART)
    compared = {name: value for name, value in record.items() if name not in left_out}
    if record["kind"] == "optimizer" and "opaque" not in record:
        compared["param_groups"] = [
            {k: v for k, v in group["options"].items() if k not in IMPLEMENTATION}
            | {"params": group["params"]}
            for group in record["groups"]
        ]
    if "frozen" in compared:  # compared by its values, wherever they are stored
        compared["frozen"] = {name: part["digest"] for name, part in compared["frozen"].items()}
    if "base" in compared:
        compared["base"] = compared["base"]["digest"]
    if same_ranks and "by_rank" in record:
        compared["by_rank"] = record["by_rank"]
    if "by_rank" not in record:
        compared["tree"] = record.get("tree", {})
    return compared


def _first_difference(where: str, a: Any, b: Any, ignore: Ignore) -> dict[str, Pair]:
    """Return the first path at which two trees differ, with both values; empty if none does."""
    a, b = _known(a), _known(b)
    if ignore(where) or a == b:
        return {}
    if isinstance(a, dict) and isinstance(b, dict):
        table_a, table_b = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
        keys = {**table_a, **table_b}
        pairs = [(key, table_a.get(key, ABSENT), table_b.get(key, ABSENT)) for key in keys]
    elif isinstance(a, list) and isinstance(b, list):
        longest = zip_longest(cast("list[Any]", a), cast("list[Any]", b), fillvalue=ABSENT)
        pairs = [(str(number), x, y) for number, (x, y) in enumerate(longest)]
    else:
        return {where: (_shown(a), _shown(b))}
    for key, x, y in pairs:
        is_mark = key == "tree" or key.startswith("~")  # not a part of the path that users see
        inner = where if is_mark else f"{where}.{key}"
        if difference := _first_difference(inner, x, y, ignore):
            return difference
    return {}


def _known(value: Any) -> Any:
    """Return the value; a word for a tensor; the object for a text of a JSON object."""
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    is_tensor = isinstance(value, dict) and not value.keys().isdisjoint(TENSORS)
    return "a tensor" if is_tensor else value


def _shown(value: Any) -> Any:
    if value is ABSENT:
        return "absent"
    mark = next(iter(cast("dict[str, Any]", value)), "") if isinstance(value, dict) else ""
    return value[mark] if mark.startswith("~") else value
