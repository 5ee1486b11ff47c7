"""`layout=` in a match: what a whole is cut from is known when its source is."""

from __future__ import annotations

from anyrank.models.dialects.dialect import Case, Dialect, ModelMatch
from anyrank.models.dialects.layouts.given import cut_as_source


class GivenLayouts(Dialect):
    """The tensors that are a rank's part of a whole."""

    @staticmethod
    def applies(case: Case) -> bool:
        """Whether the caller gave `layout=`."""
        return case.options.layout is not None

    def complete(self, match: ModelMatch) -> ModelMatch:
        """Give each part the shape of the source's whole, where torch would cut that so.

        Both ends of a sync are parts as they are.
        """
        for index, stored in match.wanted if not self.case.is_live else ():
            cut_as_source(match.tensors[index], stored.shape)
        return match
