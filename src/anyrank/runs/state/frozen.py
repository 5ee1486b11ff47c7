"""Frozen parts of a module in a run's checkpoint: their hashes are saved, but not their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from anyrank.errors import CheckpointError, LoadError
from anyrank.files.listing import TensorFill
from anyrank.models.allocation import room_for
from anyrank.models.dialects.frozen.freeze import check_frozen, remember
from anyrank.models.tensors import find_tensors, in_state_dict
from anyrank.runs.state.part_types import in_line, misfits
from anyrank.sources.source import list_source
from anyrank.tensors.names import match_keys


def save_frozen(
    part: str, parts: Mapping[str, nn.Module]
) -> tuple[dict[str, Any], list[nn.Module]]:
    """Record those of a module's frozen `parts` whose weights are elsewhere; return the records by
    name, and these parts.

    Raises:
        CheckpointError: a frozen part was modified.
    """
    record: dict[str, Any] = {}
    elsewhere: list[nn.Module] = []
    for name, inner in parts.items():
        check_frozen(inner, f"{part}.{name}".rstrip("."))
        info: Any = inner.anyrank_frozen
        if info.source is not None and info.digest is not None:
            elsewhere.append(inner)
            record[name] = {"source": info.source, "digest": info.digest}
    return record, elsewhere


def _commit(part: str, parts: Mapping[str, nn.Module], records: Any) -> None:
    """Record the digests of filled frozen parts, and compare them with the saved ones.

    Raises:
        CheckpointError: a part has different weights.
    """
    for name, inner in parts.items():
        remember(inner)  # including tensors of the extra state
        _compare_digest(part, name, inner, records)


def match_frozen(
    part: str, parts: Mapping[str, nn.Module], records: Any, device: torch.device
) -> tuple[list[str], list[TensorFill], Callable[[], None]]:
    """Match frozen parts whose weights are elsewhere: compare hashes, or fill from their source.

    Args:
        part: the module's name in the state.
        parts: its frozen parts, by name.
        records: what `save_frozen` recorded, by name.
        device: the device for plain tensors on meta.

    Returns:
        The problems, the fills, and a function to call once all frozen parts are filled.
    """
    problems: list[str] = []
    fills: list[TensorFill] = []
    for name, known in records.items():
        inner: Any = parts.get(name)
        if inner is None:
            problems.append(
                f"{part}.{name}: was frozen with source {known['source']} when it was saved, but "
                "is not frozen now. Call anyrank.freeze() on it with that source before you resume."
            )
            continue
        info = inner.anyrank_frozen
        if info.digest is not None:
            if info.digest != known["digest"]:
                problems.append(_digest_differs(part, name, known, info.digest))
            continue
        try:
            listing = list_source(info.source or known["source"])
        except LoadError as error:
            problems.append(f"{part}.{name}: its source cannot be read: {error}")
            continue
        targets = in_state_dict(find_tensors(inner))
        matches = match_keys(
            [target.all_names() for target in targets], listing.tensors, lambda key: key
        )
        if matches.missing:
            names = [targets[index].name for index in matches.missing]
            problems.append(in_line(f"{part}.{name}: not in its source", names))
            continue
        for index, key in matches.keys.items():
            target, stored = targets[index], listing.tensors[key]
            problem = misfits(stored, target)
            if problem:
                problems.append(f"{part}.{name}.{problem} (its source)")
                continue
            fills.append(TensorFill(target, stored, room_for(target, device), listing))
    return problems, fills, partial(_commit, part, parts, records)


def _compare_digest(part: str, name: str, inner: Any, records: Any) -> None:
    known, digest = records.get(name), inner.anyrank_frozen.digest
    if known is not None and digest is not None and digest != known["digest"]:
        raise CheckpointError(_digest_differs(part, name, known, digest))


def _digest_differs(part: str, name: str, known: Any, digest: str) -> str:
    return (
        f"{part}.{name}: is frozen, and had the digest {known['digest']} when it was saved (source "
        f"{known['source']}), but has {digest} now. Freeze the weights of the original run."
    )
