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
from anyrank.state.digests import start_digests
from anyrank.state.part_types import SHOWN, Saved
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
    parts: Mapping[str, Saved], coordinates: Mapping[int, Coordinates], turn: int, ranks: Ranks
) -> list[str]:
    """Names of tensors that differ and may; the first rank's are saved. All ranks.

    Args:
        parts: of the state.
        coordinates: of every rank, by global rank.
        turn: how many saves were before, equal on all ranks.
        ranks: that save together.

    Raises:
        CheckpointError: a tensor of the model or an optimizer differs; names it and the ranks.
    """
    differing = _differing(_replicas(parts, coordinates, turn, ranks.rank), ranks)
    if not differing:
        return []
    may_differ = {name for saved in parts.values() for name in saved.may_differ}
    wrong = {name: held for name, held in differing.items() if name not in may_differ}
    if wrong:
        raise CheckpointError(_in_words("nothing was saved, as", wrong, parts))
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

    def here() -> tuple[dict[str, Saved], tuple[int, Coordinates]]:
        parts = state.parts.save_tensors(ranks.index)
        tensors = [held for saved in parts.values() for held in saved.tensors]
        names = "\n".join(held.name for held in tensors)
        return parts, (zlib.crc32(names.encode()), coordinates_of(tensors))

    parts, every = ranks.run_and_gather("looking at the replicas", here)
    if len({names for names, _ in every}) > 1:
        raise CheckpointError(
            f"step {state.step}: the ranks hold tensors of different names: build the model and "
            "the optimizer alike on all ranks; save() says which differ"
        )
    coordinates = {r: one for r, (_, one) in zip(ranks.ranks, every, strict=True)}
    may_differ = {name for saved in parts.values() for name in saved.may_differ}
    held = _replicas(parts, coordinates, None, ranks.rank)
    differing = _differing([one for one in held if one.name not in may_differ], ranks)
    if differing:
        raise CheckpointError(_in_words(f"step {state.step}:", differing, parts))


def _differing(mine: Sequence[_Replica], ranks: Ranks) -> dict[str, list[list[int]]]:
    """Name of each tensor that differs -> the ranks that are alike. All ranks."""

    def here() -> tuple[list[int], dict[Members, str]]:
        digests = start_digests([(one.name, one.values) for one in mine], ranks.check)()
        return digests, _by_members(mine, digests)

    digests, answers = ranks.run_and_gather("comparing the replicas", here)
    by_rank = dict(zip(ranks.ranks, answers, strict=True))
    if all(
        len({by_rank[rank].get(members) for rank in members}) == 1
        for answer in answers
        for members in answer
    ):
        return {}
    table = {(one.name, one.members): digest for one, digest in zip(mine, digests, strict=True)}
    found: dict[tuple[str, Members], dict[int, list[int]]] = {}
    for rank, other in zip(ranks.ranks, ranks.gather(table), strict=True):
        for key, digest in other.items():
            found.setdefault(key, {}).setdefault(digest, []).append(rank)
    return {name: [*held.values()] for (name, _), held in found.items() if len(held) > 1}


def _replicas(
    parts: Mapping[str, Saved], coordinates: Mapping[int, Coordinates], turn: int | None, rank: int
) -> list[_Replica]:
    """What is compared of the tensors that this rank holds with others."""
    found: list[_Replica] = []
    tensors = [held for saved in parts.values() for held in saved.tensors]
    for index, held in enumerate(tensors):
        for members in replicas(index, held, coordinates).values():
            if len(members) > 1 and rank in members:
                values = held.local() if turn is None else _ninth(held.local(), turn)
                found.append(_Replica(held.name, members, values))
    return found


def _ninth(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Every element of a small tensor, of others the ninth whose turn it is."""
    number = turn % TURNS
    if tensor.numel() < TURNS:
        return tensor
    low, high = (tensor.numel() * n // TURNS for n in (number, number + 1))
    return tensor.reshape(-1)[low:high]


def _by_members(mine: Sequence[_Replica], digests: Sequence[int]) -> dict[Members, str]:
    """One digest of everything that the same ranks hold."""
    tables: dict[Members, Any] = {}
    for one, digest in zip(mine, digests, strict=True):
        hashed = tables.setdefault(one.members, hashlib.blake2b(digest_size=16))
        hashed.update(digest.to_bytes(9, "little", signed=True))
    return {members: hashed.hexdigest() for members, hashed in tables.items()}


def _in_words(head: str, wrong: Mapping[str, list[list[int]]], parts: Mapping[str, Saved]) -> str:
    """What differs, and what has happened: replicas have diverged, or an optimizer is sharded."""
    found = [
        f"{name}: " + " unlike ".join(f"ranks {held}" for held in groups)
        for name, groups in wrong.items()
    ]
    optimizers = [
        part
        for part, saved in parts.items()
        if saved.record["kind"] == "optimizer"
        and wrong.keys() & {held.name for held in saved.tensors}
    ]
    of_optimizers = {held.name for part in optimizers for held in parts[part].tensors}
    each_its_own = all(len(held) == 1 for groups in wrong.values() for held in groups)
    if each_its_own and wrong.keys() <= of_optimizers:
        reason = (
            f"the weights agree, so {optimizers[0]} is sharded: each rank keeps the state of its "
            "own share in plain tensors. Hold them as DTensors, which say what each rank has, or "
            "give the optimizer a state_dict() and load_state_dict() of its own; if it is not "
            "sharded, its ranks have diverged: resume the last step"
        )
    else:
        reason = (
            "the replicas have diverged (a forward around the wrapper, an update on one rank "
            "alone): make them alike, or resume the last step"
        )
    lines = [
        f"{head} ranks hold different values of what they should hold alike:",
        *(f"  {line}" for line in first_few(found, SHOWN)),
        reason,
    ]
    return "\n".join(lines)
