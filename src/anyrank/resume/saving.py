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
from anyrank.data.position import Position
from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.files.dcp import METADATA
from anyrank.files.dcp_metadata import metadata_of
from anyrank.files.manifest import FileRecord, Manifest, record
from anyrank.files.run_folder import INDEX, Place, index_of
from anyrank.files.storage import join_path
from anyrank.files.store import write_file
from anyrank.random_state.saved_streams import (
    RankCoords,
    SavedStreams,
    StreamState,
    capture,
    digests_of,
)
from anyrank.resume.part_types import Saved, differences
from anyrank.resume.rank_file import Item, items_of, write_share
from anyrank.resume.replicas import History, Replicas, choose
from anyrank.resume.run_store import RunFolder
from anyrank.resume.state import TrainState, run_parts
from anyrank.tensors.sharded_tensor import Coordinates, Held, coordinates_of
from anyrank.tensors.writes import plan_writes
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")


@dataclass(frozen=True)
class RankSummary:
    """What a rank shows the others of its state.

    Attributes:
        shared: part -> digest of what has to be equal on all ranks.
        records: part -> digest of what may differ between ranks and is then kept for each.
        coordinates: of the rank on the meshes of its tensors.
        coords: of the rank itself.
        streams: random stream -> digest of its state.
        unsynced: name -> digest of tensors that nothing keeps equal.
        step, run: of the state.
        compared: which replicas earlier saves compared.
    """

    shared: dict[str, str]
    records: dict[str, str]
    coordinates: Coordinates
    coords: RankCoords
    streams: dict[str, str]
    unsynced: dict[str, str]
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
        header: the manifest's other fields: step, epoch, samples, run, lineage, streams and so on.
        replicas: compared before anything is written.
    """

    items: list[Item]
    records: dict[str, Any]
    aliases: dict[str, str]
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
        data = state.data.place()
    return RankCoords(ranks.index, ranks.size, *data)


def collect(state: TrainState, ranks: Ranks) -> Snapshot:
    """What every rank would write now. All ranks; nothing is written.

    Raises:
        CheckpointError: something cannot be saved, or ranks differ where they must not.
    """
    local: list[tuple[dict[str, Saved], dict[str, StreamState]]] = []  # not sent to other ranks

    def here() -> RankSummary:
        inner = run_parts(state)
        inner.check_usable()
        parts, streams = inner.save(ranks.index), capture(inner.generators)
        local.append((parts, streams))
        return _summary(state, parts, rank_coords(state, ranks), digests_of(streams))

    summaries = ranks.together("collecting the state", here)
    ((parts, states),) = local
    _compare(parts, summaries, ranks)
    records = _records(parts, summaries, ranks)
    streams = _streams(summaries, states, ranks)
    own = [
        held
        for part, saved in parts.items()
        for held in saved.own
        if not saved.by_rank or "by_rank" in records[part] or ranks.index == 0
    ]
    header = {
        "step": state.step,
        "epoch": state.epoch,
        "samples": state.samples,
        "run": state.run,
        "lineage": state.lineage,
        "saved_on": {"ranks": ranks.size, "layout": _layout_in_words(_tensors(parts))},
        "differed": _differing(summaries, ranks),
        "streams": streams.to_json(),
    }
    aliases = {alias: name for saved in parts.values() for alias, name in saved.aliases.items()}
    coordinates = {
        rank: summary.coordinates for rank, summary in zip(ranks.ranks, summaries, strict=True)
    }
    items = _items(parts, own, coordinates, ranks.rank)
    replicas = _replicas(state, parts, coordinates, summaries[0].compared, ranks)
    return Snapshot(items, records, aliases, header, replicas)


def _replicas(
    state: TrainState,
    parts: Mapping[str, Saved],
    coordinates: Mapping[int, Coordinates],
    compared: History,
    ranks: Ranks,
) -> Replicas:
    """What this save compares; what may change from now on is digested at once. All ranks."""
    run_parts(state).compared = compared
    unsynced = {name for saved in parts.values() for name in saved.unsynced}
    replicas = Replicas(choose(parts, coordinates, ranks.rank, unsynced, compared), compared)
    ranks.together("digesting the replicas", replicas.start(ranks, steady=False))
    return replicas


def _summary(
    state: TrainState, parts: Mapping[str, Saved], coords: RankCoords, streams: dict[str, str]
) -> RankSummary:
    """This rank's summary.

    Raises:
        CheckpointError: two tensors of one name.
    """
    _refuse_duplicates(parts)
    shared = {
        part: _digest(
            [[held.describe() for held in saved.tensors], None if saved.by_rank else saved.record]
        )
        for part, saved in parts.items()
    }
    records = {
        part: _digest([saved.record, [content_hash(held.local()) for held in saved.own]])
        for part, saved in parts.items()
        if saved.by_rank
    }
    unsynced = {
        held.name: content_hash(held.local())
        for saved in parts.values()
        for held in saved.tensors
        if held.name in saved.unsynced
    }
    return RankSummary(
        shared=shared,
        records=records,
        coordinates=coordinates_of(_tensors(parts)),
        coords=coords,
        streams=streams,
        unsynced=unsynced,
        step=state.step,
        run=state.run,
        compared=run_parts(state).compared,
    )


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
    first = {name for saved in parts.values() for name in saved.unsynced}
    first |= {h.name for saved in parts.values() if not saved.strict for h in saved.tensors}
    steady = {name for saved in parts.values() for name in saved.steady}
    writes = plan_writes(tensors, coordinates, by_first=first)
    return items_of(tensors, own, writes, rank, steady)


def _refuse_duplicates(parts: Mapping[str, Saved]) -> None:
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
    """Buffers that are not alike on all ranks; the first rank's are saved, with a warning."""
    first = answers[0].unsynced
    names = sorted(n for n in first if any(a.unsynced[n] != first[n] for a in answers))
    if names and ranks.index == 0:
        log.warning(
            "%d buffers differ between the ranks; rank %d's are saved: %s",
            len(names),
            ranks.ranks[0],
            ", ".join(names[:10]),
        )
    return names


def _streams(
    summaries: Sequence[RankSummary], states: Mapping[str, StreamState], ranks: Ranks
) -> SavedStreams:
    """The random streams of all ranks; each state comes from the first rank that has it.
    All ranks.
    """
    digests = [summary.streams for summary in summaries]
    earlier = {digest for row in digests[: ranks.index] for digest in row.values()}
    own = {s.digest: s for s in states.values() if s.digest not in earlier}
    every = ranks.gather(own, "collecting the random streams")
    merged = {digest: state for one in every for digest, state in one.items()}
    return SavedStreams([summary.coords for summary in summaries], digests, merged)


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
    )
