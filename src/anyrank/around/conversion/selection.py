"""Which tensors of a source are written, under which names, and which of them are one tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from anyrank.around.conversion.output import OutputTensor
from anyrank.around.hugging.dequantise import without_scales
from anyrank.around.hugging.quantised import scales_of
from anyrank.around.tables.choice import tables_named, unused
from anyrank.errors import LoadError
from anyrank.files.listing import Listing, ties_of
from anyrank.tensors.names import NESTED, WRAPPERS, Rename, is_other_part, renamer
from anyrank.tensors.spec import StoredTensor
from anyrank.wording import count


@dataclass(frozen=True)
class Selection:
    """What is written.

    Attributes:
        tensors: name -> stored tensor, in order.
        tied: name -> the name of the tensor that it is.
        renamed: key of the source -> name, where they differ.
        skipped: what is not written, or not renamed, with the reason.
    """

    tensors: dict[str, StoredTensor]
    tied: dict[str, str] = field(default_factory=dict[str, str])
    renamed: dict[str, str] = field(default_factory=dict[str, str])
    skipped: tuple[str, ...] = ()


def select(listing: Listing, rename: Rename) -> Selection:
    """The weights of a source, by the names of the plain module.

    Args:
        listing: the source.
        rename: as for `convert`.

    Raises:
        LoadError: two keys get one name, there are no weights, or one is not a dense tensor.
    """
    new_name = renamer(rename)
    named = tables_named(listing, None if rename is None else new_name)
    if named is None:
        keys, skipped = _weights_of(listing)
    else:
        listing, skipped = named, []
        keys = {key: key for key in listing.tensors}
    left_out = {key: None for key, name in keys.items() if name and not new_name(name)}
    skipped += [f"{key}: rename= leaves it out" for key in left_out]
    names = {key: _plain(new_name(keys[key])) for key in keys if key not in left_out}
    if names and all(name.startswith("module.") for name in names.values()):
        names = {key: name.removeprefix("module.") for key, name in names.items()}
    tensors: dict[str, StoredTensor] = {}
    owner: dict[str, str] = {}
    for key, name in names.items():
        if name in owner:
            raise LoadError(f"both {owner[name]} and {key} of the source become {name}: rename one")
        if not name:
            raise LoadError(f"{key}: has only names of wrappers in it: rename it")
        owner[name] = key
        tensors[name] = listing.tensors[key]
    for key, what in listing.unreadable.items():
        raise LoadError(f"{key}: is {what}; then convert")
    if not tensors:
        raise LoadError(
            "the source holds no weights to convert: `anyrank inspect` shows what it holds"
        )
    tied = ties_of(tensors)
    kept = {name: stored for name, stored in tensors.items() if name not in tied}
    extras = [f"{key}: extra state of a module, which is not a tensor" for key in listing.extras]
    renamed = {key: name for key, name in names.items() if key != name}
    idle = [f"{old}: rename= has it, and no key matches" for old in unused(rename, keys.values())]
    return Selection(kept, tied, renamed, (*listing.skipped, *skipped, *extras, *idle))


def _weights_of(listing: Listing) -> tuple[dict[str, str], list[str]]:
    """Keys of weights -> their names in the table of weights, and what else there is."""
    above = _above_all(listing)
    others = [key for key in listing.tensors if is_other_part(key.removeprefix(above))]
    weights = [key for key in listing.tensors if not is_other_part(key.removeprefix(above))]
    firsts = {key.removeprefix(above).partition(".")[0] for key in weights}
    # Beside an optimizer, what is under one name such as "model" is that table of the checkpoint;
    # by itself it may be a module of this name, unless the format says that it is a table.
    tables = (p for p in NESTED if firsts == {p} and (others or above + p in listing.tables))
    table = next((f"{above}{part}." for part in tables), "")
    named = {key: key.removeprefix(table) for key in weights}
    return named, [f"{key}: not weights" for key in others]


def _above_all(listing: Listing) -> str:
    """The prefix of the one table that holds all others, as in `{"app": {"model": ...}}`."""
    first, *others = {key.partition(".")[0] for key in listing.tensors} or {""}
    is_outer = not others and first in listing.tables and first not in NESTED
    return f"{first}." if is_outer else ""


def _plain(name: str) -> str:
    """A name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def outputs_of(
    listing: Listing, selection: Selection, dtype: torch.dtype | None
) -> list[OutputTensor]:
    """The tensors to write: floating ones in `dtype`, if it is given; others keep theirs.

    Raises:
        LoadError: a cast would take 8-bit values for weights, without their scales, or would round
            the scales of integers, which go to nothing in float16.
    """
    cast = [] if dtype is None else [*selection.tensors.values()]
    floating = [stored for stored in cast if stored.dtype.is_floating_point]
    # A mask of uint8 is none, though its module may have a parameter of such a name.
    scaled = {*scales_of(listing.tensors.values()).values()}
    scaled = {name for name in scaled if name.endswith("weight")}
    integers = [t for t in cast if not t.dtype.is_floating_point and t.name in scaled]
    problems = without_scales(listing, [*floating, *integers], lambda key: True)
    if problems:
        raise LoadError(
            f"{problems[0]}; or convert without dtype= ({count(len(problems), 'tensor')})"
        )
    return [
        OutputTensor(
            name,
            stored.shape,
            dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype,
        )
        for name, stored in selection.tensors.items()
    ]
