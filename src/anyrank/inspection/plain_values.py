"""What differs between two steps of runs apart from their tensors: position, options, plain values.

Compared is the JSON of the manifests, as `files.json_codec` makes it. What differs between equal
runs is left out: how tensors lie on ranks, how an optimizer computes, and where a frozen part was
read from. So is a part that each rank saved for itself, where the rank counts differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from anyrank.errors import CorruptCheckpoint
from anyrank.files.json_codec import SEQUENCES, TABLES
from anyrank.files.manifest import POSITION, Manifest
from anyrank.files.optimizer_numbers import IMPLEMENTATION, RECORD, is_optimizer
from anyrank.files.receipt import canonical, data_differences
from anyrank.files.schema import check

PROGRESS = ("step", "epoch", "samples")
TENSORS = ("~own", "~whole", "~plain", "~like", "~laid", "~tensor", "~array")
NOT_COMPARED = ("kind", "layout")
COMPARED_APART = ("tree", "by_rank", "groups")
ABSENT = object()

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class PlainDifferences:
    """How two steps differ apart from their tensors.

    Attributes:
        only_a, only_b: parts that only one of them has.
        data: of two ElasticLoaders or ElasticSamplers: what differs between their states.
        numbers: what else differs -> both values; "absent" for none.
    """

    only_a: list[str]
    only_b: list[str]
    data: dict[str, Pair]
    numbers: dict[str, Pair]


def plain_differences(a: Manifest, b: Manifest) -> PlainDifferences:
    """Compare all that two steps hold apart from their tensors.

    Raises:
        CorruptCheckpoint: a part's record is not as a save writes it.
    """
    data: dict[str, Pair] = {}
    positions = _position(a), _position(b)
    if positions[0] is not None and positions[1] is not None:
        data = data_differences(positions[0], positions[1])
    numbers: dict[str, Pair] = {}
    for name in PROGRESS:
        mine, other = getattr(a, name), getattr(b, name)
        if mine != other and name not in data:
            numbers[name] = (mine, other)
    same_ranks = a.saved_on["ranks"] == b.saved_on["ranks"]
    for part in a.parts.keys() & b.parts.keys():
        if part == "data" and None not in positions:
            continue
        try:
            numbers.update(_differing_parts(part, a.parts[part], b.parts[part], same_ranks))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpoint(
                f"the manifest.parts.{part}: is not as a save writes it ({error}): the file of one "
                "of the two steps is damaged"
            ) from error
    only_a, only_b = (
        [part for part in one.parts if part not in two.parts] for one, two in ((a, b), (b, a))
    )
    return PlainDifferences(only_a, only_b, data, dict(sorted(numbers.items())))


def _position(manifest: Manifest) -> Mapping[str, Any] | None:
    """The state of an ElasticLoader or ElasticSampler; None of another loader, or without one."""
    record = manifest.parts.get("data")
    tree = cast("Any", record).get("tree") if isinstance(record, dict) else None
    return tree if isinstance(tree, dict) and POSITION.keys() <= tree.keys() else None


def _differing_parts(part: str, a: Any, b: Any, same_ranks: bool) -> Iterator[tuple[str, Pair]]:
    """What differs between the records of a part: its state_dict(), and all beside it."""
    yield from _differing(part, _beside_tree(part, a), _beside_tree(part, b))
    if same_ranks or not ("by_rank" in a or "by_rank" in b):
        yield from _differing(part, _tree(a), _tree(b))


def _tree(record: Mapping[str, Any]) -> Any:
    """The state_dict() of a part, or each rank's; of modules and most optimizers there is none."""
    if "by_rank" in record:
        return {"by_rank": record["by_rank"]}
    return record.get("tree", {})


def _beside_tree(part: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A part's record without its state_dict(), and without what differs between equal runs."""
    left_out = (*NOT_COMPARED, *COMPARED_APART)
    found = {name: value for name, value in record.items() if name not in left_out}
    if is_optimizer(record):
        check(record, RECORD, part)
        found["param_groups"] = [
            {k: v for k, v in group["options"].items() if k not in IMPLEMENTATION}
            | {"params": group["params"]}
            for group in record["groups"]
        ]
    if "frozen" in found:  # by its values, wherever they are
        found["frozen"] = {name: each["digest"] for name, each in found["frozen"].items()}
    if "base" in found:
        found["base"] = found["base"]["digest"]
    return found


def _differing(where: str, a: Any, b: Any) -> Iterator[tuple[str, Pair]]:
    """The places at which two trees differ, with both values."""
    todo = [(where, a, b)]
    while todo:  # not recursive: the file decides how deep it is
        where, a, b = todo.pop()
        x, y = _items(a), _items(b)
        if x is not None and y is not None and (x or y):
            todo += [
                (f"{where}.{key}", x.get(key, ABSENT), y.get(key, ABSENT)) for key in {**x, **y}
            ]
        elif x is None or y is None or ABSENT in (a, b):
            (mine, shown_a), (other, shown_b) = _value(a), _value(b)
            if mine != other:
                yield where, (shown_a, shown_b)


def _items(value: Any) -> Mapping[Any, Any] | None:
    """The items of a table or a sequence, by key or index; None of a single value."""
    if value is ABSENT:
        return {}
    if isinstance(value, list):
        return dict(enumerate(cast("list[Any]", value)))
    if not isinstance(value, dict):
        return None
    table = cast("dict[str, Any]", value)
    mark = next(iter(table), "")
    if mark and mark in SEQUENCES.values():
        return _items(list(table[mark]))
    if mark in TABLES.values():
        pairs = table[mark][1] if mark == "~defaultdict" else table[mark]
        return {json.dumps(k) if isinstance(k, (dict, list)) else k: v for k, v in pairs}
    return None if mark.startswith("~") else table


def _value(value: Any) -> tuple[str, Any]:
    """A single value as it is compared, and as it is shown."""
    if value is ABSENT:
        return "absent", "absent"
    mark = next(iter(cast("dict[str, Any]", value)), "") if isinstance(value, dict) else ""
    if mark in TENSORS:  # compared elsewhere
        return "tensor", "a tensor"
    if mark == "~float":
        return canonical(float(value[mark])), value[mark]
    return canonical(value), value[mark] if mark.startswith("~") else value
