"""What a rank shows the others of its state before a save, and what they compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.random_state.saved_streams import RankCoords, undrawn
from anyrank.state.part_types import Saved, differences
from anyrank.state.train_state import TrainState
from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor, coordinates_of
from anyrank.world.ranks import Ranks


@dataclass(frozen=True)
class RankSummary:
    """What a rank shows the others of its state.

    Attributes:
        shared: part -> digest of what has to be equal on all ranks.
        records: part -> digest of what may differ between ranks and is then kept for each.
        coordinates: of the rank on the meshes of its tensors.
        coords: of the rank itself.
        streams: random stream -> digest of its state.
        unused: streams that the rank has neither drawn from nor seeded.
        step, run: of the state.
        saves: of the state in the process.
    """

    shared: dict[str, str]
    records: dict[str, str]
    coordinates: Coordinates
    coords: RankCoords
    streams: dict[str, str]
    unused: list[str]
    step: int
    run: str | None
    saves: int


def summarize(
    state: TrainState, parts: Mapping[str, Saved], coords: RankCoords, streams: dict[str, str]
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
    return RankSummary(
        shared=shared,
        records=records,
        coordinates=coordinates_of(tensors_of(parts)),
        coords=coords,
        streams=streams,
        unused=undrawn(state.parts.streams_before, streams),
        step=state.step,
        run=state.run,
        saves=state.parts.saves,
    )


def tensors_of(parts: Mapping[str, Saved]) -> list[ShardedTensor]:
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


def compare(parts: Mapping[str, Saved], answers: Sequence[RankSummary], ranks: Ranks) -> None:
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


def records_of(
    parts: Mapping[str, Saved], answers: Sequence[RankSummary], ranks: Ranks
) -> dict[str, Any]:
    """The parts' records; those that differ between ranks hold every rank's tree. All ranks."""
    records = {part: saved.record for part, saved in parts.items()}
    for part in answers[0].records:
        if len({answer.records[part] for answer in answers}) > 1:
            trees = [record["tree"] for record in ranks.gather(records[part])]
            records[part] = {**records[part], "tree": "by rank", "by_rank": trees}
    return records


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
