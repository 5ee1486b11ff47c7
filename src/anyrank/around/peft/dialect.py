"""PEFT's adapters in a match: judged by what fills the base under them."""

from __future__ import annotations

from anyrank.around.peft.adapters import BASE_FIRST, merged_layers, unknown_adapters
from anyrank.model.dialects import Dialect, ModelMatch
from anyrank.wording import listed


class Adapters(Dialect):
    """The adapters of a model that is filled."""

    def problems(self, match: ModelMatch) -> list[str]:
        """Adapters that are in the base, or that PEFT may compute from it."""
        lines: list[str] = []
        merged = merged_layers(match.tensors[index] for index, _ in match.filled)
        if merged:
            title = "adapters are merged into these layers: call unmerge_adapter() first"
            lines.append(listed(title, merged))
        unknown = unknown_adapters(match.tensors, match.stored, match.initialise, match.keep)
        if unknown:
            title = (
                "not in the source, and no plain LoRA: PEFT may compute these from the base weights"
            )
            lines.append(listed(title, unknown) + f"\n  to go on: {BASE_FIRST}")
        return lines


DIALECT = Adapters
