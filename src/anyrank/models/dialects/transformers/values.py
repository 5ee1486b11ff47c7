"""Quantised files in a match: small numbers with scales become the weights that they stand for."""

from __future__ import annotations

from anyrank.files.listing import Listing
from anyrank.models.dialects.dialect import Case, Dialect, ModelMatch
from anyrank.models.dialects.transformers.dequantise import (
    dequantised,
    unknown_method,
    without_scales,
)
from anyrank.models.dialects.transformers.quantised import is_wide

SHOWN = 10


class QuantisedValues(Dialect):
    """The quantised tensors of a source."""

    @staticmethod
    def applies(case: Case) -> bool:
        """Return whether config.json says that a source is quantised, or it has 8-bit numbers."""
        return any(
            source.quantisation or any(t.dtype.itemsize == 1 for t in source.tensors.values())
            for source in (case.source, *case.parts.values())
        )

    def values(self, listing: Listing) -> Listing:
        """The source with float32 tensors in place of quantised ones, where weights are wanted.

        A live source has the values with which its model computes.
        """
        if self.case.is_live:
            return listing
        return dequantised(listing, self.case.dtypes, self.case.rename)

    def problems(self, match: ModelMatch) -> list[str]:
        """Report small numbers that would be taken for weights."""
        tensors, rename = match.tensors, self.case.rename
        wide = [stored for i, stored in match.wanted if is_wide(tensors[i].dtype)]
        unknown = unknown_method(match.listing)
        has_others = bool(match.missing or match.unexpected)
        if unknown and (has_others or any(not is_wide(stored.dtype) for stored in wide)):
            return [unknown]
        places = {
            (chunk.file, chunk.offset) for _, stored in match.wanted for chunk in stored.chunks
        }
        used = {
            stored.name
            for stored in match.listing.tensors.values()
            if any((chunk.file, chunk.offset) in places for chunk in stored.chunks)
        }
        # rename= is written for whole keys, including the table that a tensor was in.
        keys = {stored.name: key for key, stored in match.listing.tensors.items()}
        problems = without_scales(
            match.listing,
            wide,
            lambda name: name not in used and rename(keys.get(name, name)) != "",
        )
        return problems[:SHOWN]
