"""Quantized files in a match: small numbers with scales become weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from anyrank.files.listing import Listing
from anyrank.models.dialects.dialect import Case, Dialect, ModelMatch
from anyrank.models.dialects.transformers.dequantize import (
    dequantized,
    packed_in_words,
    packed_weights,
    unknown_method,
    without_scales,
)
from anyrank.models.dialects.transformers.quantized import is_wide, may_be_scaled
from anyrank.sources.tables.renaming import Renamer
from anyrank.tensors.spec import StoredTensor

SHOWN = 10


class QuantizedValues(Dialect):
    """The quantized tensors of a source."""

    @staticmethod
    def applies(case: Case) -> bool:
        """Return whether a source is quantized by its config.json, or has small numbers."""
        return any(map(_may_be_quantized, (case.source, *case.parts.values())))

    @staticmethod
    def values(listing: Listing, dtypes: Mapping[str, torch.dtype], rename: Renamer) -> Listing:
        """Return a source with float32 tensors in place of quantized ones, where needed."""
        return dequantized(listing, dtypes, rename) if _may_be_quantized(listing) else listing

    def problems(self, match: ModelMatch) -> list[str]:
        """Return the error texts for small numbers that would be mistaken for weights."""
        tensors, rename = match.tensors, self.case.rename
        wide = [stored for i, stored in match.wanted if is_wide(tensors[i].dtype)]
        unknown = unknown_method(match.listing)
        has_others = bool(match.missing or match.unexpected)
        if unknown and (has_others or any(not is_wide(stored.dtype) for stored in wide)):
            return [unknown]
        fitting = [stored for i, stored in match.wanted if stored.shape == tensors[i].shape]
        used, used_whole = (
            _names_at(match.listing, wanted)
            for wanted in ([stored for _, stored in match.wanted], fitting)
        )
        # rename= is for whole keys, which include the table of a tensor.
        keys = {stored.name: key for key, stored in match.listing.tensors.items()}

        def is_left(name: str) -> bool:
            return name not in used and rename(keys.get(name, name)) != ""

        packed = packed_weights(match.listing)
        lost = {n: s for n, s in packed.items() if n not in used_whole and is_left(s)}
        if lost and (match.missing or not used.isdisjoint(lost)):
            return [packed_in_words(lost)]
        return without_scales(match.listing, wide, is_left)[:SHOWN]


def _may_be_quantized(listing: Listing) -> bool:
    """Return whether a source is quantized by its config.json, or has small numbers."""
    return bool(listing.quantization) or any(map(may_be_scaled, listing.tensors.values()))


def _names_at(listing: Listing, wanted: Iterable[StoredTensor]) -> set[str]:
    """Return the names of the source's tensors that contain some of these bytes."""
    places = {(chunk.file, chunk.offset) for stored in wanted for chunk in stored.chunks}
    return {
        stored.name
        for stored in listing.tensors.values()
        if any((chunk.file, chunk.offset) in places for chunk in stored.chunks)
    }
