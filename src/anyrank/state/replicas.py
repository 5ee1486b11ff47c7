"""What several ranks hold alike, compared by digest before a save writes anything.

A save takes each element from one rank. Where replicas differ there is no such thing as the run's
value: for what is trained that is an error, for anything else the first rank's is saved. Each save
compares a ninth of every tensor, in turns, so that nine saves have compared all; a run may ask for
more between its saves, of the whole.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyrank.errors import CheckpointError
from anyrank.state.digests import digests_of
from anyrank.state.part_types import SHOWN, PartState
from anyrank.state.train_state import TrainState
from anyrank.tensors.sharded_tensor import Coordinates, coordinates_of, replicas
from anyrank.wording import first_few
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.state")

TURNS = 9  # saves that compare all of every tensor

Members = tuple[int, ...]  # global ranks that hold the same part of a tensor


@dataclass(frozen=True)
class _Replica:
    """What is compared of a tensor that other ranks hold as well, as it is on this rank."""

    name: str
    members: Members
    values: torch.Tensor


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
    differing = _differing(_replicas(parts, coordinates, turn, ranks.rank), ranks)
    if not differing:
        return []
    may_differ = {name for saved in parts.values() for name in saved.may_differ}
    wrong = {name: groups for name, groups in differing.items() if name not in may_differ}
    if wrong:
        others = sorted(differing.keys() - wrong.keys())
        raise CheckpointError(
            _in_words(f"step {step}: nothing was saved, as", wrong, parts, others)
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


def check_replicas(state: TrainState, ranks: Ranks) -> None:
    """Compare the whole of the model and the optimizers, and save nothing. All ranks.

    Raises:
        CheckpointError: a tensor differs that must not; names it, the ranks and the step.
    """

    def list_own() -> tuple[dict[str, PartState], tuple[int, Coordinates]]:
        parts = state.parts.save_tensors(ranks.index)
        tensors = [sharded for saved in parts.values() for sharded in saved.tensors]
        # Ranks compare by positions in this list, so all of them must have the same one.
        names = "\n".join(sharded.name for sharded in tensors)
        return parts, (zlib.crc32(names.encode()), coordinates_of(tensors))

    parts, answers = ranks.run_and_gather("looking at the replicas", list_own)
    if len({names for names, _ in answers}) > 1:
        raise CheckpointError(
            f"step {state.step}: the ranks hold tensors of different names: build the model and "
            "the optimizer alike on all ranks; save() says which differ"
        )
    coordinates = {r: coords for r, (_, coords) in zip(ranks.ranks, answers, strict=True)}
    may_differ = {name for saved in parts.values() for name in saved.may_differ}
    own_replicas = _replicas(parts, coordinates, None, ranks.rank)
    differing = _differing([r for r in own_replicas if r.name not in may_differ], ranks)
    if differing:  # the same on all ranks, so all of them gather once more
        others = _differing([r for r in own_replicas if r.name in may_differ], ranks)
        raise CheckpointError(_in_words(f"step {state.step}:", differing, parts, sorted(others)))


def _differing(own_replicas: Sequence[_Replica], ranks: Ranks) -> dict[str, list[list[int]]]:
    """Name of each tensor that differs -> the ranks that are alike. All ranks."""

    def digest_own() -> tuple[list[str], dict[Members, str]]:
        digests = digests_of((replica.name, replica.values) for replica in own_replicas)
        return digests, _by_members(own_replicas, digests)

    digests, answers = ranks.run_and_gather("comparing the replicas", digest_own)
    by_rank = dict(zip(ranks.ranks, answers, strict=True))
    # One digest is for all that the same ranks hold: names go around only where one differs.
    if all(
        len({by_rank[rank].get(members) for rank in members}) == 1
        for answer in answers
        for members in answer
    ):
        return {}
    own_digests = {
        (replica.name, replica.members): digest
        for replica, digest in zip(own_replicas, digests, strict=True)
    }
    ranks_by_digest: dict[tuple[str, Members], dict[str, list[int]]] = {}
    for rank, other in zip(ranks.ranks, ranks.gather(own_digests), strict=True):
        for key, digest in other.items():
            ranks_by_digest.setdefault(key, {}).setdefault(digest, []).append(rank)
    return {
        name: [*groups.values()] for (name, _), groups in ranks_by_digest.items() if len(groups) > 1
    }


def _replicas(
    parts: Mapping[str, PartState],
    coordinates: Mapping[int, Coordinates],
    turn: int | None,
    rank: int,
) -> list[_Replica]:
    """What is compared of the tensors that this rank holds with others."""
    own_replicas: list[_Replica] = []
    tensors = [sharded for saved in parts.values() for sharded in saved.tensors]
    for index, sharded in enumerate(tensors):
        for members in replicas(index, sharded, coordinates).values():
            if len(members) > 1 and rank in members:
                values = sharded.local() if turn is None else _ninth(sharded.local(), turn)
                own_replicas.append(_Replica(sharded.name, members, values))
    return own_replicas


def _ninth(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Every element of a small tensor, of others the ninth whose turn it is."""
    number = turn % TURNS
    if tensor.numel() < TURNS:
        return tensor
    low, high = (tensor.numel() * n // TURNS for n in (number, number + 1))
    return tensor.reshape(-1)[low:high]


def _by_members(own_replicas: Sequence[_Replica], digests: Sequence[str]) -> dict[Members, str]:
    """One digest of everything that the same ranks hold."""
    hashes: dict[Members, Any] = {}
    for replica, digest in zip(own_replicas, digests, strict=True):
        hashed = hashes.setdefault(replica.members, hashlib.blake2b(digest_size=16))
        hashed.update(digest.encode())
    return {members: hashed.hexdigest() for members, hashed in hashes.items()}


def _in_words(
    head: str,
    wrong: Mapping[str, list[list[int]]],
    parts: Mapping[str, PartState],
    others: Sequence[str],
) -> str:
    """What differs, and what has happened: replicas have diverged, or an optimizer is sharded.

    Args:
        head: what was not done for it, or at which step.
        wrong: name of each tensor that must not differ -> the ranks that are alike.
        parts: of the state.
        others: names of tensors that differ too, and may.
    """
    texts = [
        f"{name}: " + " unlike ".join(f"ranks {alike}" for alike in groups)
        for name, groups in wrong.items()
    ]
    optimizers = [
        part
        for part, saved in parts.items()
        if saved.record["kind"] == "optimizer"
        and wrong.keys() & {tensor.name for tensor in saved.tensors}
    ]
    of_optimizers = {tensor.name for part in optimizers for tensor in parts[part].tensors}
    each_its_own = all(len(alike) == 1 for groups in wrong.values() for alike in groups)
    if each_its_own and wrong.keys() <= of_optimizers:
        reason = (
            f"the weights agree, so {optimizers[0]} is sharded: each rank keeps the state of its "
            "own share in plain tensors. Hold them as DTensors, which say what each rank has, or "
            "give the optimizer a state_dict() and load_state_dict() of its own; if it is not "
            "sharded, its ranks have diverged: resume the last step"
        )
    else:
        reason = (
            "the replicas have diverged (a forward around the wrapper; parameters that are "
            "unfrozen behind DDP's back, or of a module that microbatches() did not get; an update "
            "on one rank alone, or from a rank's own values: a buffer, its data, its random "
            "numbers): make them alike, or resume the last step; hold parts of a whole as DTensors "
            "(DTensor.from_local)"
        )
        if others:
            names = ", ".join(others[:SHOWN])
            reason += f"\nthese differ too, which they may, unless an update reads them: {names}"
    lines = [
        f"{head} ranks hold different values of what they should hold alike:",
        *(f"  {line}" for line in first_few(texts, SHOWN)),
        reason,
    ]
    return "\n".join(lines)
