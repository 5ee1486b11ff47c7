"""Non-persistent buffers on meta: no file holds them, so they come from another rank or a rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyrank.errors import LoadError
from anyrank.model.allocate import allocate
from anyrank.model.initialise import Initialiser
from anyrank.model.replace import Replacement, replace
from anyrank.model.tensors import ModelTensor
from anyrank.world.ranks import Ranks


def rebuild(
    targets: list[ModelTensor], ranks: Ranks, initialiser: Initialiser, device: torch.device
) -> dict[str, str]:
    """Give each non-persistent buffer on meta its values. All ranks, with all targets of the model.

    They come from the first rank that has the buffer, else from the module's rule.

    Returns:
        Name -> where its values came from; the union over the ranks.

    Raises:
        LoadError: a buffer that neither gives; names each of them.
    """
    sources, replacements = rebuilt_values(targets, ranks, initialiser, device)
    replace(replacements)
    return sources


def rebuilt_values(
    targets: list[ModelTensor],
    ranks: Ranks,
    initialiser: Initialiser,
    device: torch.device,
    givers: Sequence[ModelTensor] = (),
) -> tuple[dict[str, str], list[Replacement]]:
    """As `rebuild`, and the buffers are still to be put in place.

    Args:
        givers: tensors of another model, whose buffers of the same names count as well.
    """
    derived = {target.name: target for target in targets if target.kind == "derived"}
    wanted = {name: target for name, target in derived.items() if target.is_meta}
    asked = sorted(set().union(*ranks.gather(sorted(wanted), "looking for buffers")))
    if not asked:
        return {}, []
    known = {t.name: t for t in (*givers, *targets) if t.kind == "derived" and not t.is_meta}
    real = [name for name in asked if name in known]
    shapes = ranks.together(
        "looking for real buffers", lambda: {n: tuple(known[n].local().shape) for n in real}
    )
    giver_of: dict[tuple[str, tuple[int, ...]], int] = {}  # the first rank that holds a buffer
    for rank, theirs in zip(ranks.ranks, shapes, strict=True):
        for key in theirs.items():
            giver_of.setdefault(key, rank)
    given = [n for n, shape in shapes[ranks.index].items() if giver_of[n, shape] == ranks.rank]
    offered = ranks.together(
        "offering buffers", lambda: {name: known[name].local().cpu() for name in given}
    )

    def fill() -> tuple[list[Replacement], tuple[dict[str, str], list[str]]]:
        """The buffers of this rank; where each came from, and those that nothing gives."""
        made: list[Replacement] = []
        sources: dict[str, str] = {}
        for name, target in wanted.items():
            local = allocate(target, device)
            giver = giver_of.get((name, tuple(local.shape)))
            if giver is None:
                source = initialiser.fill(target, local)
            else:
                local.copy_(offered[ranks.ranks.index(giver)][name])
                source = f"rank {giver}"
            if source is not None:
                made.append(Replacement(target, local))
                sources[name] = source
        return made, (sources, sorted(wanted.keys() - sources.keys()))

    made, every = ranks.own_and_all("rebuilding buffers", fill)
    lost = sorted({name for _, names in every for name in names})
    if lost:
        raise LoadError(
            "non-persistent buffers on meta that no rule of their module rebuilds: "
            f"{', '.join(lost)}"
            "\n  build the model under `with anyrank.meta():`, which keeps buffers real, or give "
            "the module a reset_parameters() that fills them"
        )
    return {name: source for sources, _ in every for name, source in sources.items()}, made
