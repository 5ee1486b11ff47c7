"""`layout=` in a match: the shape of the whole becomes known with the source."""

from __future__ import annotations

from anyrank.models.dialects.dialect import Case, Dialect, ModelMatch
from anyrank.models.dialects.layouts.given import cut_as_source


class GivenLayouts(Dialect):
    """The tensors that are this rank's part of a whole."""

    @staticmethod
    def applies(case: Case) -> bool:
        """Return whether the caller gave `layout=`."""
        return case.options.layout is not None

    def complete(self, match: ModelMatch) -> ModelMatch:
        """Give each part the shape of the source's whole, if torch would cut it so.

        Both ends of a sync are parts already.
        """
        for index, stored in match.wanted if not self.case.is_live else ():
            cut_as_source(match.tensors[index], stored.shape)
        return match
