"""The two ends of a sync on their ranks, and their descriptions for other ranks.

An end that is sharded over many ranks is described once: ranks with the same rows differ only in
their coordinates, which are a few numbers per rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.models.dialects.layouts.given import GivenLayout, apply_layout, cut_as_source
from anyrank.models.dialects.peft.merging import find_lora, is_merged, merged_names, scaling_of
from anyrank.models.tensors import ModelTensor, ModelTree, find_tree
from anyrank.models.wrappers import plain_class
from anyrank.tensors.layout import Layout
from anyrank.tensors.names import is_trained_copy
from anyrank.tensors.sharded_tensor import Coordinates, coordinates_of, is_released
from anyrank.wording import count
from anyrank.world.alike import digest_of
from anyrank.world.device import name_device
from anyrank.world.ranks import Ranks

Module = nn.Module | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Added:
    """The product that one adapter adds to a weight of `src`, with the names of its factors.

    See `Factors`.
    """

    adapter: str
    a: str
    b: str
    scaling: float
    transposed: bool
    narrows: bool


class TensorInfo(NamedTuple):
    """One tensor of an end, the same on every rank that holds a part of it.

    Attributes:
        keys: its names; several if it is tied.
        shape: global shape.
        dtype: dtype of its elements.
        layout: its layout on its mesh; None if each rank has the whole tensor.
        kind: "parameter", "buffer" or "derived"; "factor" if it is a factor of a product that is
            added to other tensors, and "dropped" if a merged model does not have it.
        is_meta: whether it has no values yet.
        is_adapter: whether it belongs to an adapter (PEFT), in place of or besides the base model.
        is_merged: whether its values include those of an adapter that still exists.
        is_pinned: whether it belongs to a frozen part, and is never written.
        added: products that adapters add to it while it is sent.
        scaling: the model's factor for the product that this factor belongs to.
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    kind: str
    is_meta: bool
    is_adapter: bool
    is_merged: bool
    is_pinned: bool
    added: tuple[Added, ...] = ()
    scaling: float | None = None


@dataclass(frozen=True)
class EndDescription:
    """The description of one end on this rank; equal if other ranks hold the same end.

    Attributes:
        rows: rows of its tensors.
        coordinates: coordinates of this rank in the mesh of each tensor.
        title: name of the model's class.
    """

    rows: tuple[TensorInfo, ...]
    coordinates: Coordinates
    title: str

    @cached_property
    def digest(self) -> str:
        """Digest of the rows, equal on ranks with the same rows; empty without tensors."""
        if not self.rows:
            return ""
        layouts: dict[int, str] = {}  # by identity, because many rows share one
        text = [self.title]
        for row in self.rows:
            known = layouts.get(id(row.layout))
            if known is None:
                known = layouts[id(row.layout)] = repr(row.layout)
            text.append(f"{row._replace(layout=None)}{known}")
        return digest_of(text)


@dataclass(frozen=True)
class End:
    """One end of a sync on this rank.

    Attributes:
        tree: the module, or one that holds the tensors of the dict (empty for None), with its
            tensors.
        described: description of the same tensors for other ranks.
    """

    tree: ModelTree
    described: EndDescription

    @property
    def tensors(self) -> list[ModelTensor]:
        """The tensors of the tree."""
        return self.tree.tensors

    @property
    def rows(self) -> tuple[TensorInfo, ...]:
        """The descriptions of the tensors for other ranks."""
        return self.described.rows

    @property
    def digest(self) -> str:
        """Digest of the rows; empty without tensors."""
        return self.described.digest


def find_end(
    model: Module,
    ranks: Ranks,
    *,
    layout: GivenLayout = None,
    merge: bool = False,
    known: EndDescription | None = None,
) -> End:
    """Find one end on this rank.

    Args:
        model: the module, the dict, or None.
        ranks: ranks of the call.
        layout: layout of the tensors of which its plain tensors are parts.
        merge: describe the model as if its adapters were merged.
        known: an earlier description of it, whose digest is used if nothing has changed.

    Raises:
        LoadError: tensors cannot be read or written (the error names their type), parts do not
            match the layout, or adapters cannot be merged.
        TypeError, ValueError: as for `apply_layout`.
    """
    tree = find_tree(_as_module(model))
    if layout is not None:
        apply_layout(tree.tensors, layout, ranks)
        for tensor, row in zip(tree.tensors, known.rows if known is not None else (), strict=False):
            cut_as_source(tensor, row.shape)  # with the shape that all ranks found together
    described = describe(tree, merge=merge)
    return End(tree, known if known is not None and known == described else described)


def describe(tree: ModelTree, *, merge: bool) -> EndDescription:
    """Describe an end for other ranks; see `find_end`, also for the errors."""
    rows = _rows(tree.tensors)
    rows = _as_merged(tree.tensors, rows) if merge else rows
    kind = plain_class(tree.model)
    title = f"{kind.__module__}.{kind.__qualname__}"
    return EndDescription(tuple(rows), coordinates_of(tree.tensors), title)


def _rows(tensors: list[ModelTensor]) -> list[TensorInfo]:
    """Make the rows of an end."""
    rows: list[TensorInfo] = []
    for tensor in tensors:
        first, *others = tensor.registrations
        keys = (first.unwrapped,)
        if others:
            keys = tuple(dict.fromkeys(entry.unwrapped for entry in tensor.registrations))
        rows.append(
            TensorInfo(
                keys,
                tensor.shape,
                tensor.tensor.dtype,
                tensor.layout,
                tensor.kind,
                tensor.is_meta,
                tensor.adapter or any(map(is_trained_copy, keys)),
                is_merged(tensor),
                tensor.is_pinned,
                (),
                scaling_of(tensor) if tensor.adapter else None,
            )
        )
    return rows


def _as_merged(tensors: list[ModelTensor], rows: list[TensorInfo]) -> list[TensorInfo]:
    """Make the rows of a model as if its adapters were merged.

    Raises:
        LoadError: as for `find_lora`.
    """
    lora = find_lora(tensors)
    factors = {n for pairs in lora.added.values() for pair in pairs for n in (pair.a, pair.b)}
    merged: list[TensorInfo] = []
    for index, (tensor, row) in enumerate(zip(tensors, rows, strict=True)):
        if index in factors:
            merged.append(row._replace(kind="factor"))
        elif index in lora.dropped:
            merged.append(row._replace(kind="dropped"))
        else:
            keys = tuple(dict.fromkeys(merged_names(tensor)))
            added = tuple(
                Added(
                    adapter=pair.adapter,
                    a=rows[pair.a].keys[0],
                    b=rows[pair.b].keys[0],
                    scaling=pair.scaling,
                    transposed=pair.transposed,
                    narrows=pair.narrows,
                )
                for pair in lora.added.get(index, ())
            )
            merged.append(row._replace(keys=keys, added=added, is_adapter=False))
    return merged


def check_values(end: End) -> None:
    """Check that a source has values to send.

    Raises:
        LoadError: tensors are on meta, or their storage was freed.
    """
    wanted = [row for row in end.rows if row.kind != "derived"]
    on_meta = [n for n, row in enumerate(end.rows) if row.is_meta and row.kind != "derived"]
    if on_meta:
        names = ", ".join(end.tensors[n].name for n in on_meta[:10])
        raise LoadError(
            f"src has no values yet: {len(on_meta)} of {count(len(wanted), 'tensor')} on the meta "
            f"device ({names}). Load or materialize src first"
        )
    for tensor in end.tensors:
        if tensor.kind != "derived" and not tensor.is_dtensor and is_released(tensor.tensor):
            raise LoadError(
                f"{tensor.name}: its storage was freed with untyped_storage().resize_(0). Sync the "
                "model before that"
            )


def accelerator_of(tensors: Sequence[ModelTensor]) -> str:
    """Return the accelerator that holds all of a rank's tensors that may move.

    Returns "" for the CPU, "meta" if the others are on meta, and "several" if they are not on one
    device.
    """
    devices = {tensor.tensor.device for tensor in tensors if tensor.kind != "derived"}
    if len(devices) > 1:
        return "meta" if all(d.type in ("cpu", "meta") for d in devices) else "several"
    return name_device(devices.pop()) if devices else ""


def _as_module(model: Module) -> nn.Module:
    """Make a module from the tensors; names in a dict are kept unchanged."""
    if isinstance(model, nn.Module):
        return model
    module = nn.Module()
    # Not with register_parameter, which rejects dots, and tensors that are not Parameters.
    module.__dict__["_parameters"].update(model or {})
    return module
