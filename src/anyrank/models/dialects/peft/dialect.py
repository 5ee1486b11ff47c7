"""PEFT's adapters in a match, which are checked against their base and their settings."""

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
        return any(owner.in_peft for owner in case.modules)

    def problems(self, match: ModelMatch) -> list[str]:
        """Report adapters that cannot be loaded correctly.

        These are merged into the base, may be computed from it by PEFT, have a different scale than
        in training, or would be added to a different base.
        """
        lines: list[str] = []
        merged = merged_layers(match.tensors[index] for index, _ in match.wanted)
        if merged:
            title = "adapters are merged into these layers; call unmerge_adapter() first"
            lines.append(listed(title, merged))
        unknown = unknown_adapters(match.tensors, match.stored, match.initialize, match.keep)
        if unknown:
            title = (
                "missing from the source, and not plain LoRA, so PEFT may compute these from the "
                "base weights"
            )
            lines.append(listed(title, unknown) + f"\n  Fix: {BASE_FIRST}")
        filled = [(match.tensors[index], stored) for index, stored in match.wanted]
        saved = match.listing.adapters
        from_folder = (t for t, stored in filled if saved.keys() & {c.file for c in stored.chunks})
        if settings := settings_of(filled, saved) or other_scales(from_folder):
            title = "the settings of the model's adapter differ from adapter_config.json"
            way_out = (
                "create the adapter with PeftConfig.from_pretrained(folder); or, if the "
                "difference is intended, load the file with the weights in the folder by its own "
                "path"
            )
            lines.append(listed(title, settings) + f"\n  Fix: {way_out}")
        return lines
