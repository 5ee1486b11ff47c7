"""PEFT's adapters in a match: judged by what fills the base under them, and by their settings."""

from __future__ import annotations

from anyrank.models.dialects.dialect import Case, Dialect, ModelMatch
from anyrank.models.dialects.peft.adapters import (
    BASE_FIRST,
    merged_layers,
    settings_of,
    unknown_adapters,
)
from anyrank.models.dialects.peft.merging import other_scales
from anyrank.wording import listed


class Adapters(Dialect):
    """The adapters of the model to fill."""

    @staticmethod
    def applies(case: Case) -> bool:
        """Return whether the model has PEFT modules."""
        return any(owner.naming for owner in case.modules)

    def problems(self, match: ModelMatch) -> list[str]:
        """Report adapters that cannot be loaded rightly.

        Adapters that are merged into the base, that PEFT may compute from it, that would add more
        or less than they were trained to, or would be added to another base.
        """
        lines: list[str] = []
        merged = merged_layers(match.tensors[index] for index, _ in match.wanted)
        if merged:
            title = "adapters are merged into these layers: call unmerge_adapter() first"
            lines.append(listed(title, merged))
        unknown = unknown_adapters(match.tensors, match.stored, match.initialize, match.keep)
        if unknown:
            title = (
                "not in the source, and no plain LoRA: PEFT may compute these from the base weights"
            )
            lines.append(listed(title, unknown) + f"\n  to go on: {BASE_FIRST}")
        filled = [(match.tensors[index], stored) for index, stored in match.wanted]
        saved = match.listing.adapters
        from_folder = (t for t, stored in filled if saved.keys() & {c.file for c in stored.chunks})
        if settings := settings_of(filled, saved) or other_scales(from_folder):
            title = "the model's adapter computes otherwise than that of adapter_config.json"
            way_out = (
                "make the adapter with PeftConfig.from_pretrained(folder); or, if another scale is "
                "meant, or the base is what the first values left of it, load the file of weights "
                "in the folder by its own path"
            )
            lines.append(listed(title, settings) + f"\n  to go on: {way_out}")
        return lines
