"""The two ends of a sync as their ranks hold them, and what the other ranks need to know of them.

An end that is sharded over many ranks is described once: ranks with the same rows differ in their
coordinates only, which are a few numbers each.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.model.given_layouts import Layouts, RankMesh, apply_layouts
from anyrank.model.match import is_pinned
from anyrank.model.peft import find_lora, is_peft, merged_name
from anyrank.model.tensors import (
    Description,
    ModelTensor,
    describe,
    facts_of,
    put_together,
    walk_tensors,
)
from anyrank.model.wrappers import below_wrappers, plain_class
from anyrank.tensors.layout import Layout
from anyrank.world.ranks import Ranks

Module = nn.Module | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Added:
    """What one adapter adds to a weight of `src`; see `Factors`, whose positions are names here."""

    adapter: str
    a: str
    b: str
    scaling: float
    transposed: bool
    narrows: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of an end, the same on all ranks that hold a part of it.

    Attributes:
        keys: its names, several when it is tied.
        shape: global.
        dtype: of its elements.
        layout: how it lies on its mesh; None: whole on each rank.
        mesh: number of the mesh, by which its coordinate is found.
        kind: "parameter", "buffer" or "derived"; "factor" for what is added to others, and
            "dropped" for what a merged model has not.
        is_meta: whether it has no values yet.
        is_adapter: whether an adapter (PEFT) has it in place of, or beside, the base model.
        is_merged: whether the values of an adapter that is still there are part of it.
        is_pinned: whether it belongs to a frozen part, and is never written to.
        added: what adapters add to it on the way.
        scaling: by which the model multiplies what this factor of an adapter is part of.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    mesh: int
    kind: str
    is_meta: bool
    is_adapter: bool
    is_merged: bool
    is_pinned: bool
    added: tuple[Added, ...] = ()
    scaling: float | None = None


@dataclass(frozen=True)
class End:
    """One side of a sync on this rank.

    Attributes:
        module: what was given, or a module that holds the dict's tensors; empty for None.
        tensors: of the module.
        rows: of the same tensors, as other ranks know them.
        coordinates: this rank's, in each of the meshes that the rows number.
        digest: of the rows; empty without tensors.
    """

    module: nn.Module
    tensors: list[ModelTensor]
    rows: tuple[Row, ...]
    coordinates: tuple[tuple[int, ...] | None, ...]
    digest: str


Seen: TypeAlias = "tuple[tuple[Row, ...], tuple[tuple[int, ...] | None, ...], str]"


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a look found, and all that it went by; no tensor and no module."""

    facts: Any
    how: tuple[bool, str]  # whether merged, and a digest of what its parts were joined to
    description: Description
    seen: Seen


_kept: deque[_Kept] = deque(maxlen=8)  # of this process, the newest first


def look(given: Module, *, merge: bool = False) -> End:
    """One end as this rank has it.

    Args:
        given: the module, the dict, or None.
        merge: see the end as the model that it is with its adapters merged.

    Raises:
        LoadError: tensors that cannot be read or written, named with their type; adapters that
            cannot be merged.
    """
    return _Look(given, merge).end({}, "")


def look_at_parts(
    dst: Module, src: Module, layout: Layouts, ranks: Ranks, *, merge: bool = False
) -> tuple[End, End]:
    """Both ends, where some rank has a `layout=` of plain tensors that are parts. All ranks.

    Raises:
        LoadError: as `look` and `apply_layouts`.
    """
    here = "looking at both ends"
    into, out_of = ranks.own(here, lambda: (_Look(dst, False), _Look(src, merge)))
    joined = apply_layouts({"dst": into.tensors, "src": out_of.tensors}, layout, ranks)
    to, by = joined.meshes["dst"], joined.meshes["src"]
    # The two ends may look alike, and be parts of other wholes.
    keys = (f"dst {joined.key}", f"src {joined.key}")
    return ranks.own(here, lambda: (into.end(to, keys[0]), out_of.end(by, keys[1])))


class _Look:
    """One end on its way; what is found of a model is kept for those alike.

    Args:
        given: the module, the dict, or None.
        merge: as for `look`.

    Attributes:
        tensors: of the module; of plain ones that are parts, as if they were whole.

    Raises:
        LoadError: as `look`.
    """

    def __init__(self, given: Module, merge: bool) -> None:
        self.module, self.merge = _as_module(given), merge
        walk = walk_tensors(self.module)
        self.facts = facts_of(walk)
        alike = (kept for kept in [*_kept] if kept.facts == self.facts)  # others may add to it
        self.kept = next(alike, None) if self.facts else None
        self.description = self.kept.description if self.kept else describe(walk)
        self.tensors = put_together(walk, self.description)

    def end(self, meshes: Mapping[int, RankMesh], joined: str) -> End:
        """The end, once its tensors say what they are parts of.

        Args:
            meshes: of the tensors that are parts.
            joined: a digest of what they are parts of.

        Raises:
            LoadError: as `look`.
        """
        how = (self.merge, joined)
        kept = self.kept
        if kept is not None and kept.how != how:
            alike = (each for each in [*_kept] if each.how == how and each.facts == self.facts)
            kept = next(alike, None)
        if kept is not None:
            return End(self.module, self.tensors, *kept.seen)
        seen = _rows(self.module, self.tensors, meshes, self.merge)
        names = self.description.names
        if self.facts and not any("base_layer" in each[0] for each in names):
            _kept.appendleft(_Kept(self.facts, how, self.description, seen))
        return End(self.module, self.tensors, *seen)


def _rows(
    module: nn.Module, tensors: list[ModelTensor], given_meshes: Mapping[int, RankMesh], merge: bool
) -> Seen:
    """The rows of an end, this rank's coordinates, and the digest.

    Raises:
        LoadError: adapters that cannot be merged.
    """
    meshes: dict[int, int] = {}
    coordinates: list[tuple[int, ...] | None] = []
    rows: list[Row] = []
    for index, tensor in enumerate(tensors):
        held: Any = tensor.tensor
        mesh = 0
        if tensor.layout is not None:
            mesh = id(held.device_mesh if tensor.is_dtensor else given_meshes[index])
        if mesh not in meshes:
            meshes[mesh] = len(coordinates)
            coordinates.append(tensor.coordinate)
        keys = tuple(
            dict.fromkeys(
                below_wrappers(place.names[0], place.path) for place in tensor.registrations
            )
        )
        rows.append(
            Row(
                keys=keys,
                shape=tensor.shape,
                dtype=tensor.dtype,
                layout=tensor.layout,
                mesh=meshes[mesh],
                kind=tensor.kind,
                is_meta=tensor.is_meta,
                is_adapter=tensor.adapter or any(".modules_to_save." in key for key in keys),
                is_merged=_is_merged(tensor),
                is_pinned=is_pinned(tensor),
                scaling=_scaling(tensor),
            )
        )
    if merge:
        rows = _as_merged(tensors, rows)
    kind = plain_class(module)
    title = f"{kind.__module__}.{kind.__qualname__}"  # what else a match asks of a model
    return tuple(rows), tuple(coordinates), _digest(rows, title)


def _as_merged(tensors: list[ModelTensor], rows: list[Row]) -> list[Row]:
    """The rows of a model as it is with its adapters merged.

    Raises:
        LoadError: as `find_lora`.
    """
    lora = find_lora(tensors)
    factors = {n for found in lora.added.values() for each in found for n in (each.a, each.b)}
    merged: list[Row] = []
    for index, (tensor, row) in enumerate(zip(tensors, rows, strict=True)):
        if index in factors:
            merged.append(replace(row, kind="factor"))
        elif index in lora.dropped:
            merged.append(replace(row, kind="dropped"))
        else:
            keys = tuple(dict.fromkeys(merged_name(place) for place in tensor.registrations))
            added = tuple(
                Added(
                    adapter=each.adapter,
                    a=rows[each.a].keys[0],
                    b=rows[each.b].keys[0],
                    scaling=each.scaling,
                    transposed=each.transposed,
                    narrows=each.narrows,
                )
                for each in lora.added.get(index, ())
            )
            merged.append(replace(row, keys=keys, added=added, is_adapter=False))
    return merged


def _is_merged(tensor: ModelTensor) -> bool:
    """Whether PEFT has added an adapter to a base weight, and keeps it to take it off again."""
    return any(
        getattr(module, "merged", False)
        for place in tensor.registrations
        if "base_layer" in place.names[0]
        for module in place.path
    )


def _scaling(tensor: ModelTensor) -> float | None:
    """What PEFT multiplies the product of a LoRA layer's factors by, of which this is one."""
    path = tensor.registrations[0].path
    layer: Any = next((m for m in path if is_peft(m) and hasattr(m, "scaling")), None)
    if not tensor.adapter or layer is None:
        return None
    parts = tensor.name.split(".")
    return next((float(by) for name, by in layer.scaling.items() if name in parts), None)


def check_values(end: End) -> None:
    """Refuse a source that has no values to send.

    Raises:
        LoadError: tensors on meta.
    """
    wanted = [row for row in end.rows if row.kind != "derived"]
    on_meta = [n for n, row in enumerate(end.rows) if row.is_meta and row.kind != "derived"]
    if on_meta:
        names = ", ".join(end.tensors[n].name for n in on_meta[:10])
        raise LoadError(
            f"src has no values yet: {names} ({len(on_meta)} of {len(wanted)} tensors) on meta: "
            "load or materialize it first"
        )


def _digest(rows: list[Row], title: str) -> str:
    if not rows:
        return ""
    layouts: dict[int, str] = {}  # by identity: a hash of a layout goes through all of it
    text = [title]
    for row in rows:
        layout = layouts.get(id(row.layout)) or layouts.setdefault(id(row.layout), repr(row.layout))
        text.append(
            f"{row.keys}{row.shape}{row.dtype}{layout}{row.mesh}{row.kind}{row.is_meta}"
            f"{row.is_adapter}{row.is_merged}{row.is_pinned}{row.added}{row.scaling}"
        )
    return hashlib.blake2b("\n".join(text).encode(), digest_size=16).hexdigest()


def _as_module(given: Module) -> nn.Module:
    """A module whose tensors are those given; names of a dict are kept as they are."""
    if isinstance(given, nn.Module):
        return given
    module = nn.Module()
    # Not by register_parameter, which refuses dots, and tensors that are no Parameter.
    module.__dict__["_parameters"].update(given or {})
    return module
