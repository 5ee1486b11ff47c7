"""What several ranks hold alike, compared by digest before a save writes anything.

A save takes each element from one rank. Where replicas differ there is no such thing as the run's
value: for what is trained that is an error, for anything else the first rank's is saved.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anyrank.errors import CheckpointError
from anyrank.state.digests import start_digests
from anyrank.state.part_types import SHOWN, Saved
from anyrank.tensors.sharded_tensor import Coordinates, replicas
from anyrank.wording import first_few
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.state")

EVERY = 10  # saves: one compares everything, each of the others a part

Key = tuple[str, tuple[int, ...]]  # a tensor's name, and the ranks that hold the same part of it


@dataclass
class History:
    """What the saves of a state in this process have compared.

    Attributes:
        saves: that compared without an error; 0 compares everything.
        differed: parts that were not alike at the last save, and are compared whole at the next.
    """

    saves: int = 0
    differed: set[str] = field(default_factory=set[str])


@dataclass(frozen=True)
class Replica:
    """This rank's share of a tensor, which other ranks hold as well.

    Attributes:
        part, name: the part of the state, and the tensor's name in a checkpoint.
        local: the share.
        members: global ranks that hold the same share.
        strict: whether a difference is an error.
        steady: whether nothing but the optimizer's step changes it.
    """

    part: str
    name: str
    local: torch.Tensor
    members: tuple[int, ...]
    strict: bool
    steady: bool

    @property
    def key(self) -> Key:
        return self.name, self.members


class Replicas:
    """The replicas that one save compares."""

    def __init__(self, replicas: Sequence[Replica], history: History) -> None:
        self.replicas = replicas
        self.history = history
        self.digests: dict[Key, int] = {}
        devices = {replica.local.device for replica in replicas if not replica.local.is_cpu}
        # What the training has asked of each device up to now: another thread waits for it.
        self.written = {d: torch.accelerator.current_stream(d).record_event() for d in devices}

    def start(self, ranks: Ranks, steady: bool = True) -> Callable[[], None]:
        """Begin to digest this rank's replicas: those that any code may change, or all.

        Returns:
            What waits for the devices; the values may change before it is called.
        """
        for device, event in self.written.items():
            torch.accelerator.current_stream(device).wait_event(event)
        left = [replica for replica in self.replicas if replica.key not in self.digests]
        now = [replica for replica in left if steady or not replica.steady]
        found = start_digests([(replica.name, replica.local) for replica in now], ranks.check)

        def finish() -> None:
            self.digests |= {
                replica.key: digest for replica, digest in zip(now, found(), strict=True)
            }

        return finish

    def compare(self, ranks: Ranks) -> list[str]:
        """Names of tensors that differ and may; the first rank's are saved. All ranks.

        Raises:
            CheckpointError: a tensor of the model or an optimizer differs; names it and the ranks.
        """

        def here() -> dict[tuple[int, ...], str]:
            self.start(ranks)()
            return _by_members(self.digests)

        answers = dict(
            zip(ranks.ranks, ranks.together("comparing the replicas", here), strict=True)
        )
        alike = [
            len({answers[rank].get(m) for rank in m}) == 1
            for answer in answers.values()
            for m in answer
        ]
        if all(alike):
            self.history.saves += 1
            self.history.differed.clear()
            return []
        groups = self._differing(ranks)
        wrong = {name: held for name, (_, strict, held) in groups.items() if strict}
        if wrong:
            self.history.saves = 0  # the next save compares everything
            raise CheckpointError(_in_words(wrong))
        self.history.saves += 1
        self.history.differed = {part for part, _, _ in groups.values()}
        names = sorted(groups)
        if ranks.index == 0:
            log.warning(
                "%d tensors differ between the ranks; the first rank's are saved: %s",
                len(names),
                ", ".join(names[:SHOWN]),
            )
        return names

    def _differing(self, ranks: Ranks) -> dict[str, tuple[str, bool, list[list[int]]]]:
        """Name -> part, whether it is an error, and the ranks by value. All ranks."""
        mine = {
            replica.key: (replica.part, replica.strict, self.digests[replica.key])
            for replica in self.replicas
        }
        seen: dict[Key, dict[int, list[int]]] = {}
        kinds: dict[str, tuple[str, bool]] = {}
        for rank, table in zip(ranks.ranks, ranks.gather(mine), strict=True):
            for key, (part, strict, digest) in table.items():
                seen.setdefault(key, {}).setdefault(digest, []).append(rank)
                kinds[key[0]] = (part, strict)
        return {
            name: (*kinds[name], list(held.values()))
            for (name, _), held in seen.items()
            if len(held) > 1
        }


def choose(
    parts: Mapping[str, Saved],
    coordinates: Mapping[int, Coordinates],
    rank: int,
    unsynced: Container[str],
    history: History,
) -> list[Replica]:
    """What this save compares, as this rank holds it: the same tensors on all ranks.

    Args:
        parts: of the state.
        coordinates: of every rank, by global rank.
        rank: this one.
        unsynced: names of tensors that are compared elsewhere.
        history: equal on all ranks.
    """
    found: list[Replica] = []
    whole = history.saves % EVERY == 0
    named = [(part, saved, held) for part, saved in parts.items() for held in saved.tensors]
    for index, (part, saved, held) in enumerate(named):
        turn = whole or part in history.differed or (index + history.saves) % (EVERY - 1) == 0
        if held.name in unsynced or not turn:
            continue
        for members in replicas(index, held, coordinates).values():
            if len(members) > 1 and rank in members:
                steady = held.name in saved.steady
                found.append(Replica(part, held.name, held.local(), members, saved.strict, steady))
    return found


def _by_members(digests: Mapping[Key, int]) -> dict[tuple[int, ...], str]:
    """One digest of everything that the same ranks hold."""
    tables: dict[tuple[int, ...], Any] = {}
    for (_, members), digest in digests.items():
        hashed = tables.setdefault(members, hashlib.blake2b(digest_size=16))
        hashed.update(digest.to_bytes(9, "little", signed=True))
    return {members: hashed.hexdigest() for members, hashed in tables.items()}


def _in_words(wrong: Mapping[str, list[list[int]]]) -> str:
    found = [
        f"{name}: " + " unlike ".join(f"ranks {held}" for held in groups)
        for name, groups in wrong.items()
    ]
    lines = [
        "nothing was saved, as ranks hold different values of what they should hold alike:",
        *(f"  {line}" for line in first_few(found, SHOWN)),
        "the replicas have diverged (a forward around the wrapper, an update on one rank alone): "
        "make them alike, or resume the last step",
    ]
    return "\n".join(lines)
