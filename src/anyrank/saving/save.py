"""One save: collect and agree, write the shares, commit. Nothing exists before the last rename."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from anyrank import faults
from anyrank.data.position import ElasticData
from anyrank.errors import CheckpointError
from anyrank.files.manifest import Manifest, record
from anyrank.files.receipt import Digests, receipt_of_step
from anyrank.files.storage import join_path, write_file
from anyrank.formats.dcp import METADATA
from anyrank.formats.dcp_metadata import metadata_of
from anyrank.formats.run_folder import INDEX, index_of
from anyrank.random_state.saved_streams import (
    RankCoords,
    SavedStreams,
    StreamState,
    capture,
    digests_of,
)
from anyrank.saving.rank_file import Item, WrittenShare, items_of, write_share
from anyrank.saving.run_store import RunFolder
from anyrank.saving.summary import (
    RankSummary,
    compare,
    records_of,
    summarize,
    tensors_of,
)
from anyrank.state.digests import check_memory
from anyrank.state.part_types import Saved
from anyrank.state.replicas import compare_replicas
from anyrank.state.train_state import TrainState
from anyrank.steps.loader import ElasticLoader
from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor
from anyrank.tensors.writes import plan_writes
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes, and what the first says in the manifest.

    Attributes:
        items: this rank's boxes.
        manifest: of the step, without the files, which are not written yet.
        aliases: of tied tensors.
        receipt: what the step's receipt is of; None for a run that keeps none.
    """

    items: list[Item]
    manifest: Manifest
    aliases: dict[str, str]
    receipt: ReceiptOf | None = None


@dataclass(frozen=True)
class ReceiptOf:
    """What the receipt of a step is of, beside the items.

    Attributes:
        left_out: names of tensors that differ between the ranks.
        data: the state of the loader.
    """

    left_out: set[str]
    data: Mapping[str, Any]


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

    Example::

        state = anyrank.TrainState(torch.nn.Linear(4, 1))
        records = []
        with anyrank.Checkpoints("runs/a", state, on_commit=records.append) as ckpts:
            ckpts.save()
        assert records == ckpts.stats()
        assert records[0].nbytes == ckpts.saved()[0].nbytes
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
    if isinstance(state.data, ElasticData):
        data = state.data.position.data_rank()
    return RankCoords(ranks.index, ranks.size, *data)


def _samples_of(state: TrainState) -> int:
    """Samples of completed steps, by the loader where it counts them."""
    return state.data.samples if isinstance(state.data, ElasticData) else state.samples


def collect(state: TrainState, ranks: Ranks) -> Snapshot:
    """What every rank would write now. All ranks; nothing is written.

    Raises:
        CheckpointError: something cannot be saved, or ranks differ where they must not.
    """

    def here() -> tuple[tuple[dict[str, Saved], dict[str, StreamState]], RankSummary]:
        inner = state.parts
        inner.check_usable()
        parts, streams = inner.save(ranks.index), capture(inner.generators)
        for held in tensors_of(parts):
            check_memory(held.name, held.local())
        summary = summarize(state, parts, rank_coords(state, ranks), digests_of(streams))
        return (parts, streams), summary

    (parts, states), summaries = ranks.own_and_all("collecting the state", here)
    compare(parts, summaries, ranks)
    records = records_of(parts, summaries, ranks)
    for part, saved in parts.items():
        if saved.unsaved:
            records[part] = {**records[part], "unsaved": saved.unsaved}
    coordinates = {
        rank: summary.coordinates for rank, summary in zip(ranks.ranks, summaries, strict=True)
    }
    differed = compare_replicas(parts, coordinates, summaries[0].saves, ranks)
    state.parts.saves = summaries[0].saves + 1
    streams = _streams(summaries, states, ranks)
    own = [
        held
        for part, saved in parts.items()
        for held in saved.own
        if saved.agreement == "equal" or "by_rank" in records[part] or ranks.index == 0
    ]
    manifest = Manifest(
        run=state.run or ranks.from_one("naming the run", lambda: uuid.uuid4().hex),
        step=state.step,
        epoch=state.epoch,
        samples=_samples_of(state),
        saved_on={"ranks": ranks.size, "layout": _layout_in_words(tensors_of(parts))},
        lineage=state.lineage,
        written="",
        versions={"anyrank": version("anyrank"), "torch": str(torch.__version__)},
        files={},
        parts=records,
        differed=differed,
        streams=streams.to_json(),
    )
    aliases = {alias: name for saved in parts.values() for alias, name in saved.aliases.items()}
    items = _items(parts, own, coordinates, ranks.rank)
    receipt = None
    if isinstance(state.data, ElasticLoader) and state.data.position.exact:
        by_rank = {name for name, record in records.items() if "by_rank" in record}
        left_out = {held.name for name in by_rank for held in parts[name].own}
        receipt = ReceiptOf(left_out, state.data.state_dict())
    return Snapshot(items, manifest, aliases, receipt)


def _items(
    parts: Mapping[str, Saved],
    own: Sequence[ShardedTensor],
    coordinates: Mapping[int, Coordinates],
    rank: int,
) -> list[Item]:
    """What this rank writes: its part of what all hold, and its own."""
    tensors = tensors_of(parts)
    first = {name for saved in parts.values() for name in saved.may_differ}
    writes = plan_writes(tensors, coordinates, by_first=first)
    return items_of(tensors, own, writes, rank)


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
    merged = {digest: state for states in every for digest, state in states.items()}
    coords = [summary.coords for summary in summaries]
    unused = set(summaries[0].unused).intersection(*(summary.unused for summary in summaries))
    return SavedStreams(coords, digests, merged, sorted(unused))


def _layout_in_words(tensors: Sequence[ShardedTensor]) -> str:
    """How most bytes lie on the ranks."""
    count: dict[str, int] = {}
    for held in tensors:
        words = "replicated" if held.layout is None else str(held.layout)
        nbytes = torch.Size(held.shape).numel() * held.dtype.itemsize
        count[words] = count.get(words, 0) + nbytes
    return max(count, key=count.__getitem__, default="nothing")


def write(
    snapshot: Snapshot,
    folder: RunFolder,
    ranks: Ranks,
    keep: int,
    keeps: Callable[[int], bool],
) -> SaveRecord:
    """Write the shares and commit them. All ranks.

    Raises:
        CheckpointError: replicas differ, or a rank could not write; nothing was committed.
    """
    start = time.perf_counter()
    step = snapshot.manifest.step
    run = snapshot.manifest.run
    temporary = ranks.from_one("making the folder", lambda: folder.begin(step, run))
    name = f"__{ranks.index}_0.distcp"

    def share() -> tuple[WrittenShare, dict[str, int]]:
        faults.point("save.write")
        digests = _tensor_digests(snapshot, ranks)
        try:
            written = write_share(folder.store, temporary, name, snapshot.items, ranks.check)
            return written, digests
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise _not_shared(temporary, ranks) from error
            raise

    shares = ranks.together("writing the checkpoint", share)

    def commit() -> SaveRecord:
        faults.point("save.commit")
        boxes = [box for written, _ in shares for box in written.boxes]
        files = {name: entry for written, _ in shares for name, entry in written.files.items()}
        small = {
            INDEX: index_of(boxes, snapshot.aliases),
            METADATA: metadata_of(boxes, snapshot.aliases),
        }
        for file, data in small.items():
            files[file] = record(write_file(folder.store, join_path(temporary, file), data))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        receipt: dict[str, Any] = {}
        if snapshot.receipt is not None:
            receipt = receipt_of_step(
                [digests for _, digests in shares], snapshot.receipt.data, snapshot.manifest.numbers
            )
        manifest = replace(snapshot.manifest, files=files, written=now, receipt=receipt)
        final = folder.commit(temporary, step, manifest)
        removed = folder.tidy(final, keep, keeps)
        nbytes = sum(file.size for file in files.values())
        seconds = time.perf_counter() - start
        return SaveRecord(step, folder.shown(final), nbytes, seconds, 0.0, removed)

    return ranks.from_one("committing the checkpoint", commit)


def _tensor_digests(snapshot: Snapshot, ranks: Ranks) -> dict[str, int]:
    """What this rank's boxes add to the digests of the receipt; nothing for a run without one."""
    digests = Digests()
    if snapshot.receipt is not None:
        for item in snapshot.items:
            ranks.check()
            if item.name not in snapshot.receipt.left_out:
                digests.add(item.name, item.shape, item.dtype, item.box, item.source)
    return digests.tensors


def _not_shared(folder: str, ranks: Ranks) -> CheckpointError:
    """The error of a rank that does not see the folder that the first rank has just made."""
    here, there = ranks.hosts[ranks.node], ranks.hosts[ranks.nodes[0]]
    return CheckpointError(
        f"{folder}: {here} does not see this folder, which rank {ranks.ranks[0]} made on {there}: "
        "every rank writes its share there, so the run's path must be absolute, and on storage "
        "that is shared by all machines"
    )
