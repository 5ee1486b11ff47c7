"""Compare the ranks' states before a save: some facts must be the same on every rank."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.files.content_hash import content_hash
from anyrank.models.alike import Inventory, check_alike, find_coordinates, inventory_of
from anyrank.runs.state.part_types import PartState, differences, shared_tensors
from anyrank.runs.state.train_state import TrainState
from anyrank.tensors.sharded_tensor import Coordinates
from anyrank.training.random_state.saved import GeneratorState, digests_of_generators, undrawn
from anyrank.world.alike import Compared, differing, digest_of, digests_of_lines, join_digests
from anyrank.world.ranks import Ranks

# Fact about a whole state -> the start of an error if ranks differ in it, and the way out.
POSITION = {
    "parts": (
        "TrainState has different parts on different ranks",
        "Pass the same parts on every rank.",
    ),
    "step": ("the ranks are at different steps", "Call step_done() on every rank after each step."),
    "run": (
        "the ranks hold states of different runs",
        "Resume and save on every rank together.",
    ),
}


@dataclass(frozen=True)
class StateSummary:
    """A rank's summary of its state; merged, that of all ranks.

    Attributes:
        inventory: digest of the tensors that the ranks hold together.
        position: digest of each entry of POSITION.
        shared: part -> digest of its record, if that must be the same on every rank.
        records: part -> digest of a record that may differ, and is then saved for each rank.
        generators: random generator -> digest of its state, for those that must be the same.
        unused: generators that no rank has drawn from or seeded.
        first: the first rank, its id for a run that has none, and its number of saves.
    """

    inventory: Inventory
    position: dict[str, Compared]
    shared: dict[str, Compared]
    records: dict[str, Compared]
    generators: dict[str, str]
    unused: frozenset[str]
    first: tuple[int, str, int]

    def join(self, others: StateSummary) -> StateSummary:
        """Merge the summaries of ranks."""
        return StateSummary(
            join_digests(self.inventory, others.inventory),
            join_digests(self.position, others.position),
            join_digests(self.shared, others.shared),
            join_digests(self.records, others.records),
            dict(self.generators.items() & others.generators.items()),
            self.unused & others.unused,
            min(self.first, others.first),
        )


def summarize(
    state: TrainState,
    parts: Mapping[str, PartState],
    states: Mapping[str, GeneratorState],
    ranks: Ranks,
) -> StateSummary:
    """Summarize this rank's state.

    Raises:
        CheckpointError: two tensors have the same name.
    """
    _refuse_duplicates(parts)
    rank = ranks.rank
    generators = digests_of_generators(states)
    return StateSummary(
        inventory=inventory_of(shared_tensors(parts), ranks),
        position=digests_of_lines(_position_lines(state, parts), rank),
        shared={
            part: Compared(digest_of([_shared_record(saved)]), rank)
            for part, saved in parts.items()
        },
        records={
            part: Compared(
                digest_of(
                    [saved.record, *(content_hash(tensor.local()) for tensor in saved.own_tensors)]
                ),
                rank,
            )
            for part, saved in parts.items()
            if saved.agreement == "per rank"
        },
        generators=generators,
        unused=frozenset(undrawn(state.parts.generators_before, generators)),
        first=(ranks.index, uuid.uuid4().hex, state.parts.saves),
    )


def check_same(
    state: TrainState, parts: Mapping[str, PartState], summary: StateSummary, ranks: Ranks
) -> Mapping[int, Coordinates]:
    """Raise CheckpointError if the ranks' states differ. Collective.

    Args:
        state, parts: state and parts of this rank.
        summary: summary of all ranks, merged.
        ranks: ranks that save together.

    Returns:
        The coordinates of every rank in the tensors' meshes.

    Raises:
        CheckpointError: they differ; the error names the difference and the ranks.
    """
    wrong = differing(_position_lines(state, parts), summary.position, ranks, limit=1)
    for what, (title, way_out) in POSITION.items():
        if what in wrong:
            (text, first), (other_text, other), *_ = wrong[what][what].items()
            raise CheckpointError(
                f"{title}: {text} on rank {first.ranks[0]}, {other_text} on rank "
                f"{other.ranks[0]}. {way_out}"
            )
    tensors = shared_tensors(parts)
    check_alike("the ranks' states differ", tensors, summary.inventory, ranks, CheckpointError)
    unlike = [part for part, compared in summary.shared.items() if not compared.digest]
    if unlike:
        _refuse_record(unlike[0], _shared_record(parts[unlike[0]]), ranks)
    return find_coordinates(tensors, summary.inventory, ranks)


def _position_lines(state: TrainState, parts: Mapping[str, PartState]) -> dict[str, dict[str, str]]:
    """Return the facts about a rank's whole state, each of one kind and one line."""
    texts = {"parts": str(sorted(parts)), "step": str(state.step), "run": str(state.run)}
    return {what: {what: text} for what, text in texts.items()}


def _refuse_record(part: str, record: Any, ranks: Ranks) -> None:
    """Raise CheckpointError for a part whose records differ. Collective.

    Raises:
        CheckpointError: records differ; the error names the first rank that differs, and how.
    """
    expected = ranks.run_on_one("comparing the state", lambda: record)
    own_text = "" if record == expected else differences(expected, record)
    nobody = (ranks.size, "")
    unlike_rank = ranks.reduce(
        "comparing the state", (ranks.index, own_text) if own_text else nobody, min
    )
    if unlike_rank == nobody:
        raise CheckpointError(f"{part} must be the same on every rank, but differs between ranks")
    raise CheckpointError(
        f"{part} must be the same on every rank, but differs between rank {ranks.ranks[0]} and "
        f"rank {ranks.ranks[unlike_rank[0]]}: {unlike_rank[1]}"
    )


def _shared_record(saved: PartState) -> Any:
    """Return the part of a part's record that must be the same on every rank."""
    return saved.record if saved.agreement == "equal" else None


def _refuse_duplicates(parts: Mapping[str, PartState]) -> None:
    """Raise CheckpointError for two values with the same name: a checkpoint can hold only one.

    Raises:
        CheckpointError: two values have the same name; the error names the first.
    """
    seen: set[str] = set()
    for part, saved in parts.items():
        for name in [
            *(tensor.name for tensor in (*saved.tensors, *saved.own_tensors)),
            *saved.aliases,
        ]:
            if name in seen:
                raise CheckpointError(
                    f"{part}: two values would be saved under the name {name}. Rename one of the "
                    "keys; note that a '.' in a key separates levels, and that 1 and '1' are the "
                    "same key."
                )
            seen.add(name)
