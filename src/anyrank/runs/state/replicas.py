"""What several ranks hold alike, compared by digest before a save writes anything.

A save takes each element from one rank. Where replicas differ there is no such thing as the run's
value: for what is trained that is an error, for anything else the first rank's is saved. Each save
compares a ninth of every tensor, in turns, so that nine saves have compared all; a run may ask for
more between its saves, of the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch

from anyrank.errors import CheckpointError
from anyrank.models.alike import differing_replicas
from anyrank.models.digests import digests_of
from anyrank.runs.state.part_types import SHOWN, PartState, shared_tensors
from anyrank.tensors.sharded_tensor import Coordinates, Members, ShardedTensor, shared
from anyrank.world.alike import Values
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.state")

TURNS = 9  # saves that compare all of every tensor


def compare_replicas(
    parts: Mapping[str, PartState],
    coordinates: Mapping[int, Coordinates],
    turn: int,
    step: int,
    ranks: Ranks,
) -> list[str]:
    """Names of tensors that differ and may; the first rank's are saved. All ranks.

    Args:
        parts: of the state.
        coordinates: of every rank, by global rank.
        turn: how many saves were before, equal on all ranks.
        step: that is saved, for the error.
        ranks: that save together.

    Raises:
        CheckpointError: a tensor of the model or an optimizer differs; names it and the ranks.
    """
    differing = differing_tensors(shared(shared_tensors(parts), coordinates), turn, ranks)
    if not differing:
        return []
    may_differ = {name for saved in parts.values() for name in saved.may_differ}
    wrong = {name: values for name, values in differing.items() if name not in may_differ}
    if wrong:
        from anyrank.runs.state.diverged_replicas import describe  # a door: see test_house

        others = sorted(differing.keys() - wrong.keys())
        raise CheckpointError(
            describe(f"step {step}: nothing was saved, as", wrong, parts, others)
            + "\na ninth of each tensor was compared, so the rest may differ on other ranks: "
            "Checkpoints(replicas_every=1) compares all, and names the first step"
        )
    if ranks.index == 0:
        log.warning(
            "%d tensors differ between the ranks; the first rank's are saved: %s",
            len(differing),
            ", ".join(sorted(differing)[:SHOWN]),
        )
    return sorted(differing)


def differing_tensors(
    tensors: Iterable[tuple[ShardedTensor, Members]], turn: int | None, ranks: Ranks
) -> dict[str, Values]:
    """Those that differ, by name; of `turn` a ninth is compared, without it all. All ranks."""

    def digest_all(own_tensors: Iterable[ShardedTensor]) -> list[str]:
        return digests_of((t.name, _ninth(t.local(), turn)) for t in own_tensors)

    return differing_replicas(tensors, ranks, digest_all)


def _ninth(tensor: torch.Tensor, turn: int | None) -> torch.Tensor:
    """Every element of a small tensor, of others the ninth whose turn it is; without a turn all."""
    if turn is None or tensor.numel() < TURNS:
        return tensor
    number = turn % TURNS
    low, high = (tensor.numel() * n // TURNS for n in (number, number + 1))
    return tensor.reshape(-1)[low:high]
