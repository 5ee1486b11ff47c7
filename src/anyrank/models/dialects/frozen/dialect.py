"""Frozen parts in a match, which are filled from their own sources, or only compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.models.dialects.dialect import (
    Case,
    Dialect,
    ModelMatch,
    dialects_of,
    dtypes_of,
    with_names,
    with_values,
)
from anyrank.models.frozen_parts import frozen_info
from anyrank.models.options import LoadOptions
from anyrank.models.tensors import find_modules, in_state_dict, tensors_of
from anyrank.sources.readers.joining import join
from anyrank.sources.tables.choice import weights_for
from anyrank.tensors.names import match_keys
from anyrank.wording import listed


class FrozenParts(Dialect):
    """The frozen parts of the model to fill."""

    @staticmethod
    def applies(case: Case) -> bool:
        """Return whether the model has frozen parts."""
        return any(owner.frozen is not None for owner in case.modules)

    def complete(self, match: ModelMatch) -> ModelMatch:
        """Fill frozen parts from their own sources; compare those that the source contains.

        A live source contains them.
        """
        owners = reversed(self.case.modules) if not self.case.is_live else ()
        for part, name in {owner.module: owner.raw for owner in owners}.items():
            match = self._with_source(match, part, name)
        # An unsharded, real part is never written to; its values are compared with the stored ones.
        pinned = {i: t for i, t in match.stored.items() if match.tensors[i].is_pinned}
        stored = {i: t for i, t in match.stored.items() if i not in pinned}
        return replace(match, stored=stored, compared=match.compared | pinned)

    def _with_source(self, match: ModelMatch, part: nn.Module, name: str) -> ModelMatch:
        """Add a part's own source to the match, for the tensors that need it.

        Raises:
            LoadError: the part's source lacks tensors of the part.
        """
        info = frozen_info(part)
        if info is None or info.source is None:
            return match
        tensors = match.tensors
        in_part = [i for i, t in enumerate(tensors) if t.frozen is part and t.kind != "derived"]
        indices = [i for i in in_part if i not in match.stored or tensors[i].is_meta]
        if not indices:
            return match
        source, keys = _matched(part, self.case.parts[info.source], self.case.classes)
        lacking = [tensors[i].name for i in indices if id(tensors[i].tensor) not in keys]
        if lacking:
            title = f"{name or 'the model'}: is frozen with source {info.source}, which does not"
            raise LoadError(
                listed(f"{title} contain", lacking)
                + "\n  Fix: pass the file that contains them as source= of freeze()"
            )
        prefix = f"{name}/"  # no key of the source can have this prefix
        renamed = {prefix + key: tensor for key, tensor in source.tensors.items()}
        listing = join(match.listing.format, [match.listing, source.with_tensors(renamed)])
        stored = {
            index: listing.tensors[prefix + keys[id(tensors[index].tensor)]] for index in indices
        }
        return replace(
            match,
            listing=listing,
            stored=match.stored | stored,
            compared=match.compared | {i: t for i, t in match.stored.items() if i in stored},
            frozen=match.frozen | {name: str(info.source)},
        )


def _matched(
    part: nn.Module, source: Listing, classes: Sequence[type[Dialect]]
) -> tuple[Listing, Mapping[int, str]]:
    """Return the weights in a part's own source, and the key of each tensor, by identity.

    They are chosen and named as `load` of the part itself would do.
    """
    modules = find_modules(part)
    tensors = tensors_of(modules)
    wanted = in_state_dict(tensors)
    weights = weights_for({name for t in wanted for name in t.flat_names()}, source, None)
    case = Case(modules, tensors, weights, LoadOptions(), classes=classes)
    listing = with_values(weights, classes, dtypes_of(tensors))
    listing, rename = with_names(listing, case.rename, dialects_of(case))
    keys = match_keys([t.all_names() for t in wanted], listing.tensors, rename).keys
    return listing, {id(wanted[n].tensor): key for n, key in keys.items()}
