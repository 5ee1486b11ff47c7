"""Non-persistent buffers on meta: no file holds them, so a rule of their module fills them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyrank.errors import LoadError
from anyrank.models.first_values.initialise import Initialiser
from anyrank.models.replace import Replacement
from anyrank.models.share import allocate
from anyrank.models.tensors import ModelTensor
from anyrank.world.ranks import Ranks


def rebuilt_values(
    targets: Sequence[ModelTensor], ranks: Ranks, initialiser: Initialiser, device: torch.device
) -> tuple[dict[str, str], list[Replacement]]:
    """Compute values for each non-persistent buffer on meta, still to be put in place. All ranks.

    Args:
        targets: all tensors of the model.
        ranks, initialiser: the call's ranks and initialiser.
        device: where plain buffers go.

    Returns:
        Name -> the rule that gave its values, merged over the ranks; and this rank's buffers.

    Raises:
        LoadError: no rule fills some buffers; names each of them.
    """

    def fill() -> tuple[list[Replacement], tuple[dict[str, str], set[str]]]:
        """The buffers of this rank; the rule of each, and those that none fills."""
        replacements: list[Replacement] = []
        rules: dict[str, str] = {}
        lost = set[str]()
        for target in targets:
            if target.kind != "derived" or not target.is_meta:
                continue
            local = allocate(target, device)
            rule = initialiser.fill(target, local)
            if rule is None:
                lost.add(target.name)
                continue
            rules[target.name] = rule
            replacements.append(Replacement(target, local))
        return replacements, (rules, lost)

    replacements, (rules, lost) = ranks.run_and_reduce(
        "rebuilding buffers",
        fill,
        lambda some, others: (some[0] | others[0], some[1] | others[1]),
    )
    if lost:
        raise LoadError(
            "non-persistent buffers on meta that no rule of their module rebuilds: "
            f"{', '.join(sorted(lost))}"
            "\n  build the model under `with anyrank.meta():`, which keeps buffers real, or give "
            "the module a reset_parameters() that fills them"
        )
    return rules, replacements
