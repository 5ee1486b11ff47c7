"""What differs between two steps of runs apart from their tensors: position, options, plain values.

Compared is the JSON of the manifests, as `files.json_codec` makes it; of each part, the first path
that differs is told. What differs between equal runs is left out: how tensors lie on ranks, how an
optimizer computes, and where a frozen part was read from. So is a part that each rank saved for
itself, where the rank counts differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, cast

from anyrank.errors import CorruptCheckpoint
from anyrank.files.manifest import IMPLEMENTATION, POSITION, Manifest
from anyrank.files.receipt import data_differences

PROGRESS = ("step", "epoch", "samples")
TENSORS = ("~rank", "~whole", "~like", "~laid", "~array")  # compared elsewhere
NOT_COMPARED = ("kind", "layout")
COMPARED_APART = ("tree", "by_rank", "groups")
ABSENT = object()

Pair = tuple[Any, Any]
Ignore = Callable[[str], bool]


@dataclass(frozen=True)
class RecordDifferences:
    """How two steps differ apart from their tensors.

    Attributes:
        only_a, only_b: parts that only one of them has.
        data: of two ElasticLoaders or ElasticSamplers: what differs between their states.
        numbers: what else differs, the first of each part -> both values; "absent" for none.
    """

    only_a: list[str]
    only_b: list[str]
    data: dict[str, Pair]
    numbers: dict[str, Pair]


def record_differences(a: Manifest, b: Manifest, ignore: Ignore) -> RecordDifferences:
    """Compare all that two steps hold apart from their tensors.

    Args:
        a, b: the steps.
        ignore: whether a name is left out.

    Raises:
        CorruptCheckpoint: a part's record is not as a save writes it.
    """
    data: dict[str, Pair] = {}
    positions = _position(a), _position(b)
    if positions[0] is not None and positions[1] is not None:
        found = data_differences(positions[0], positions[1])
        data = {name: pair for name, pair in found.items() if not ignore(f"data.{name}")}
    numbers: dict[str, Pair] = {}
    for name in PROGRESS:
        mine, other = getattr(a, name), getattr(b, name)
        if mine != other and name not in data and not ignore(name):
            numbers[name] = (mine, other)
    same_ranks = a.saved_on["ranks"] == b.saved_on["ranks"]
    for part in a.parts.keys() & b.parts.keys():
        if part == "data" and None not in positions:
            continue
        try:
            one, two = (_compared(part, of.parts[part], same_ranks) for of in (a, b))
            numbers |= _first_difference(part, one, two, ignore)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptCheckpoint(
                f"the manifest.parts.{part}: is not as a save writes it ({error}): the file of one "
                "of the two steps is damaged"
            ) from error
    only_a, only_b = (
        [part for part in one.parts if part not in two.parts and not ignore(part)]
        for one, two in ((a, b), (b, a))
    )
    return RecordDifferences(only_a, only_b, data, dict(sorted(numbers.items())))


def _position(manifest: Manifest) -> Mapping[str, Any] | None:
    """The state of an ElasticLoader or ElasticSampler; None of another loader, or without one."""
    record = manifest.parts.get("data")
    tree = cast("Any", record).get("tree") if isinstance(record, dict) else None
    return tree if isinstance(tree, dict) and tree.keys() >= {*POSITION} else None


def _compared(part: str, record: Mapping[str, Any], same_ranks: bool) -> dict[str, Any]:
    """A part's record without what differs between equal runs; its state_dict() is under "tree"."""
    left_out = (*NOT_COMPARED, *COMPARED_APART)
    found = {name: value for name, value in record.items() if name not in left_out}
    if record["kind"] == "optimizer" and "opaque" not in record:
        found["param_groups"] = [
            {k: v for k, v in group["options"].items() if k not in IMPLEMENTATION}
            | {"params": group["params"]}
            for group in record["groups"]
        ]
    if "frozen" in found:  # by its values, wherever they are
        found["frozen"] = {name: each["digest"] for name, each in found["frozen"].items()}
    if "base" in found:
        found["base"] = found["base"]["digest"]
    if same_ranks and "by_rank" in record:
        found["by_rank"] = record["by_rank"]
    if "by_rank" not in record:
        found["tree"] = record.get("tree", {})
    return found


def _first_difference(where: str, a: Any, b: Any, ignore: Ignore) -> dict[str, Pair]:
    """The first place at which two trees differ, with both values; empty where there is none."""
    a, b = _known(a), _known(b)
    if ignore(where) or a == b:
        return {}
    if isinstance(a, dict) and isinstance(b, dict):
        one, two = cast("dict[str, Any]", a), cast("dict[str, Any]", b)
        pairs = [(key, one.get(key, ABSENT), two.get(key, ABSENT)) for key in {**one, **two}]
    elif isinstance(a, list) and isinstance(b, list):
        longest = zip_longest(cast("list[Any]", a), cast("list[Any]", b), fillvalue=ABSENT)
        pairs = [(str(number), x, y) for number, (x, y) in enumerate(longest)]
    else:
        return {where: (_shown(a), _shown(b))}
    for key, x, y in pairs:
        is_mark = key == "tree" or key.startswith("~")  # no part of the path that users know
        if found := _first_difference(where if is_mark else f"{where}.{key}", x, y, ignore):
            return found
    return {}


def _known(value: Any) -> Any:
    """The value, or what stands for a tensor's."""
    is_tensor = isinstance(value, dict) and not value.keys().isdisjoint(TENSORS)
    return "a tensor" if is_tensor else value


def _shown(value: Any) -> Any:
    if value is ABSENT:
        return "absent"
    mark = next(iter(cast("dict[str, Any]", value)), "") if isinstance(value, dict) else ""
    return value[mark] if mark.startswith("~") else value
