"""One save: collect and agree, write the shares, commit. Nothing exists before the last rename."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from anyrank import faults
from anyrank.data.position import Position, data_rank
from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.files.dcp import METADATA
from anyrank.files.dcp_metadata import metadata_of
from anyrank.files.manifest import FileRecord, Manifest, record
from anyrank.files.run_folder import INDEX, Place, index_of
from anyrank.files.storage import join_path
from anyrank.files.store import write_file
from anyrank.random_state.saved_streams import Place as RankCoords
from anyrank.random_state.saved_streams import capture, fingerprints, observed_scopes
from anyrank.resume.part_types import Saved, differences, own_name
from anyrank.resume.rank_file import Item, items_of, write_share
from anyrank.resume.replicas import History, Replicas, choose
from anyrank.resume.run_store import RunFolder
from anyrank.resume.state import TrainState
from anyrank.tensors.sharded_tensor import Coordinates, Held, coordinates_of, hold
from anyrank.tensors.writes import plan_writes
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")

STREAMS = "streams"


@dataclass(frozen=True)
class RankSummary:
    """What a rank tells the others about its state."""

    shared: dict[str, str]
    records: dict[str, str]
    coordinates: Coordinates
    seat: RankCoords
    prints: dict[str, str]
    loose: dict[str, str]
    step: int
    run: str | None
    compared: History


@dataclass
class Snapshot:
    """What one rank writes, and what the first says in the manifest.

    Attributes:
        items: this rank's boxes.
        records: part -> JSON.
        aliases: of tied tensors.
        scopes: of the random streams.
        header: step, epoch, samples, run, lineage, layout.
        replicas: compared before anything is written.
    """

    items: list[Item]
    records: dict[str, Any]
    aliases: dict[str, str]
    scopes: dict[str, str]
    header: dict[str, Any]
    replicas: Replicas


@dataclass(frozen=True)
class SaveRecord:
    """One finished save.

    Attributes:
        step: that was saved.
        path: of the checkpoint.
        nbytes: written by all ranks.
        seconds: from the call to the commit.
        stall_seconds: in which this rank's training stood still.
        removed: steps that retention let go.
    """

    step: int
    path: str
    nbytes: int
    seconds: float
    stall_seconds: float
    removed: list[str] = field(default_factory=list[str])


def rank_coords(state: TrainState, ranks: Ranks) -> RankCoords:
    """Where this rank is, also among the data-parallel coordinates where the loader knows them."""
    data = (ranks.index, ranks.size)
    if isinstance(state.data, Position):
        data = data_rank(state.data)
    return RankCoords(ranks.index, ranks.size, *data)


def collect(state: TrainState, ranks: Ranks) -> Snapshot:
    """What every rank would write now. All ranks; nothing is written.

    Raises:
        CheckpointError: something cannot be saved, or ranks differ where they must not.
    """
    made: list[tuple[dict[str, Saved], bytes]] = []

    def here() -> RankSummary:
        state.check_usable()
        parts, seat = state.save(ranks.index), rank_coords(state, ranks)
        made.append((parts, capture(seat, state.generators)))
        return _brought(state, parts, seat)

    answers = ranks.together("collecting the state", here)
    ((parts, blob),) = made
    _compare(parts, answers, ranks)
    records = _records(parts, answers, ranks)
    own = [
        held
        for part, one in parts.items()
        for held in one.own
        if not one.by_rank or "by_rank" in records[part] or ranks.index == 0
    ]
    own.append(_streams_tensor(ranks.index, blob))
    header = {
        "step": state.step,
        "epoch": state.epoch,
        "samples": state.samples,
        "run": state.run,
        "lineage": state.lineage,
        "saved_on": {"ranks": ranks.size, "layout": _layout_in_words(_tensors(parts))},
        "differed": _differing(answers, ranks),
    }
    aliases = {alias: name for one in parts.values() for alias, name in one.aliases.items()}
    scopes = observed_scopes([(one.seat, one.prints) for one in answers], {})
    coordinates = {rank: one.coordinates for rank, one in zip(ranks.ranks, answers, strict=True)}
    items = _items(parts, own, coordinates, ranks.rank)
    replicas = _replicas(state, parts, coordinates, answers[0].compared, ranks)
    return Snapshot(items, records, aliases, dict(scopes), header, replicas)


def _replicas(
    state: TrainState,
    parts: Mapping[str, Saved],
    coordinates: Mapping[int, Coordinates],
    compared: History,
    ranks: Ranks,
) -> Replicas:
    """What this save compares; what may change from now on is digested at once. All ranks."""
    state.compared = compared
    loose = {name for one in parts.values() for name in one.loose}
    replicas = Replicas(choose(parts, coordinates, ranks.rank, loose, compared), compared)
    ranks.together("digesting the replicas", replicas.start(ranks, steady=False))
    return replicas


def _brought(state: TrainState, parts: Mapping[str, Saved], seat: RankCoords) -> RankSummary:
    """What this rank tells the others.

    Raises:
        CheckpointError: two tensors of one name.
    """
    _refuse_doubled(parts)
    shared = {
        part: _digest(
            [[held.describe() for held in one.tensors], None if one.by_rank else one.record]
        )
        for part, one in parts.items()
    }
    records = {
        part: _digest([one.record, [content_hash(held.local()) for held in one.own]])
        for part, one in parts.items()
        if one.by_rank
    }
    loose = {
        held.name: content_hash(held.local())
        for one in parts.values()
        for held in one.tensors
        if held.name in one.loose
    }
    prints = fingerprints(state.generators)
    where = coordinates_of(_tensors(parts))
    rest = (state.step, state.run, state.compared)
    return RankSummary(shared, records, where, seat, prints, loose, *rest)


def _tensors(parts: Mapping[str, Saved]) -> list[Held]:
    """What the ranks hold together: the same list on all of them."""
    return [held for one in parts.values() for held in one.tensors]


def _items(
    parts: Mapping[str, Saved],
    own: Sequence[Held],
    coordinates: Mapping[int, Coordinates],
    rank: int,
) -> list[Item]:
    """What this rank writes: its part of what all hold, and its own."""
    tensors = _tensors(parts)
    first = {name for one in parts.values() for name in one.loose}
    first |= {held.name for one in parts.values() if not one.strict for held in one.tensors}
    steady = {name for one in parts.values() for name in one.steady}
    writes = plan_writes(tensors, coordinates, by_first=first)
    return items_of(tensors, own, writes, rank, steady)


def _refuse_doubled(parts: Mapping[str, Saved]) -> None:
    """Two values under one name would be one tensor in the checkpoint.

    Raises:
        CheckpointError: names the first.
    """
    seen: set[str] = set()
    for part, one in parts.items():
        for name in [*(held.name for held in (*one.tensors, *one.own)), *one.aliases]:
            if name in seen:
                raise CheckpointError(
                    f"{part}: two tensors have the name {name} in a checkpoint: rename a key (a "
                    "'.' in it reads like a table within a table, 1 like '1')"
                )
            seen.add(name)


def _differing(answers: Sequence[RankSummary], ranks: Ranks) -> list[str]:
    """Buffers that are not alike on all ranks; the first rank's are saved, which is told."""
    first = answers[0].loose
    names = sorted(name for name in first if any(one.loose[name] != first[name] for one in answers))
    if names and ranks.index == 0:
        log.warning(
            "%d buffers differ between the ranks; rank %d's are saved: %s",
            len(names),
            ranks.ranks[0],
            ", ".join(names[:10]),
        )
    return names


def _streams_tensor(index: int, blob: bytes) -> Held:
    data = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    return hold(own_name(STREAMS, index), data)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _compare(parts: Mapping[str, Saved], answers: Sequence[RankSummary], ranks: Ranks) -> None:
    """Raise, on all ranks, what differs between them. All ranks."""
    first = answers[0]
    for rank, other in zip(ranks.ranks[1:], answers[1:], strict=True):
        if other.shared.keys() != first.shared.keys():
            raise CheckpointError(
                f"the ranks' states have different parts: rank {ranks.ranks[0]} "
                f"{sorted(first.shared)}, rank {rank} {sorted(other.shared)}"
            )
        if (other.step, other.run) != (first.step, first.run):
            raise CheckpointError(
                f"the ranks are at different steps: rank {ranks.ranks[0]} at {first.step}, rank "
                f"{rank} at {other.step}: call step_done on all ranks after each step"
            )
    wrong = [p for p in first.shared if len({one.shared[p] for one in answers}) > 1]
    if not wrong:
        return
    part = wrong[0]
    mine = parts[part]
    tables = [[str(one) for one in held.describe()] for held in mine.tensors]
    every = ranks.gather({"tensors": tables, "record": None if mine.by_rank else mine.record})
    for rank, other in zip(ranks.ranks[1:], every[1:], strict=True):
        if other != every[0]:
            raise CheckpointError(
                f"{part} differs between rank {ranks.ranks[0]} and rank {rank}: "
                f"{differences(every[0], other)}: make it alike on all ranks"
            )
    raise CheckpointError(f"{part} differs between the ranks: make it alike on all of them")


def _records(
    parts: Mapping[str, Saved], answers: Sequence[RankSummary], ranks: Ranks
) -> dict[str, Any]:
    """The parts' records; those that differ between ranks hold every rank's tree. All ranks."""
    records = {part: one.record for part, one in parts.items()}
    for part in answers[0].records:
        if len({one.records[part] for one in answers}) > 1:
            trees = [one["tree"] for one in ranks.gather(records[part])]
            records[part] = {**records[part], "tree": "by rank", "by_rank": trees}
    return records


def _layout_in_words(tensors: Sequence[Held]) -> str:
    """How most bytes lie on the ranks."""
    count: dict[str, int] = {}
    for held in tensors:
        words = "replicated"
        if held.layout is not None:
            kinds = [f"S{p.dim}" if p.kind == "shard" else "R" for p in held.layout.placements]
            sizes = "x".join(map(str, held.layout.mesh_shape))
            words = f"{','.join(kinds)} on {sizes}"
        nbytes = torch.Size(held.shape).numel() * held.dtype.itemsize
        count[words] = count.get(words, 0) + nbytes
    return max(count, key=count.__getitem__, default="nothing")


def write(
    snapshot: Snapshot, folder: RunFolder, ranks: Ranks, keep: int, keep_every: int | None
) -> SaveRecord:
    """Write the shares and commit them. All ranks.

    Raises:
        CheckpointError: replicas differ, or a rank could not write; nothing was committed.
    """
    start = time.perf_counter()
    header = snapshot.header
    first = ranks.ranks[0]
    header["differed"] = [*header["differed"], *snapshot.replicas.compare(ranks)]

    def begin() -> tuple[str, str]:
        run = header["run"] or uuid.uuid4().hex
        return run, folder.begin(header["step"], run)

    header["run"], temporary = ranks.from_one("making the folder", first, begin)
    name = f"__{ranks.index}_0.distcp"

    def share() -> tuple[list[Place], dict[str, FileRecord]]:
        faults.point("save.write")
        try:
            return write_share(folder.store, temporary, name, snapshot.items, ranks.check)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise _not_shared(temporary, ranks) from error
            raise

    shares = ranks.together("writing the checkpoint", share)

    def commit() -> SaveRecord:
        faults.point("save.commit")
        places = [place for share in shares for place in share[0]]
        files = {file: one for share in shares for file, one in share[1].items()}
        small = {
            INDEX: index_of(places, snapshot.aliases),
            METADATA: metadata_of(places, snapshot.aliases),
        }
        for file, data in small.items():
            files[file] = record(write_file(folder.store, join_path(temporary, file), data))
        manifest = _manifest(snapshot, files)
        final = folder.commit(temporary, header["step"], manifest)
        removed = folder.tidy(final, keep, keep_every)
        nbytes = sum(one.size for one in files.values())
        seconds = time.perf_counter() - start
        return SaveRecord(header["step"], folder.join(final), nbytes, seconds, 0.0, removed)

    return ranks.from_one("committing the checkpoint", first, commit)


def _not_shared(folder: str, ranks: Ranks) -> CheckpointError:
    """The error of a rank that does not see the folder that the first rank has just made."""
    here, there = ranks.hosts[ranks.node], ranks.hosts[ranks.nodes[0]]
    return CheckpointError(
        f"{folder}: {here} does not see this folder, which rank {ranks.ranks[0]} made on {there}: "
        "every rank writes its share there, so the run's path must be absolute, and on storage "
        "that is shared by all machines"
    )


def _manifest(snapshot: Snapshot, files: dict[str, FileRecord]) -> Manifest:
    return Manifest(
        **snapshot.header,
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"anyrank": version("anyrank"), "torch": str(torch.__version__)},
        files=files,
        parts=snapshot.records,
        streams=snapshot.scopes,
    )
