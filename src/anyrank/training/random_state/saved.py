"""Random generators in a checkpoint: exact on the same ranks, derived if the ranks changed.

A generator continues exactly on the same ranks, and if it was the same on every rank. Otherwise new
generators are derived, which no rank has drawn from: one for each data index if the ranks with the
same data had the same generator, otherwise one for each rank. The states are JSON: in the manifest
if they were the same on every rank, otherwise in each rank's own file. Nothing here communicates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import torch

from anyrank.tensors.hashing import derive
from anyrank.training.random_state.generators import (
    ProcessGenerator,
    TorchGenerator,
    ambient,
    own_accelerator,
)

Scope = Literal["global", "dp", "rank"]  # the ranks with the same state: all, by data, or none
GeneratorState = dict[str, Any]  # the `algorithm` of a generator and its `state`, as JSON


@dataclass(frozen=True)
class RankCoords:
    """The position of a rank.

    Attributes:
        rank: global rank.
        world_size: the number of ranks.
        data_index: the data-parallel coordinate; the same on ranks with the same data.
        data_size: the number of data-parallel coordinates.
    """

    rank: int
    world_size: int
    data_index: int
    data_size: int

    def __str__(self) -> str:
        return (
            f"on rank {self.rank} of {self.world_size}, data {self.data_index} of {self.data_size}"
        )


class GeneratorOutcome(NamedTuple):
    """The outcome for a generator at a resume, and its reason.

    "unused" is a derived generator that nobody had drawn from or seeded: not worth a note.
    """

    how: Literal["exact", "derived", "unused", "skipped"]
    reason: str


@dataclass(frozen=True)
class SavedGenerators:
    """The random generators of a checkpoint.

    Attributes:
        coords: coordinates of every rank that saved, in the order of ranks.
        scopes: generator -> which of these ranks had the same state.
        shared: generator -> state, if it was the same on every rank.
        own_states: generator -> state otherwise, on the rank whose state this rank restores.
        unused: generators that no rank had drawn from or seeded since its state was made.
    """

    coords: list[RankCoords]
    scopes: dict[str, Scope]
    shared: dict[str, GeneratorState]
    own_states: Mapping[str, GeneratorState] = field(default_factory=dict[str, GeneratorState])
    unused: list[str] = field(default_factory=list[str])

    @property
    def states(self) -> dict[str, GeneratorState]:
        """Return generator -> state on the rank that this one continues from."""
        return {**self.shared, **self.own_states}

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's record; `own_states` are in the ranks' own files."""
        return {
            "data": [(coords.data_index, coords.data_size) for coords in self.coords],
            "scopes": self.scopes,
            "states": self.shared,
            "unused": self.unused,
        }


def from_json(
    entries: Mapping[str, Any], own_states: Mapping[str, GeneratorState]
) -> SavedGenerators:
    """Read what `SavedGenerators.to_json` returns; raise a built-in exception for anything else."""
    rows = entries["data"]
    coords = [RankCoords(rank, len(rows), *row) for rank, row in enumerate(rows)]
    scopes = dict(entries["scopes"])
    if not {*scopes.values()} <= {"global", "dp", "rank"}:
        raise ValueError(f"scopes: {scopes!r:.80}")
    return SavedGenerators(
        coords, scopes, dict(entries["states"]), own_states, list(entries["unused"])
    )


def scopes_of(
    coords: Sequence[RankCoords], digests: Sequence[Mapping[str, str]]
) -> dict[str, Scope]:
    """Return generator -> which of several ranks had the same state.

    Args:
        coords: coordinates of each rank.
        digests: for each rank, generator -> digest of its state.
    """
    names = dict.fromkeys(name for row in digests for name in row)
    data = [rank.data_index for rank in coords]
    return {name: _scope(data, [row.get(name) for row in digests]) for name in names}


def _scope(data: Sequence[int], states: Sequence[str | None]) -> Scope:
    count = len(states)
    if None in states or count == 1:
        return "rank"
    if len({*states}) == 1:
        return "global"
    by_data = len({*zip(data, states, strict=True)}) == len({*data}) < count
    return "dp" if by_data else "rank"


def generators_here(generators: Mapping[str, torch.Generator]) -> list[ProcessGenerator]:
    """Return the generators of this rank: global ones, its accelerator's, and the user's."""
    users = [
        TorchGenerator(f"generator.{name}", generator) for name, generator in generators.items()
    ]
    return [*ambient(own_accelerator()), *users]


def capture(generators: Mapping[str, torch.Generator]) -> dict[str, GeneratorState]:
    """Return generator -> its current state on this rank.

    Args:
        generators: name -> the user's own generators.
    """
    return {
        generator.name: {
            "algorithm": generator.algorithm,
            "state": generator.to_json(generator.get()),
        }
        for generator in generators_here(generators)
    }


def undrawn(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the generators whose digests have not changed: the global ones may be unused."""
    return [name for name in now if before.get(name) == now[name]]


def _digest_of(state: GeneratorState) -> str:
    """Return a hash that only equal states share."""
    return blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()


def digests_of_generators(states: Mapping[str, GeneratorState]) -> dict[str, str]:
    """Return generator -> digest of its state."""
    return {name: _digest_of(state) for name, state in states.items()}


def coordinate(scope: Scope, coords: RankCoords) -> tuple[str, int]:
    """Return a value that is the same only on ranks that share a derived generator."""
    return ("dp", coords.data_index) if scope == "dp" else ("rank", coords.rank)


def restore(
    saved: SavedGenerators,
    coords: RankCoords,
    *,
    seed: int,
    samples: int,
    generators: Mapping[str, torch.Generator],
) -> dict[str, GeneratorOutcome]:
    """Set this rank's generators, exactly or derived. Does not communicate.

    Args:
        saved: the generators of all ranks that saved.
        coords: this rank's position now.
        seed: seed of the run.
        samples: committed samples of the run.
        generators: name -> the user's own generators.

    Returns:
        Generator -> outcome. "skipped" are saved generators that this process does not have.
    """
    outcomes: dict[str, GeneratorOutcome] = {}
    states: list[tuple[ProcessGenerator, Any]] = []
    for generator in generators_here(generators):
        state, outcome = _choose(generator, saved, coords)
        if outcome.how == "derived":
            where = coordinate(saved.scopes.get(generator.name, "rank"), coords)
            state = derive(seed, generator.name, *where, samples)
            if generator.name in saved.unused:
                outcome = outcome._replace(how="unused")
        states.append((generator, state))
        outcomes[generator.name] = outcome
    for generator, state in states:
        if outcomes[generator.name].how == "exact":
            generator.put(state)
        else:
            generator.seed(state)
    for name in saved.scopes.keys() - outcomes.keys():
        outcomes[name] = GeneratorOutcome("skipped", "it was saved but is not used by this process")
    return outcomes


def derive_all(
    coords: RankCoords,
    *,
    seed: int,
    samples: int,
    generators: Mapping[str, torch.Generator],
    reason: str,
) -> dict[str, GeneratorOutcome]:
    """Seed this rank's generators from the run's seed and the rank. Does not communicate."""
    outcomes: dict[str, GeneratorOutcome] = {}
    for generator in generators_here(generators):
        generator.seed(derive(seed, generator.name, *coordinate("rank", coords), samples))
        outcomes[generator.name] = GeneratorOutcome("derived", reason)
    return outcomes


def _choose(
    generator: ProcessGenerator, saved: SavedGenerators, coords: RankCoords
) -> tuple[Any, GeneratorOutcome]:
    """Return the state to restore and the reason, or None and why a new one must be derived."""
    is_known = coords in saved.coords
    states = saved.states
    if generator.name not in states:
        return None, GeneratorOutcome("derived", "it was not saved")
    if saved.scopes.get(generator.name) == "global":
        return _readable(generator, states[generator.name], "the same on every rank")
    if is_known:
        return _readable(generator, states[generator.name], "same ranks")
    fewer = coords.rank >= len(saved.coords)
    before = "on fewer ranks" if fewer else str(saved.coords[coords.rank])
    return None, GeneratorOutcome("derived", f"saved {before}, now {coords}")


def _readable(
    generator: ProcessGenerator, saved: GeneratorState, why: str
) -> tuple[Any, GeneratorOutcome]:
    """Return a saved state in the generator's own form, with this reason; or None and the
    problem."""
    try:
        if (algorithm := saved["algorithm"]) != generator.algorithm:
            reason = f"saved as {algorithm}, now {generator.algorithm}"
            return None, GeneratorOutcome("derived", reason)
        return generator.from_json(saved["state"]), GeneratorOutcome("exact", why)
    except (ValueError, TypeError, RuntimeError, OverflowError, LookupError):
        return None, GeneratorOutcome("derived", "saved by another version, or corrupt")
