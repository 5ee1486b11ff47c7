"""Select the tensors of a source to write, with their names and ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from anyrank.errors import LoadError
from anyrank.files.listing import Listing, ties_of
from anyrank.models.dialects.transformers.dequantize import lone_numbers, without_scales
from anyrank.models.dialects.transformers.quantized import is_packed, may_be_scaled, scales_of
from anyrank.models.fits import PACKED
from anyrank.sources.tables.choice import tables_named, take_tables, unused_renames
from anyrank.sources.tables.parts import parts_of
from anyrank.sources.tables.renaming import renamer
from anyrank.tensors.names import Rename, plain_names
from anyrank.tensors.spec import StoredTensor
from anyrank.tools.convert.output import OutputTensor
from anyrank.wording import count


@dataclass(frozen=True)
class Selection:
    """The tensors to write.

    Attributes:
        tensors: name -> stored tensor, in order.
        tied: name -> the name of the tensor that it is tied to.
        renamed: key of the source -> name, where they differ.
        skipped: texts about keys that are not written or renamed, with the reasons.
        left_out: names in the source that `rename=` leaves out.
    """

    tensors: dict[str, StoredTensor]
    tied: dict[str, str] = field(default_factory=dict[str, str])
    renamed: dict[str, str] = field(default_factory=dict[str, str])
    skipped: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()


def select(listing: Listing, rename: Rename) -> Selection:
    """Select the weights of a source, under the names of the plain module.

    Args:
        listing: the source.
        rename: as for `convert`.

    Raises:
        LoadError: two keys get the same name, no weights exist, or one is not a dense tensor; or as
            for `unused_renames`.
    """
    source, new_name = listing, renamer(rename)
    listing, prefix, tables = _weights_of(source, rename)
    # If one table is known to hold the weights, names are relative to the table.
    keys = {key: key.removeprefix(prefix) for key in listing.tensors}
    chosen = listing.with_tensors({name: listing.tensors[key] for key, name in keys.items()})
    idle = unused_renames(rename, source, chosen, chosen.tensors, tables)
    left_out = {key: None for key, name in keys.items() if name and not new_name(name)}
    renamed = {key: new_name(keys[key]) for key in keys if key not in left_out}
    names = plain_names(renamed)
    counters = renamed.keys() - names.keys()
    _check_names(names, listing)
    _check_readable(listing, prefix, new_name)
    if not names:
        raise LoadError(
            "the source has no weights to convert. `anyrank inspect` shows its contents"
        )
    tensors = {name: listing.tensors[key] for key, name in names.items()}
    tied = ties_of(tensors)
    notes = (
        *listing.skipped_texts,
        *(f"{key}: rename= leaves it out" for key in left_out),
        *(f"{key}: counts the updates of an AveragedModel" for key in counters),
        *(f"{key}: extra state of a module, which is not a tensor" for key in listing.extras),
        *idle,
    )
    return Selection(
        tensors={name: stored for name, stored in tensors.items() if name not in tied},
        tied=tied,
        renamed={key: name for key, name in names.items() if key != name},
        skipped=notes,
        left_out=frozenset(listing.tensors[key].name for key in left_out),
    )


def _weights_of(source: Listing, rename: Rename) -> tuple[Listing, str, list[str]]:
    """Return the weights of a source, the prefix of the table that is known to hold them, and the
    tables that may.
    """
    named = tables_named(source, None if rename is None else renamer(rename))
    if named is not None:
        return named, "", []
    parts = parts_of(source)
    weights = take_tables(source, parts.weights, parts.others)
    return weights, parts.prefix, sorted(filter(None, parts.tables))


def _check_names(names: Mapping[str, str], listing: Listing) -> None:
    """Check that each key has its own name.

    Raises:
        LoadError: two keys have the same name, or one has none.
    """
    owner: dict[str, str] = {}
    for key, name in names.items():
        if name in owner:
            raise LoadError(
                f"both {owner[name]} and {key} of the source become {name}. Rename one of them"
            )
        if not name:
            where = listing.files[0].path if listing.files else "the source"
            what = f"the key {key} has only wrapper prefixes" if key else "a tensor has no name"
            raise LoadError(f"{where}: {what}. Name it in a dict, or pass rename=")
        owner[name] = key


def _check_readable(listing: Listing, prefix: str, new_name: Callable[[str], str]) -> None:
    """Raise LoadError if a tensor cannot be read, and `rename=` does not leave it out."""
    for key, what in listing.unreadable.items():
        name = key.removeprefix(prefix)
        if new_name(name):
            raise LoadError(
                f"{key}: is {what}; then convert, or leave it out with rename={ {name: ''}!r}"
            )


def outputs_of(
    listing: Listing, selection: Selection, dtype: torch.dtype | None
) -> list[OutputTensor]:
    """Return the tensors to write, floating-point ones in `dtype` if it is not None.

    Raises:
        LoadError: a cast would use 8-bit values as weights without their scales, or would round the
            scales of integers, which vanish in float16.
    """
    cast = [] if dtype is None else [*selection.tensors.values()]
    floating = [stored for stored in cast if stored.dtype.is_floating_point]
    # A uint8 mask is not scaled, even if its module has a parameter with the name of a scale.
    tensors = [*listing.tensors.values()]
    scales = scales_of(tensors) | lone_numbers(tensors, [*filter(may_be_scaled, tensors)])
    scaled = {*filter(is_packed, scales.values())}
    integers = [t for t in cast if not t.dtype.is_floating_point and t.name in scaled]
    problems = without_scales(listing, [*floating, *integers], None, selection.left_out)
    if problems:
        raise LoadError(
            f"{problems[0]}; or convert without dtype= ({count(len(problems), 'tensor')})"
        )
    packed = [stored.name for stored in floating if stored.dtype == PACKED != dtype]
    if packed:
        raise LoadError(
            f"{packed[0]}: is {PACKED}, with two values per byte, and cannot be cast. Remove dtype="
        )
    return [
        OutputTensor(
            name,
            stored.shape,
            dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype,
        )
        for name, stored in selection.tensors.items()
    ]
