"""The first half of a save: each rank collects what it would write, and the ranks compare it.
No file of a step is written.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.files.manifest import Manifest
from anyrank.models.alike import Inventory, check_alike, find_coordinates, inventory_of
from anyrank.models.digests import check_has_memory
from anyrank.runs.saving.rank_file import Item, make_items
from anyrank.runs.state.part_types import SHOWN, PartState, differences, shared_tensors
from anyrank.runs.state.replicas import compare_replicas, find_alike
from anyrank.runs.state.train_state import TrainState
from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor
from anyrank.tensors.writes import plan_writes
from anyrank.training.random_state.saved_streams import (
    RankCoords,
    SavedStreams,
    StreamState,
    capture,
    digests_of,
    undrawn,
)
from anyrank.training.steps.loader import ElasticLoader
from anyrank.versions import __version__
from anyrank.wording import join_first
from anyrank.world.alike import digest_of, join_digests
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes, and what the first rank puts into the manifest.

    Attributes:
        items: this rank's boxes.
        manifest: manifest of the step; files and streams are added when they are written.
        aliases: names of tied tensors -> the name that is saved.
        streams: random streams of all ranks, with the states that no earlier rank saves.
    """

    items: list[Item]
    manifest: Manifest
    aliases: dict[str, str]
    streams: SavedStreams


@dataclass(frozen=True)
class RankSummary:
    """The summary of its state that a rank sends to the others.

    Attributes:
        inventory: digest of the tensors that the ranks hold together.
        shared: part -> digest of its record, if that must be equal on all ranks.
        records: part -> digest of a record that may differ between ranks, and is then saved for
            each.
        rank: the rank's position, also among the data-parallel ones.
        streams: random stream -> digest of its state.
        unused: streams that the rank has neither drawn from nor seeded.
        step, run: step and run of the state.
        new_run: an id for a run that has none; the first rank's is used.
        saves: number of saves of the state in this process.
    """

    inventory: Inventory
    shared: dict[str, str]
    records: dict[str, str]
    rank: RankCoords
    streams: dict[str, str]
    unused: list[str]
    step: int
    run: str | None
    new_run: str
    saves: int


# -- what refuses a save ---------------------------------------------------------------------------


def is_within_step(state: TrainState) -> bool:
    """Return whether microbatches were drawn that no completed step accounts for."""
    return any(loader.in_step for loader in state.parts.loaders())


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
    """Warn after the first step, when optimizers have their state, if no save can hold it.
    All ranks.
    """
    problem: str | None = None
    try:
        state.parts.check_optimizers(ranks.index)
    except CheckpointError as error:
        problem = str(error)
    problems = [*filter(None, ranks.gather("looking at the optimizers", problem))]
    if problems and ranks.index == 0:
        log.warning("after the first step: the next save will fail: %s", problems[0])


# -- collect ---------------------------------------------------------------------------------------


def collect(state: TrainState, ranks: Ranks, check: Callable[[], None] = lambda: None) -> Snapshot:
    """Collect what each rank would write now. All ranks; no file of a step is written.

    Args:
        state: the state to save.
        ranks: all ranks that hold it.
        check: raises an error if this rank must not save for another reason; takes the lock.

    Raises:
        CheckpointError: something cannot be saved, or ranks differ in what must be equal.
    """
    for loader in state.parts.loaders():
        # A checkpoint with a wrong position would repeat or lose samples in every later resume.
        loader.position.check_receipt(ranks)

    def collect_own() -> tuple[tuple[dict[str, PartState], dict[str, StreamState]], RankSummary]:
        check()
        inner = state.parts
        parts, streams = inner.save(ranks.index), capture(inner.generators)
        for tensor in shared_tensors(parts):
            check_has_memory(tensor.name, tensor.local())
        return (parts, streams), _summarize(state, parts, streams, ranks)

    (parts, states), summaries = ranks.run_and_gather("collecting the state", collect_own)
    # Before the replicas: tensors that differ in name or layout have no replicas.
    coordinates = _compare(parts, summaries, ranks)
    records = _build_records(parts, summaries, ranks)
    _note_alike(state, parts, records, ranks)
    differed = compare_replicas(parts, coordinates, summaries[0].saves, state.step, ranks)
    # All take the first rank's count, so that they compare the same ninth in the next save.
    state.parts.saves = summaries[0].saves + 1
    manifest = Manifest(
        run=state.run or summaries[0].new_run,
        step=state.step,
        epoch=state.epoch,
        samples=sum(loader.samples for loader in state.parts.loaders())
        if state.parts.loaders()
        else state.samples,
        saved_on={"ranks": ranks.size, "layout": _describe_layout(shared_tensors(parts))},
        lineage=state.lineage,
        written="",
        versions={"anyrank": __version__, "torch": str(torch.__version__)},
        files={},
        parts=records,
        settings=state.parts.settings.record(records),
        differed=differed,
    )
    return Snapshot(
        items=_plan_items(parts, records, coordinates, ranks),
        manifest=manifest,
        aliases={k: name for saved in parts.values() for k, name in saved.aliases.items()},
        streams=_select_streams(summaries, states, ranks),
    )


def _note_alike(
    state: TrainState, parts: Mapping[str, PartState], records: dict[str, Any], ranks: Ranks
) -> None:
    """Record what all ranks hold equal beside shares of parameters; warn once of what differs,
    because only as many ranks can resume it. All ranks.
    """
    inner = state.parts
    inner.alike = find_alike(parts, inner.alike, ranks)
    for part, names in inner.alike.items():
        records[part] = {**records[part], "alike": names}
    for part, saved in parts.items():
        names = [_base_name(tensor) for tensor in saved.own_tensors if saved.agreement == "equal"]
        own_names = [name for name in names if name not in inner.alike.get(part, ())]
        key = f"{part} own"
        if own_names and ranks.index == 0 and ranks.size > 1 and key not in inner.warned:
            inner.warned.add(key)
            log.warning(
                "%s: each rank keeps tensors of its own beside its share of a parameter (%s): only "
                "as many ranks with the same layout can resume them; hold them as DTensors "
                "(DTensor.from_local) to resume on any number",
                part,
                join_first(own_names, SHOWN),
            )


def _base_name(tensor: ShardedTensor) -> str:
    """The name of a rank's own tensor, without the rank."""
    return tensor.name.rpartition("@")[0]


def rank_coords(state: TrainState, ranks: Ranks) -> RankCoords:
    """Find this rank's position, also among the data-parallel ranks if the loader knows them."""
    data = (ranks.index, ranks.size)
    if isinstance(state.data, ElasticLoader):
        data = state.data.position.data_rank()
    return RankCoords(ranks.index, ranks.size, *data)


def _plan_items(
    parts: Mapping[str, PartState],
    records: Mapping[str, Any],
    coordinates: Mapping[int, Coordinates],
    ranks: Ranks,
) -> list[Item]:
    """Plan the boxes that this rank writes: its part of the shared tensors, and its own tensors."""
    tensors = shared_tensors(parts)
    may_differ = {name for saved in parts.values() for name in saved.may_differ}
    writes = plan_writes(tensors, coordinates, by_first=may_differ)
    # A tensor that all ranks have equal is written once, by the first; one that differs, by each.
    own_tensors = [
        tensor
        for part, saved in parts.items()
        for tensor in saved.own_tensors
        if ranks.index == 0
        or "by_rank" in records[part]
        or (saved.agreement == "equal" and _base_name(tensor) not in records[part].get("alike", ()))
    ]
    return make_items(tensors, own_tensors, writes, ranks.rank)


def _select_streams(
    summaries: Sequence[RankSummary], states: Mapping[str, StreamState], ranks: Ranks
) -> SavedStreams:
    """Select the random streams; each state is saved by the first rank that has it."""
    digests = [summary.streams for summary in summaries]
    # Ranks whose streams are at the same state save it once: a restart has N equal ones.
    earlier = {digest for row in digests[: ranks.index] for digest in row.values()}
    to_save = {
        digest: states[name]
        for name, digest in digests[ranks.index].items()
        if digest not in earlier
    }
    unused = set(summaries[0].unused).intersection(*(summary.unused for summary in summaries))
    return SavedStreams([summary.rank for summary in summaries], digests, to_save, sorted(unused))


def _describe_layout(tensors: Sequence[ShardedTensor]) -> str:
    """Describe, in words, the layout that most bytes have on the ranks."""
    bytes_by_layout: dict[str, int] = {}
    for tensor in tensors:
        layout = "replicated" if tensor.layout is None else tensor.layout.in_words()
        nbytes = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
        bytes_by_layout[layout] = bytes_by_layout.get(layout, 0) + nbytes
    return max(bytes_by_layout, key=bytes_by_layout.__getitem__, default="nothing")


# -- compare ---------------------------------------------------------------------------------------


def _summarize(
    state: TrainState,
    parts: Mapping[str, PartState],
    streams: Mapping[str, StreamState],
    ranks: Ranks,
) -> RankSummary:
    """Summarise this rank's state.

    Raises:
        CheckpointError: two tensors have one name.
    """
    _refuse_duplicates(parts)
    shared = {part: digest_of([_shared_record(saved)]) for part, saved in parts.items()}
    records = {
        part: digest_of(
            [saved.record, *(content_hash(tensor.local()) for tensor in saved.own_tensors)]
        )
        for part, saved in parts.items()
        if saved.agreement == "per rank"
    }
    digests = digests_of(streams)
    return RankSummary(
        inventory=inventory_of(shared_tensors(parts), ranks),
        shared=shared,
        records=records,
        rank=rank_coords(state, ranks),
        streams=digests,
        unused=undrawn(state.parts.streams_before, digests),
        step=state.step,
        run=state.run,
        new_run=uuid.uuid4().hex,
        saves=state.parts.saves,
    )


def _shared_record(saved: PartState) -> Any:
    """Return the part of a part's record that must be equal on all ranks."""
    return saved.record if saved.agreement == "equal" else None


def _refuse_duplicates(parts: Mapping[str, PartState]) -> None:
    """Refuse two values under one name, because a checkpoint has one tensor for each name.

    Raises:
        CheckpointError: two values have one name; the error names the first.
    """
    seen: set[str] = set()
    for part, saved in parts.items():
        for name in [
            *(tensor.name for tensor in (*saved.tensors, *saved.own_tensors)),
            *saved.aliases,
        ]:
            if name in seen:
                raise CheckpointError(
                    f"{part}: two tensors have the name {name} in a checkpoint: rename a key (a "
                    "key with a '.' is like a dict within a dict, the key 1 like '1')"
                )
            seen.add(name)


def _compare(
    parts: Mapping[str, PartState], answers: Sequence[RankSummary], ranks: Ranks
) -> Mapping[int, Coordinates]:
    """Raise an error for any difference between the ranks; see `check_alike`. All ranks."""
    first = answers[0]
    for rank, other in zip(ranks.ranks[1:], answers[1:], strict=True):
        if other.shared.keys() != first.shared.keys():
            raise CheckpointError(
                f"the ranks' states have different parts: rank {ranks.ranks[0]} "
                f"{sorted(first.shared)}, rank {rank} {sorted(other.shared)}: give TrainState the "
                "same on all ranks"
            )
        if other.step != first.step:
            raise CheckpointError(
                f"the ranks are at different steps: rank {ranks.ranks[0]} at {first.step}, rank "
                f"{rank} at {other.step}: call step_done on all ranks after each step"
            )
        if other.run != first.run:
            raise CheckpointError(
                f"the ranks' states are of different runs: rank {ranks.ranks[0]} of {first.run}, "
                f"rank {rank} of {other.run}: save and resume a state on all ranks together"
            )
    inventory = functools.reduce(join_digests, (answer.inventory for answer in answers))
    title = "the ranks' states differ"
    tensors = shared_tensors(parts)
    check_alike(title, tensors, inventory, ranks, CheckpointError)
    coordinates = find_coordinates(tensors, inventory, ranks)
    differing = [p for p in first.shared if len({answer.shared[p] for answer in answers}) > 1]
    if not differing:
        return coordinates
    part = differing[0]
    records = ranks.gather(
        "comparing the state", _shared_record(parts[part])
    )  # only now, because most are equal
    for rank, record in zip(ranks.ranks[1:], records[1:], strict=True):
        if record != records[0]:
            raise CheckpointError(
                f"{part} differs between rank {ranks.ranks[0]} and rank {rank}: "
                f"{differences(records[0], record)}: make it alike on all ranks"
            )
    raise CheckpointError(f"{part} differs between the ranks: make it alike on all of them")


def _build_records(
    parts: Mapping[str, PartState], answers: Sequence[RankSummary], ranks: Ranks
) -> dict[str, Any]:
    """Build the parts' records; one that differs between ranks has each rank's tree. All ranks."""
    records = {part: saved.record for part, saved in parts.items()}
    for part in answers[0].records:
        # Most records are equal, and are not sent: their digests say so.
        if len({answer.records[part] for answer in answers}) > 1:
            trees = [
                record["tree"] for record in ranks.gather("comparing the state", records[part])
            ]
            records[part] = {**records[part], "tree": "by rank", "by_rank": trees}
    for part, saved in parts.items():
        if saved.unsaved:
            records[part] = {**records[part], "unsaved": saved.unsaved}
    return records
