"""Which tensors get no first values from any rule; and non-persistent buffers on meta: no file
holds them, so a rule of their module fills them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.models.first_values.initialize import Initializer, no_rule_for
from anyrank.models.replace import Replacement
from anyrank.models.share import allocate, default_device, device_for
from anyrank.models.tensors import ModelTensor
from anyrank.world.ranks import Ranks


def rebuilt_values(
    targets: Sequence[ModelTensor], ranks: Ranks, initializer: Initializer, device: torch.device
) -> tuple[dict[str, str], list[Replacement]]:
    """Compute values for each non-persistent buffer on meta, still to be put in place. All ranks.

    Args:
        targets: all tensors of the model.
        ranks, initializer: the call's ranks and initializer.
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
            if not _needs_rebuilding(target):
                continue
            local = allocate(target, device)
            rule = initializer.fill(target, local)
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
        raise LoadError(_not_rebuilt(lost))
    return rules, replacements


def without_rule(model: nn.Module, match: ModelMatch) -> list[str]:
    """Report tensors of a match that need first values, and that no rule writes.

    The rules run here for nothing but this answer, one whole tensor at a time: a load that learns
    it later has overwritten weights.

    Raises:
        LoadError: as for `Initializer.fill`.
    """
    wanted = [match.tensors[index] for index in match.initialize]
    rebuilt = [target for target in match.tensors if _needs_rebuilding(target)]
    if not wanted and not rebuilt:
        return []
    initializer, device = Initializer(model, seed=0), default_device(match.tensors)

    def lacking(targets: Iterable[ModelTensor]) -> list[str]:
        return [t.name for t in targets if not initializer.values(t, device_for(t, device))[0]]

    unwritten, lost = lacking(wanted), lacking(rebuilt)
    problems = [no_rule_for(unwritten)] if unwritten else []
    return problems + ([_not_rebuilt(lost)] if lost else [])


def _needs_rebuilding(target: ModelTensor) -> bool:
    return target.kind == "derived" and target.is_meta


def _not_rebuilt(names: Iterable[str]) -> str:
    return (
        "non-persistent buffers on meta that no rule of their module rebuilds: "
        f"{', '.join(sorted(names))}"
        "\n  build the model under `with anyrank.meta():`, which keeps buffers real, or give "
        "the module a reset_parameters() that fills them"
    )
