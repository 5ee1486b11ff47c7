"""Random streams in a checkpoint: exactly where the ranks are the same, derived where not.

A stream has a scope: "global" ones are equal on all ranks, "dp" ones on the ranks that have the
same data, "rank" ones on no two. On other ranks than it was saved on, a global stream goes on
exactly; for the others new streams are derived, which no rank shares and no rank has drawn from.
Nothing here communicates: the caller gathers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, get_args

import torch

from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.random_state.hashing import derive
from anyrank.random_state.streams import Stream, TorchStream, ambient, own_accelerator

Scope = Literal["global", "dp", "rank"]
MAGIC = b"anyrank streams 1\n"
DIGEST_BYTES = 16
LENGTH_BYTES = 4


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        rank: among all.
        world_size: how many ranks there are.
        data_index: which of the data-parallel coordinates; equal on ranks with the same data.
        data_size: how many coordinates.
    """

    rank: int
    world_size: int
    data_index: int
    data_size: int


class Outcome(NamedTuple):
    """What became of a stream, and why."""

    how: Literal["exact", "derived", "skipped"]
    reason: str


@dataclass(frozen=True)
class Saved:
    """One stream of a blob."""

    algorithm: str
    values: Any
    data: bytes


@dataclass(frozen=True)
class Blob:
    """What `capture` wrote, read again."""

    place: Place
    torch: str
    streams: dict[str, Saved]


def streams_here(generators: Mapping[str, torch.Generator]) -> list[Stream]:
    """The streams of this rank: ambient ones, its own accelerator's, the user's generators."""
    users = [TorchStream(f"generator.{name}", one) for name, one in generators.items()]
    return [*ambient(own_accelerator()), *users]


def capture(place: Place, generators: Mapping[str, torch.Generator]) -> bytes:
    """This rank's streams as some 8 KiB: JSON and raw bytes, no pickle. No collectives.

    Args:
        place: of this rank.
        generators: name -> generators of the user's own.
    """
    rows: list[dict[str, Any]] = []
    raw = b""
    for stream in streams_here(generators):
        values, data = stream.encode(stream.get())
        row = {"name": stream.name, "algorithm": stream.algorithm, "values": values}
        rows.append({**row, "bytes": len(data)})
        raw += data
    table = {"place": astuple(place), "torch": str(torch.__version__), "streams": rows}
    head = json.dumps(table).encode()
    body = MAGIC + len(head).to_bytes(LENGTH_BYTES, "little") + head + raw
    return body + blake2b(body, digest_size=DIGEST_BYTES).digest()


def read_blob(blob: bytes) -> Blob:
    """What `capture` wrote. Runs no code from it.

    Raises:
        CorruptCheckpoint: torn, changed, or never written by `capture`.
    """
    body = blob[:-DIGEST_BYTES]
    if not body.startswith(MAGIC):
        raise corrupt("they are not in anyrank's format")
    if blake2b(body, digest_size=DIGEST_BYTES).digest() != blob[-DIGEST_BYTES:]:
        raise corrupt("their checksum is another one")
    try:
        start = len(MAGIC) + LENGTH_BYTES
        stop = start + int.from_bytes(body[len(MAGIC) : start], "little")
        table = json.loads(body[start:stop])
        place = [int(one) for one in table["place"]]
        streams: dict[str, Saved] = {}
        for row in table["streams"]:
            size = int(row["bytes"])
            if size < 0 or stop + size > len(body):
                raise ValueError("a stream's bytes end outside")
            data = body[stop : stop + size]
            streams[str(row["name"])] = Saved(str(row["algorithm"]), row["values"], data)
            stop += size
        return Blob(Place(*place), str(table["torch"]), streams)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise corrupt(f"their table cannot be read ({error})") from error


def fingerprints(generators: Mapping[str, torch.Generator]) -> dict[str, str]:
    """Stream -> hash of the state that it has on this rank now."""
    return {one.name: fingerprint(*one.encode(one.get())) for one in streams_here(generators)}


def fingerprint(values: Any, data: bytes) -> str:
    """Hash of an encoded state."""
    return blake2b(json.dumps(values).encode() + data, digest_size=16).hexdigest()


def observed_scopes(
    gathered: Sequence[tuple[Place, Mapping[str, str]]], declared: Mapping[str, Scope]
) -> dict[str, Scope]:
    """Stream -> scope, from every rank's place and fingerprints at a save.

    Args:
        gathered: of all ranks.
        declared: stream -> the scope that the user says it has.

    Raises:
        CheckpointError: a stream that is declared equal on ranks where it differs.
        ValueError: a declared scope that is none.
    """
    scopes: dict[str, Scope] = {}
    for name in sorted({name for _, prints in gathered for name in prints}):
        scope = declared.get(name)
        if scope is not None and scope not in get_args(Scope):
            raise ValueError(f"scope of {name} is {scope!r}: give {', '.join(get_args(Scope))}")
        if scope is None:
            scope = "dp" if is_scope(name, "dp", gathered) else "rank"
            scope = "global" if is_scope(name, "global", gathered) else scope
        elif scope != "rank" and (ranks := differing(name, scope, gathered)):
            raise CheckpointError(
                f"random stream {name} is declared {scope} and differs between {told(ranks)}: "
                "seed it equally there, or declare it 'rank'"
            )
        scopes[name] = scope
    return scopes


def is_scope(name: str, scope: Scope, gathered: Sequence[tuple[Place, Mapping[str, str]]]) -> bool:
    """Whether a stream is on all ranks, some have to be equal by the scope, and all these are."""
    shared = len({coordinate(scope, place) for place, _ in gathered}) < len(gathered)
    everywhere = all(name in prints for _, prints in gathered)
    return shared and everywhere and not differing(name, scope, gathered)


def differing(
    name: str, scope: Scope, gathered: Sequence[tuple[Place, Mapping[str, str]]]
) -> tuple[int, int] | None:
    """Two ranks on which a stream differs although its scope says that it does not."""
    first: dict[Any, tuple[int, str]] = {}
    for place, prints in gathered:
        if name in prints:
            here = (place.rank, prints[name])
            there = first.setdefault(coordinate(scope, place), here)
            if there[1] != here[1]:
                return there[0], here[0]
    return None


def coordinate(scope: Scope, place: Place) -> tuple[str, int]:
    """Equal on the ranks that share a stream of this scope, different on all others."""
    number = {"global": 0, "dp": place.data_index, "rank": place.rank}[scope]
    return scope, number


def restore(
    own: bytes | None,
    first: bytes,
    scopes: Mapping[str, Scope],
    place: Place,
    *,
    seed: int,
    samples: int,
    generators: Mapping[str, torch.Generator],
) -> dict[str, Outcome]:
    """Set this rank's streams, exactly or derived. No collectives; all or nothing.

    Args:
        own: the blob of the rank with this rank's number, None where there was none.
        first: the blob of the first rank.
        scopes: as `observed_scopes` had them at the save.
        place: of this rank, now.
        seed: of the run.
        samples: committed samples of the run.
        generators: name -> generators of the user's own.

    Returns:
        Stream -> outcome. "skipped" are saved streams that this process does not have.

    Raises:
        CorruptCheckpoint: a blob that is not what was saved. Nothing has changed then.
    """
    mine, shared = (None if own is None else read_blob(own)), read_blob(first)
    outcomes: dict[str, Outcome] = {}
    states: list[tuple[Stream, Any]] = []
    for stream in streams_here(generators):
        scope = scopes.get(stream.name, "rank")
        blob = (mine or shared) if scope == "global" else mine
        state, outcome = choose(stream, scope, blob, place, stream.name in shared.streams)
        if outcome.how == "derived":
            state = derive(seed, stream.name, *coordinate(scope, place), samples)
        states.append((stream, state))
        outcomes[stream.name] = outcome
    for stream, state in states:
        if outcomes[stream.name].how == "derived":
            stream.seed(state)
        else:
            stream.put(state)
    for name in shared.streams.keys() - outcomes.keys():
        outcomes[name] = Outcome("skipped", "it was saved and is not in use here")
    return outcomes


def choose(
    stream: Stream, scope: Scope, blob: Blob | None, place: Place, is_saved: bool
) -> tuple[Any, Outcome]:
    """The state to put back and why that can be, or None and why a new one has to be derived."""
    saved = None if blob is None else blob.streams.get(stream.name)
    if blob is None and not is_saved:
        return None, Outcome("derived", "it was not saved")
    if scope != "global" and (blob is None or blob.place != place):
        return None, Outcome("derived", f"saved {seat(blob)}, now {rank_coords(place)}")
    if saved is None:
        return None, Outcome("derived", "it was not saved")
    try:
        if saved.algorithm == stream.algorithm:
            length = len(stream.encode(stream.get())[1])
            if len(saved.data) == length:
                where = "equal on all ranks" if scope == "global" else "same ranks"
                return stream.decode(saved.values, saved.data), Outcome("exact", where)
            by = f"{len(saved.data)} bytes by torch {blob.torch}" if blob else ""
            return None, Outcome("derived", f"saved as {by}, now {length} bytes")
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise corrupt(f"{stream.name} holds no state ({error})") from error
    return None, Outcome("derived", f"saved as {saved.algorithm}, now {stream.algorithm}")


def seat(blob: Blob | None) -> str:
    """A blob's place in words."""
    return "on fewer ranks" if blob is None else rank_coords(blob.place)


def rank_coords(place: Place) -> str:
    """A place in words."""
    data = f", data {place.data_index} of {place.data_size}"
    return f"on rank {place.rank} of {place.world_size}{data}"


def check_scopes(
    gathered: Sequence[tuple[Place, Mapping[str, str], Mapping[str, Outcome]]],
    scopes: Mapping[str, Scope],
) -> None:
    """Compare what all ranks have after a restore with the scopes.

    Args:
        gathered: place, `fingerprints` and outcomes of all ranks.
        scopes: as saved.

    Raises:
        CheckpointError: a stream differs where its scope says equal, or is shared by ranks whose
            streams were derived to differ. What was saved shared and came back exactly may be.
    """
    places = [(place, prints) for place, prints, _ in gathered]
    for name in sorted({name for _, prints, _ in gathered for name in prints}):
        scope = scopes.get(name, "rank")
        if ranks := differing(name, scope, places):
            raise CheckpointError(
                f"random stream {name} is {scope} and differs between {told(ranks)} after resume"
            )
        owners: dict[str, Place] = {}
        for place, prints, outcomes in gathered:
            if name not in prints or outcomes[name].how != "derived":
                continue
            owner = owners.setdefault(prints[name], place)
            if coordinate(scope, owner) != coordinate(scope, place):
                raise CheckpointError(
                    f"random stream {name} is {scope} and the same on "
                    f"{told((owner.rank, place.rank))} after resume"
                )


def told(ranks: tuple[int, int]) -> str:
    """Two ranks in words."""
    return f"ranks {ranks[0]} and {ranks[1]}"


def corrupt(what: str) -> CorruptCheckpoint:
    """The error for a blob that is not what was saved."""
    return CorruptCheckpoint(f"the saved random streams are damaged: {what}: resume from another")
