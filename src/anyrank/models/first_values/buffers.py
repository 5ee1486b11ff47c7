"""Tensors to which no rule gives initial values; and non-persistent buffers on meta, which no file
has, so that a rule of their module must fill them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.models.allocation import allocate, default_device, device_for
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.models.first_values.initialize import Initializer, no_rule_for
from anyrank.models.replace import Replacement
from anyrank.models.tensors import ModelTensor
from anyrank.world.ranks import Ranks


def rebuilt_values(
    targets: Sequence[ModelTensor], ranks: Ranks, initializer: Initializer, device: torch.device
) -> tuple[dict[str, str], list[Replacement]]:
    """Compute values for each non-persistent buffer on meta. Collective.

    Args:
        targets: all tensors of the model.
        ranks, initializer: the ranks and the initializer of the call.
        device: the device for plain buffers.

    Returns:
        Name -> the rule that computed its values, merged over the ranks; and the replacements of
        this rank's buffers, which are not in place yet.

    Raises:
        LoadError: no rule fills some buffers; the error names each of them.
    """

    def fill() -> tuple[list[Replacement], tuple[dict[str, str], set[str]]]:
        """Return this rank's buffers, the rule of each, and the names of buffers without a rule."""
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
    """Return the error texts for tensors of a match that need initial values but have no rule.

    The rules run here only for this answer, one whole tensor at a time, because a load that notices
    it later has already overwritten weights.

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
        "non-persistent buffers on meta that no rule of their module fills: "
        f"{', '.join(sorted(names))}"
        "\n  Fix: build the model under `with anyrank.meta():`, which keeps buffers real, or add "
        "a reset_parameters() that fills them to the module"
    )
