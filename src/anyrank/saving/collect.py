"""The first half of a save: what each rank would write, compared with the others'. Nothing is
written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from anyrank.data.position import ElasticData
from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.files.manifest import Manifest
from anyrank.random_state.saved_streams import (
    RankCoords,
    SavedStreams,
    StreamState,
    capture,
    digests_of,
    undrawn,
)
from anyrank.saving.rank_file import Item, items_of
from anyrank.state.digests import check_memory
from anyrank.state.part_types import Saved, differences
from anyrank.state.replicas import compare_replicas
from anyrank.state.train_state import TrainState
from anyrank.steps.loader import ElasticLoader
from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor, coordinates_of
from anyrank.tensors.writes import plan_writes
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes, and what the first says in the manifest.

    Attributes:
        items: this rank's boxes.
        manifest: of the step, without its files and its streams, which are not written yet.
        aliases: of tied tensors.
        streams: random streams of all ranks; of their states, those that no earlier rank has.
        loader_state: for the step's receipt; None for a run that keeps none.
        receipt_skips: names of tensors that differ between the ranks, and are in no receipt.
    """

    items: list[Item]
    manifest: Manifest
    aliases: dict[str, str]
    streams: SavedStreams
    loader_state: Mapping[str, Any] | None
    receipt_skips: set[str]


@dataclass(frozen=True)
class RankSummary:
    """What a rank shows the others of its state.

    Attributes:
        shared: part -> digest of what has to be equal on all ranks.
        records: part -> digest of what may differ between ranks and is then kept for each.
        mesh_coordinates: of the rank on the meshes of its tensors.
        rank: which one it is.
        streams: random stream -> digest of its state.
        unused: streams that the rank has neither drawn from nor seeded.
        step, run: of the state.
        new_run: the id of a run that has none; the first rank's counts.
        saves: of the state in the process.
    """

    shared: dict[str, str]
    records: dict[str, str]
    mesh_coordinates: Coordinates
    rank: RankCoords
    streams: dict[str, str]
    unused: list[str]
    step: int
    run: str | None
    new_run: str
    saves: int


# -- what refuses a save ---------------------------------------------------------------------------


def is_within_step(state: TrainState) -> bool:
    """Whether microbatches were drawn that no completed step accounts for."""
    return isinstance(state.data, ElasticData) and state.data.in_step


def check_boundary(state: TrainState) -> None:
    """Refuse to save within a step.

    Raises:
        CheckpointError: a step is under way, or the state is half restored.
    """
    state.parts.check_usable()
    if is_within_step(state):
        raise CheckpointError(
            "save() within a step, whose samples are not accounted for: save after the body "
            "of steps(), or call step_done first"
        )


def warn_of_refusal(state: TrainState, ranks: Ranks) -> None:
    """Say after the first step, when optimizers have their state, that no save can hold it.
    All ranks.
    """
    problem: str | None = None
    try:
        state.parts.check_optimizers(ranks.index)
    except CheckpointError as error:
        problem = str(error)
    problems = [*filter(None, ranks.gather(problem, "looking at the optimizers"))]
    if problems and ranks.index == 0:
        log.warning("after the first step: the next save will fail: %s", problems[0])


# -- collect ---------------------------------------------------------------------------------------


def collect(state: TrainState, ranks: Ranks, check: Callable[[], None] = lambda: None) -> Snapshot:
    """What every rank would write now. All ranks; nothing is written.

    Args:
        state: to be saved.
        ranks: all that hold it.
        check: raises what else is against a save, on this rank.

    Raises:
        CheckpointError: something cannot be saved, or ranks differ where they must not.
    """
    if isinstance(state.data, ElasticData):
        state.data.position.check_receipt(ranks)

    def look() -> tuple[tuple[dict[str, Saved], dict[str, StreamState]], RankSummary]:
        check()
        inner = state.parts
        inner.check_usable()
        parts, streams = inner.save(ranks.index), capture(inner.generators)
        for held in _tensors_of(parts):
            check_memory(held.name, held.local())
        return (parts, streams), _summarize(state, parts, rank_coords(state, ranks), streams)

    (parts, states), summaries = ranks.own_and_all("collecting the state", look)
    _compare(parts, summaries, ranks)
    records = _records_of(parts, summaries, ranks)
    meshes = [summary.mesh_coordinates for summary in summaries]
    coordinates = dict(zip(ranks.ranks, meshes, strict=True))
    differed = compare_replicas(parts, coordinates, summaries[0].saves, ranks)
    state.parts.saves = summaries[0].saves + 1
    manifest = Manifest(
        run=state.run or summaries[0].new_run,
        step=state.step,
        epoch=state.epoch,
        samples=state.data.samples if isinstance(state.data, ElasticData) else state.samples,
        saved_on={"ranks": ranks.size, "layout": _layout_in_words(_tensors_of(parts))},
        lineage=state.lineage,
        written="",
        versions={"anyrank": version("anyrank"), "torch": str(torch.__version__)},
        files={},
        parts=records,
        differed=differed,
    )
    has_receipt = isinstance(state.data, ElasticLoader) and state.data.position.exact
    by_rank = [name for name, record in records.items() if "by_rank" in record]
    return Snapshot(
        items=_items(parts, records, coordinates, ranks),
        manifest=manifest,
        aliases={k: name for saved in parts.values() for k, name in saved.aliases.items()},
        streams=_streams(summaries, states, ranks),
        loader_state=state.data.state_dict() if has_receipt else None,
        receipt_skips={held.name for name in by_rank for held in parts[name].own},
    )


def rank_coords(state: TrainState, ranks: Ranks) -> RankCoords:
    """Where this rank is, also among the data-parallel coordinates where the loader knows them."""
    data = (ranks.index, ranks.size)
    if isinstance(state.data, ElasticData):
        data = state.data.position.data_rank()
    return RankCoords(ranks.index, ranks.size, *data)


def _items(
    parts: Mapping[str, Saved],
    records: Mapping[str, Any],
    coordinates: Mapping[int, Coordinates],
    ranks: Ranks,
) -> list[Item]:
    """What this rank writes: its part of what all hold, and its own."""
    tensors = _tensors_of(parts)
    first = {name for saved in parts.values() for name in saved.may_differ}
    writes = plan_writes(tensors, coordinates, by_first=first)
    own = [
        held
        for part, saved in parts.items()
        for held in saved.own
        if saved.agreement == "equal" or "by_rank" in records[part] or ranks.index == 0
    ]
    return items_of(tensors, own, writes, ranks.rank)


def _streams(
    summaries: Sequence[RankSummary], states: Mapping[str, StreamState], ranks: Ranks
) -> SavedStreams:
    """The random streams; each state is saved by the first rank that has it."""
    digests = [summary.streams for summary in summaries]
    earlier = {digest for row in digests[: ranks.index] for digest in row.values()}
    own = {s.digest: s for s in states.values() if s.digest not in earlier}
    unused = set(summaries[0].unused).intersection(*(summary.unused for summary in summaries))
    return SavedStreams([summary.rank for summary in summaries], digests, own, sorted(unused))


def _layout_in_words(tensors: Sequence[ShardedTensor]) -> str:
    """How most bytes lie on the ranks."""
    count: dict[str, int] = {}
    for held in tensors:
        words = "replicated" if held.layout is None else str(held.layout)
        nbytes = torch.Size(held.shape).numel() * held.dtype.itemsize
        count[words] = count.get(words, 0) + nbytes
    return max(count, key=count.__getitem__, default="nothing")


# -- compare ---------------------------------------------------------------------------------------


def _summarize(
    state: TrainState,
    parts: Mapping[str, Saved],
    rank: RankCoords,
    streams: Mapping[str, StreamState],
) -> RankSummary:
    """This rank's summary.

    Raises:
        CheckpointError: two tensors of one name.
    """
    _refuse_duplicates(parts)
    shared = {
        part: _digest(
            [
                [held.describe() for held in saved.tensors],
                saved.record if saved.agreement == "equal" else None,
            ]
        )
        for part, saved in parts.items()
    }
    records = {
        part: _digest([saved.record, [content_hash(held.local()) for held in saved.own]])
        for part, saved in parts.items()
        if saved.agreement == "per rank"
    }
    digests = digests_of(streams)
    return RankSummary(
        shared=shared,
        records=records,
        mesh_coordinates=coordinates_of(_tensors_of(parts)),
        rank=rank,
        streams=digests,
        unused=undrawn(state.parts.streams_before, digests),
        step=state.step,
        run=state.run,
        new_run=uuid.uuid4().hex,
        saves=state.parts.saves,
    )


def _tensors_of(parts: Mapping[str, Saved]) -> list[ShardedTensor]:
    """What the ranks hold together: the same list on all of them."""
    return [held for saved in parts.values() for held in saved.tensors]


def _refuse_duplicates(parts: Mapping[str, Saved]) -> None:
    """Two values under one name would be one tensor in the checkpoint.

    Raises:
        CheckpointError: names the first.
    """
    seen: set[str] = set()
    for part, saved in parts.items():
        for name in [*(held.name for held in (*saved.tensors, *saved.own)), *saved.aliases]:
            if name in seen:
                raise CheckpointError(
                    f"{part}: two tensors have the name {name} in a checkpoint: rename a key (a "
                    "'.' in it reads like a table within a table, 1 like '1')"
                )
            seen.add(name)


def _compare(parts: Mapping[str, Saved], answers: Sequence[RankSummary], ranks: Ranks) -> None:
    """Raise, on all ranks, what differs between them. All ranks."""
    first = answers[0]
    for rank, other in zip(ranks.ranks[1:], answers[1:], strict=True):
        if other.shared.keys() != first.shared.keys():
            raise CheckpointError(
                f"the ranks' states have different parts: rank {ranks.ranks[0]} "
                f"{sorted(first.shared)}, rank {rank} {sorted(other.shared)}: give TrainState the "
                "same on all ranks"
            )
        if (other.step, other.run) != (first.step, first.run):
            raise CheckpointError(
                f"the ranks are at different steps: rank {ranks.ranks[0]} at {first.step}, rank "
                f"{rank} at {other.step}: call step_done on all ranks after each step"
            )
    wrong = [p for p in first.shared if len({answer.shared[p] for answer in answers}) > 1]
    if not wrong:
        return
    part = wrong[0]
    mine = parts[part]
    tables = [[str(line) for line in held.describe()] for held in mine.tensors]
    every = ranks.gather(
        {"tensors": tables, "record": mine.record if mine.agreement == "equal" else None}
    )
    for rank, other in zip(ranks.ranks[1:], every[1:], strict=True):
        if other != every[0]:
            raise CheckpointError(
                f"{part} differs between rank {ranks.ranks[0]} and rank {rank}: "
                f"{differences(every[0], other)}: make it alike on all ranks"
            )
    raise CheckpointError(f"{part} differs between the ranks: make it alike on all of them")


def _records_of(
    parts: Mapping[str, Saved], answers: Sequence[RankSummary], ranks: Ranks
) -> dict[str, Any]:
    """The parts' records; those that differ between ranks hold every rank's tree. All ranks."""
    records = {part: saved.record for part, saved in parts.items()}
    for part in answers[0].records:
        if len({answer.records[part] for answer in answers}) > 1:
            trees = [record["tree"] for record in ranks.gather(records[part])]
            records[part] = {**records[part], "tree": "by rank", "by_rank": trees}
    for part, saved in parts.items():
        if saved.unsaved:
            records[part] = {**records[part], "unsaved": saved.unsaved}
    return records


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
