"""Non-persistent buffers on meta: no file holds them, so they come from another rank or a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from anyrank.errors import LoadError
from anyrank.model.initialise import Initialiser
from anyrank.model.replace import Replacement
from anyrank.model.share import allocate
from anyrank.model.tensors import ModelTensor
from anyrank.world.ranks import Ranks


def rebuilt_values(
    targets: list[ModelTensor],
    ranks: Ranks,
    initialiser: Initialiser,
    device: torch.device,
    givers: Sequence[ModelTensor] = (),
) -> tuple[dict[str, str], list[Replacement]]:
    """Values for each non-persistent buffer on meta, still to be put in place. All ranks.

    They come from the first rank that has the buffer, else from the module's rule.

    Args:
        targets: all tensors of the model.
        ranks, initialiser: of the call.
        device: where plain buffers go.
        givers: tensors of another model, whose buffers of the same names count as well.

    Returns:
        Name -> where its values came from, the union over the ranks; and this rank's buffers.

    Raises:
        LoadError: a buffer that neither gives; names each of them.
    """
    wanted = {t.name: t for t in targets if t.kind == "derived" and t.is_meta}
    real = {t.name: t for t in (*givers, *targets) if t.kind == "derived" and not t.is_meta}
    known = {name: t.shape for name, t in real.items() if t.layout is None}
    answers = ranks.gather((sorted(wanted), known), "looking for buffers")
    asked = sorted({name for names, _ in answers for name in names})
    if not asked:
        return {}, []
    first: dict[str, int] = {}  # buffer -> the first rank that has it
    for rank, (_, shapes) in zip(ranks.ranks, answers, strict=True):
        first |= {name: rank for name in asked if name in shapes and name not in first}
    values: dict[str, torch.Tensor] = {}
    for giver in sorted(set(first.values())):
        names = [name for name in asked if first.get(name) == giver]
        values |= ranks.run_on_one("sending buffers", partial(_copy_to_cpu, real, names), giver)

    def fill() -> tuple[list[Replacement], tuple[dict[str, str], list[str]]]:
        """The buffers of this rank; where each came from, and those that nothing gives."""
        replacements: list[Replacement] = []
        sources: dict[str, str] = {}
        for name, target in wanted.items():
            local = allocate(target, device)
            value = values.get(name) if target.layout is None else None
            if value is not None and value.shape == local.shape:
                local.copy_(value)
                source = f"rank {first[name]}"
            else:
                source = initialiser.fill(target, local)
            if source is not None:
                replacements.append(Replacement(target, local))
                sources[name] = source
        return replacements, (sources, sorted(wanted.keys() - sources.keys()))

    replacements, answers = ranks.run_and_gather("rebuilding buffers", fill)
    lost = sorted({name for _, names in answers for name in names})
    if lost:
        raise LoadError(
            "non-persistent buffers on meta that no rule of their module rebuilds: "
            f"{', '.join(lost)}"
            "\n  build the model under `with anyrank.meta():`, which keeps buffers real, or give "
            "the module a reset_parameters() that fills them"
        )
    every_source = {name: text for sources, _ in answers for name, text in sources.items()}
    return every_source, replacements


def _copy_to_cpu(
    tensors: Mapping[str, ModelTensor], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    return {name: tensors[name].local().cpu() for name in names}
