"""Random streams in a checkpoint: exact on the same ranks, derived where the ranks changed.

A stream continues exactly on the same ranks, and if it was equal on all ranks. Otherwise new
streams are derived, which no rank has drawn from: one for each data index if the ranks with the
same data had the same stream, otherwise one for each rank. The states are JSON: in the manifest if
all ranks had the same, otherwise in each rank's own file. Nothing here communicates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import torch

from anyrank.tensors.hashing import derive
from anyrank.training.random_state.streams import Stream, TorchStream, ambient, own_accelerator

Scope = Literal["global", "dp", "rank"]  # equal on all ranks, on those with the same data, on none
StreamState = dict[str, Any]  # the `algorithm` of a stream and its `state`, as JSON


@dataclass(frozen=True)
class RankCoords:
    """The position of a rank.

    Attributes:
        rank: global rank.
        world_size: the number of ranks.
        data_index: the data-parallel coordinate; equal on ranks with the same data.
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


class StreamOutcome(NamedTuple):
    """The outcome for a stream at a resume, and its reason.

    "unused" is a derived stream that nobody had drawn from or seeded: not worth a note.
    """

    how: Literal["exact", "derived", "unused", "skipped"]
    reason: str


@dataclass(frozen=True)
class SavedStreams:
    """The random streams of a checkpoint.

    Attributes:
        coords: coordinates of every rank that saved, in the order of ranks.
        scopes: stream -> which of these ranks had the same state.
        shared: stream -> state, if all ranks had the same.
        own_states: stream -> state otherwise, on the rank whose state this rank restores.
        unused: streams that no rank had drawn from or seeded since its state was made.
    """

    coords: list[RankCoords]
    scopes: dict[str, Scope]
    shared: dict[str, StreamState]
    own_states: Mapping[str, StreamState] = field(default_factory=dict[str, StreamState])
    unused: list[str] = field(default_factory=list[str])

    @property
    def states(self) -> dict[str, StreamState]:
        """Stream -> state on the rank that this one continues from."""
        return {**self.shared, **self.own_states}

    def to_json(self) -> dict[str, Any]:
        """Return the manifest's record; `own_states` are in the ranks' own files."""
        return {
            "data": [(coords.data_index, coords.data_size) for coords in self.coords],
            "scopes": self.scopes,
            "states": self.shared,
            "unused": self.unused,
        }


def from_json(entries: Mapping[str, Any], own_states: Mapping[str, StreamState]) -> SavedStreams:
    """The inverse of `SavedStreams.to_json`; raises a built-in exception for other entries."""
    rows = entries["data"]
    coords = [RankCoords(rank, len(rows), *row) for rank, row in enumerate(rows)]
    scopes = dict(entries["scopes"])
    if not {*scopes.values()} <= {"global", "dp", "rank"}:
        raise ValueError(f"scopes: {scopes!r:.80}")
    return SavedStreams(
        coords, scopes, dict(entries["states"]), own_states, list(entries["unused"])
    )


def scopes_of(
    coords: Sequence[RankCoords], digests: Sequence[Mapping[str, str]]
) -> dict[str, Scope]:
    """Stream -> which of several ranks have it alike.

    Args:
        coords: coordinates of each rank.
        digests: for each rank, stream -> digest of its state.
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


def streams_here(generators: Mapping[str, torch.Generator]) -> list[Stream]:
    """The streams of this rank: ambient ones, its own accelerator's, the user's generators."""
    users = [TorchStream(f"generator.{name}", generator) for name, generator in generators.items()]
    return [*ambient(own_accelerator()), *users]


def capture(generators: Mapping[str, torch.Generator]) -> dict[str, StreamState]:
    """Return stream -> its present state on this rank.

    Args:
        generators: name -> the user's own generators.
    """
    return {
        stream.name: {"algorithm": stream.algorithm, "state": stream.to_json(stream.get())}
        for stream in streams_here(generators)
    }


def undrawn(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Streams whose digests have not changed: every process has the ambient ones, used or not."""
    return [name for name in now if before.get(name) == now[name]]


def digest_of(state: StreamState) -> str:
    """A hash that only equal states share."""
    return blake2b(json.dumps(state).encode(), digest_size=16).hexdigest()


def digests_of(states: Mapping[str, StreamState]) -> dict[str, str]:
    """Stream -> digest of its state."""
    return {name: digest_of(state) for name, state in states.items()}


def coordinate(scope: Scope, coords: RankCoords) -> tuple[str, int]:
    """A value that is equal on ranks that share a derived stream, and differs on all others."""
    return ("dp", coords.data_index) if scope == "dp" else ("rank", coords.rank)


def restore(
    saved: SavedStreams,
    coords: RankCoords,
    *,
    seed: int,
    samples: int,
    generators: Mapping[str, torch.Generator],
) -> dict[str, StreamOutcome]:
    """Set this rank's streams, exactly or derived. No collectives.

    Args:
        saved: the streams of all ranks that saved.
        coords: this rank's position now.
        seed: seed of the run.
        samples: committed samples of the run.
        generators: name -> the user's own generators.

    Returns:
        Stream -> outcome. "skipped" are saved streams that this process does not have.
    """
    outcomes: dict[str, StreamOutcome] = {}
    states: list[tuple[Stream, Any]] = []
    for stream in streams_here(generators):
        state, outcome = _choose(stream, saved, coords)
        if outcome.how == "derived":
            where = coordinate(saved.scopes.get(stream.name, "rank"), coords)
            state = derive(seed, stream.name, *where, samples)
            if stream.name in saved.unused:
                outcome = outcome._replace(how="unused")
        states.append((stream, state))
        outcomes[stream.name] = outcome
    for stream, state in states:
        if outcomes[stream.name].how == "exact":
            stream.put(state)
        else:
            stream.seed(state)
    for name in saved.scopes.keys() - outcomes.keys():
        outcomes[name] = StreamOutcome("skipped", "it was saved and is not in use here")
    return outcomes


def derive_all(
    coords: RankCoords,
    *,
    seed: int,
    samples: int,
    generators: Mapping[str, torch.Generator],
    reason: str,
) -> dict[str, StreamOutcome]:
    """Seed all of this rank's streams from the run's seed, each rank its own. No collectives."""
    outcomes: dict[str, StreamOutcome] = {}
    for stream in streams_here(generators):
        stream.seed(derive(seed, stream.name, *coordinate("rank", coords), samples))
        outcomes[stream.name] = StreamOutcome("derived", reason)
    return outcomes


def _choose(stream: Stream, saved: SavedStreams, coords: RankCoords) -> tuple[Any, StreamOutcome]:
    """The state to restore and the reason, or None and why a new one has to be derived."""
    is_known = coords in saved.coords
    states = saved.states
    if stream.name not in states:
        return None, StreamOutcome("derived", "it was not saved")
    if saved.scopes.get(stream.name) == "global":
        return _readable(stream, states[stream.name], "equal on all ranks")
    if is_known:
        return _readable(stream, states[stream.name], "same ranks")
    fewer = coords.rank >= len(saved.coords)
    before = "on fewer ranks" if fewer else str(saved.coords[coords.rank])
    return None, StreamOutcome("derived", f"saved {before}, now {coords}")


def _readable(stream: Stream, saved: StreamState, why: str) -> tuple[Any, StreamOutcome]:
    """A saved state in the stream's own form, exact for the reason given; or why it cannot be."""
    try:
        if (algorithm := saved["algorithm"]) != stream.algorithm:
            reason = f"saved as {algorithm}, now {stream.algorithm}"
            return None, StreamOutcome("derived", reason)
        return stream.from_json(saved["state"]), StreamOutcome("exact", why)
    except (ValueError, TypeError, RuntimeError, OverflowError, LookupError):
        return None, StreamOutcome("derived", "saved by another version, or damaged")
