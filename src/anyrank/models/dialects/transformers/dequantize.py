"""Dequantizes tensors while they are read.

Each is a "file" of float32 that is computed from ranges of two others, so every reader of files can
read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from anyrank.errors import LoadError
from anyrank.files.listing import FileInfo, Listing
from anyrank.models.dialects.computed import ITEM
from anyrank.models.dialects.transformers.quantized import (
    METHODS,
    OWN_SCALES,
    SCALE_INV,
    Pair,
    Quantized,
    blocks_of,
    is_cast_along,
    is_packed,
    is_small,
    is_wide,
    may_be_scaled,
    owners_of,
    pairs_of,
    scales_of,
)
from anyrank.models.dialects.transformers.symbolic import SymbolicTensor
from anyrank.sources.part_names import is_other_part
from anyrank.sources.tables.table_names import outer_name
from anyrank.tensors.names import candidates
from anyrank.tensors.spec import StoredTensor
from anyrank.wording import count


def dequantized(
    listing: Listing, dtypes: Mapping[str, torch.dtype], rename: Callable[[str], str]
) -> Listing:
    """Return the listing with float32 tensors in place of quantized ones, unless these are needed.
    If its method is unknown, it is unchanged.

    The tensor of a pair `X_blocks`, `X_scales` is X. If it has three dims, the last two are
    swapped, because transformers stores stacked experts in that order. If the model has `X_blocks`
    itself as a floating-point tensor, it is that tensor, and nothing is swapped.

    Args:
        listing: the source.
        dtypes: name -> dtype of the tensor to fill; empty if all must be floating-point.
        rename: maps the source's keys to these names.

    Raises:
        LoadError: scales do not match, or are missing.
    """
    if unknown_method(listing) is not None:
        return listing
    pairs = pairs_of(listing.tensors)
    sizes = blocks_of(listing.quantization, pairs, listing.tensors)
    holds_small = any(map(is_small, dtypes.values()))

    def wanted(key: str) -> torch.dtype | None:
        return next((dtypes[name] for name in candidates(rename(key)) if name in dtypes), None)

    tensors, files = dict(listing.tensors), list(listing.files)
    for pair in pairs:
        by_values, by_name = wanted(pair.values), wanted(pair.name)
        dtype = by_name if by_values is None else by_values
        if holds_small if dtype is None else not is_wide(dtype):
            continue
        quantized = pair.quantized(listing.tensors, sizes)
        stored = _computed(pair, quantized, len(files), swapped=by_values is None)
        files.append(_info(listing, quantized))
        del tensors[pair.values], tensors[pair.scales]
        tensors[pair.name if by_values is None else pair.values] = stored
    if listing.quantization.get("quant_method") == "fp8":
        scaled = set(scales_of(tensors.values()).values())
        for key, stored in tensors.items():
            dtype = wanted(key)
            is_weight = is_wide(dtype) if dtype else not dtypes
            if is_small(stored.dtype) and is_weight and stored.name not in scaled:
                raise LoadError(
                    f"{key}: is {stored.dtype}, but its scale {key}{SCALE_INV} is missing from the "
                    "source, which is quantized with fp8 according to its config.json. Without "
                    "the scale, the values are wrong; download the source again."
                )
    return replace(listing, tensors=tensors, files=tuple(files), quantization={})


def _computed(pair: Pair, quantized: Quantized, number: int, *, swapped: bool) -> StoredTensor:
    stored = StoredTensor.contiguous(pair.values, quantized.shape, torch.float32, number, 0)
    if pair.method == "mxfp4" and len(quantized.shape) == 3 and swapped:
        return SymbolicTensor(stored).transpose(1, 2).stored
    return stored


def _info(listing: Listing, quantized: Quantized) -> FileInfo:
    source = listing.files[quantized.values.chunks[0].file]
    path = f"{quantized.values.name} of {source.path}"
    return FileInfo(path, quantized.numel * ITEM, source.version, computed=quantized)


def without_scales(
    listing: Listing,
    wanted: Iterable[StoredTensor],
    unused: Callable[[str], bool] | None,
    left_out: Collection[str] = (),
) -> list[str]:
    """Return the error texts for 8-bit tensors that are not weights, because unused scales exist.

    The scales belong to them or to other tensors of the source.

    A file of 8-bit floats without scales is a plain cast of weights, which is common for image
    models: its numbers are the weights.

    Args:
        listing: the source, with its known pairs dequantized.
        wanted: tensors that would become weights of a larger dtype.
        unused: returns whether a key of the source is not used; None if this is not known.
        left_out: keys that are not scales according to the caller.
    """
    small = [stored for stored in wanted if may_be_scaled(stored)]
    if not small:
        return []
    beside = (stored for key, stored in listing.beside.items() if not is_other_part(key))
    # In a table that the caller named, they may be known only by their names in it.
    names = {stored.name for stored in listing.tensors.values()}
    others = [stored for stored in small if stored.name not in names]
    tables = listing.tables | {outer_name(stored.name for stored in small)}
    scales = scales_of([*listing.tensors.values(), *others], beside, tables)
    # Tools use more names for scales than are known here.
    scales |= (lone_numbers if unused is None else _beside)(listing.tensors.values(), small)
    scales = {key: name for key, name in scales.items() if key not in left_out}
    if unused is not None:
        scales = {key: name for key, name in scales.items() if unused(key)}
    by_name = {name: key for key, name in reversed(scales.items())}
    known = next((info.computed.parts for info in listing.files if info.computed is not None), ())
    lost = [*scales, *(part.name for part in known[-1:])]
    if not lost:
        return []
    advice = ""
    if unused is not None and scales:
        how = _leaving_out([*scales], [name for name in names if not unused(name)])
        advice = f". To load the numbers without scales, drop the scales with {how}."
    return [
        f"{stored.name}: is {stored.dtype} in the source, "
        + (
            f"and seems to have a scale ({by_name[stored.name]})"
            if stored.name in by_name
            else f"without the scale that other tensors have ({lost[0]})"
        )
        + ". Without the scale, the values are wrong; dequantize it with the library that created "
        "it" + advice
        for stored in small
    ]


def _leaving_out(scales: Sequence[str], kept: Sequence[str]) -> str:
    """Return the text of a `rename=` that drops scales and nothing else.

    It uses the name above them, if that is the name of their table, otherwise their last names.
    """
    firsts = {key.partition(".")[0] for key in kept}
    lasts = {key.rpartition(".")[2] for key in kept}
    above = {key: first for key in scales if (first := key.partition(".")[0]) not in firsts}
    ends = {key.rpartition(".")[2] for key in scales if key not in above}
    if ends & lasts:
        return f"rename=, a function that returns '' for each of them, such as {scales[0]!r}"
    patterns = ["^(%s)([.].*)?$"] if above else []
    patterns += ["^(.*[.])?(%s)$"] if ends else []
    names_of = [sorted(names) for names in ({*above.values()}, ends) if names]
    pairs = [
        (pattern % "|".join(map(re.escape, names)), "")
        for pattern, names in zip(patterns, names_of, strict=True)
    ]
    return f"rename={pairs!r}, added to its other entries"


def _beside(tensors: Iterable[StoredTensor], small: Sequence[StoredTensor]) -> dict[str, str]:
    """Map keys that may be scales or zero points of 8-bit tensors, by any name, to their tensors.

    They are in the tensor's module or below its name, and have fewer elements.
    """
    owners, by_name = owners_of(small), {stored.name: stored for stored in small}
    smaller = {
        stored.name: owner
        for stored in tensors
        if (owner := owners.get(stored.name.rpartition(".")[0])) is not None
        and stored.numel < by_name[owner].numel
        and not is_cast_along(stored, by_name[owner])
        and stored.dtype != torch.int64  # a counter
        and "bias" not in stored.name.rpartition(".")[2]
    }
    return {key: owner for key, owner in smaller.items() if OWN_SCALES.search(key) is None}


def lone_numbers(tensors: Iterable[StoredTensor], small: Sequence[StoredTensor]) -> dict[str, str]:
    """Keys of single numbers that may be the scale of an 8-bit tensor, by any name -> its key.

    Without a model, a larger tensor may as well be a parameter of the same module.
    """
    return _beside((stored for stored in tensors if stored.numel == 1), small)


def unknown_method(listing: Listing) -> str | None:
    """Return the error text for a source that cannot be read as floating-point weights, or None."""
    method = listing.quantization.get("quant_method")
    if not listing.quantization or method in METHODS:
        return None
    return (
        f"the source is quantized with {method or 'a method without a name'} (quantization_config "
        f"in its config.json), but only {' and '.join(METHODS)} are dequantized while they are "
        "read. Pass the weights from before the quantization; or dequantize it with the library "
        "that created it (transformers: model.dequantize(), then save_pretrained), and pass the "
        "result."
    )


def packed_weights(listing: Listing) -> dict[str, str]:
    """Map keys of weights that a tool packed into integers to one of the scales of each."""
    tensors = {stored.name: stored for stored in listing.tensors.values()}
    known = {pair.values for pair in pairs_of(tensors)}
    return {
        name: scale
        for scale, name in reversed(scales_of(tensors.values()).items())
        if is_packed(name) and name not in known and not tensors[name].dtype.is_floating_point
    }


def packed_in_words(packed: Mapping[str, str]) -> str:
    """Return the error text for packed weights (see `packed_weights`)."""
    name, scale = next(iter(packed.items()))
    return (
        f"{name}: is a quantized weight (packed integers with scales, {scale}) of a kind that is "
        f"not dequantized while it is read ({count(len(packed), 'tensor')}). Pass the weights from "
        "before the quantization; or dequantize them with the library that created them, and pass "
        f"the result; or drop it with rename={ {name: '', scale: ''}!r}"
    )


def check_method(listing: Listing) -> None:
    """Check that a source can be read as floating-point weights.

    Raises:
        LoadError: it cannot; the error names the method.
    """
    problem = unknown_method(listing)
    if problem is not None:
        raise LoadError(problem)
