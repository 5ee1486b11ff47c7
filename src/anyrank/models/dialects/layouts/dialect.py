"""`layout=` in a match: the source shows the global shape."""

from __future__ import annotations

from anyrank.models.dialects.dialect import Case, Dialect, ModelMatch
from anyrank.models.dialects.layouts.given import cut_as_source


class GivenLayouts(Dialect):
    """The tensors with a `layout=`."""

    @staticmethod
    def applies(case: Case) -> bool:
        """Return whether the caller passed `layout=`. In a sync, both ends already have their
        shapes.
        """
        return case.options.layout is not None and not case.is_live

    def complete(self, match: ModelMatch) -> ModelMatch:
        """Use the source's shape for each tensor whose part is that of torch's split."""
        for index, stored in match.wanted:
            cut_as_source(match.tensors[index], stored.shape)
        return match
