"""The first half of a save: each rank collects what it would write, and the ranks compare it.
No file of a step is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyrank.errors import CheckpointError
from anyrank.files.manifest import Manifest
from anyrank.models.digests import check_has_memory
from anyrank.models.spreads import spreads_of
from anyrank.runs.saving.compare import StateSummary, check_same, summarize
from anyrank.runs.saving.rank_file import Item, make_items, make_own_items
from anyrank.runs.state.part_types import SHOWN, PartState, shared_tensors
from anyrank.runs.state.replicas import find_differing_replicas, find_identical
from anyrank.runs.state.train_state import TrainState, rank_coords
from anyrank.sources.step_index import StepIndex, index_of
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.writes import WritePlan, plan_writes
from anyrank.training.random_state.saved import (
    GeneratorState,
    RankCoords,
    capture,
)
from anyrank.versions import __version__
from anyrank.wording import join_first
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")


@dataclass(frozen=True)
class Snapshot:
    """The data that one rank writes, and that the first rank writes for the step as a whole.

    Attributes:
        items: boxes of this rank.
        parts: part of the state -> this rank's record of it, if the ranks differ.
        generators: random generator -> its state on this rank, if the ranks differ.
        shared_generators: random generator -> its state, if it is the same on every rank.
        unused_generators: those that no rank has drawn from or seeded.
        coords: position of this rank.
        manifest: manifest of the step; the files are added when they are written.
        plan: plan of what all ranks write of the tensors that they hold together.
        index: index of the step.
    """

    items: list[Item]
    parts: dict[str, Any]
    generators: Mapping[str, GeneratorState]
    shared_generators: dict[str, GeneratorState]
    unused_generators: list[str]
    coords: RankCoords
    manifest: Manifest
    plan: WritePlan
    index: StepIndex


# -- reasons to refuse a save ----------------------------------------------------------------------


def is_within_step(state: TrainState) -> bool:
    """Return True if microbatches were drawn that belong to no completed step."""
    return any(loader.in_step for loader in state.parts.loaders())


def check_boundary(state: TrainState) -> None:
    """Check that a save is possible now: at a step boundary, of a usable state.

    Raises:
        CheckpointError: a step is not complete, or the state is only partly restored.
    """
    state.parts.check_usable()
    if is_within_step(state):
        raise CheckpointError(
            "save() was called in the middle of a step, whose samples are not counted yet. Call it "
            "after the loop body of steps(), or after step_done()."
        )


def warn_about_refusal(state: TrainState, ranks: Ranks) -> None:
    """Warn after the first step, when optimizers have their state, if saves will be impossible.
    Collective.
    """
    problem: str | None = None
    try:
        state.parts.check_optimizers(ranks.index)
    except CheckpointError as error:
        problem = str(error)
    problem = ranks.reduce("looking at the optimizers", problem, _one_of)
    if problem is not None and ranks.index == 0:
        log.warning("after the first step: the next save will fail: %s", problem)


def _one_of(problem: str | None, other: str | None) -> str | None:
    """Return one of the problems of two ranks, the same in either order; None if there is none."""
    return min(filter(None, (problem, other)), default=None)


# -- collect ---------------------------------------------------------------------------------------


def collect(
    state: TrainState, ranks: Ranks, become_writer: Callable[[], None] = lambda: None
) -> Snapshot:
    """Collect what each rank would write now. Collective; no file of a step is written.

    Args:
        state: the state to save.
        ranks: all ranks that hold it.
        become_writer: takes the run's lock for this rank, or raises.

    Raises:
        CheckpointError: something cannot be saved, or ranks differ in what must be the same.
    """
    for loader in state.parts.loaders():
        # A checkpoint with a wrong position would repeat or lose samples in every later resume.
        loader.position.check_receipt(ranks)

    def collect_own() -> tuple[
        tuple[dict[str, PartState], dict[str, GeneratorState]], StateSummary
    ]:
        become_writer()
        inner = state.parts
        parts, states = inner.save(ranks.index), capture(inner.generators)
        for tensor in shared_tensors(parts):
            check_has_memory(tensor.name, tensor.local())
        return (parts, states), summarize(state, parts, states, ranks)

    what = "collecting the state"
    (parts, states), summary = ranks.run_and_reduce(what, collect_own, StateSummary.join)
    _, new_run, saves = summary.first
    tensors = shared_tensors(parts)
    # Before the replicas: tensors that differ in name or layout have no replicas.
    coordinates = check_same(state, parts, summary, ranks)
    records = _build_records(parts, summary)
    _note_identical(state, parts, records, ranks)
    spreads = spreads_of(tensors, coordinates, ranks)
    differed = find_differing_replicas(parts, spreads, saves, state.step, ranks)
    # All use the first rank's count, so that they compare the same ninth in the next save.
    state.parts.saves = saves + 1
    plan = plan_writes(tensors, spreads, ranks.size)
    own_tensors, identical = _split_own(parts, records)
    identical = identical if ranks.index == 0 else []  # which writes them for all
    aliases = {k: name for saved in parts.values() for k, name in saved.aliases.items()}
    index = index_of(tensors, plan, identical, aliases)
    items = make_items(tensors, plan.writes_of(ranks.index))
    items += make_own_items([*own_tensors, *identical], index.numbers)
    own_trees = {part: parts[part].record["tree"] for part in records if "by_rank" in records[part]}
    # A single rank shares nothing with others, and restores its own values.
    alike_generators = summary.generators.keys() if ranks.size > 1 else set[str]()
    return Snapshot(
        items=items,
        parts=own_trees,
        generators={name: s for name, s in states.items() if name not in alike_generators},
        shared_generators={name: states[name] for name in states if name in alike_generators},
        unused_generators=sorted(summary.unused),
        coords=rank_coords(state, ranks),
        manifest=_start_manifest(
            state,
            run=state.run or new_run,
            saved_on={"ranks": ranks.size, "layout": _describe_layout(tensors)},
            records=records,
            differed=differed,
        ),
        plan=plan,
        index=index,
    )


def _start_manifest(
    state: TrainState,
    *,
    run: str,
    saved_on: dict[str, Any],
    records: dict[str, Any],
    differed: list[str],
) -> Manifest:
    """Return the manifest of a step, without its files and the time."""
    samples = state.parts.num_samples()
    return Manifest(
        run=run,
        step=state.step,
        epoch=state.epoch,
        samples=state.samples if samples is None else samples,
        saved_on=saved_on,
        lineage=state.lineage,
        written="",
        versions={"anyrank": __version__, "torch": str(torch.__version__)},
        files={},
        ranks=[],
        parts=records,
        settings=state.parts.settings.record(records),
        differed=differed,
    )


def _note_identical(
    state: TrainState, parts: Mapping[str, PartState], records: dict[str, Any], ranks: Ranks
) -> None:
    """Record unsharded optimizer state that is identical on every rank, beside shards of
    parameters; warn once about what differs, because only the same number of ranks can resume it.
    Collective.
    """
    inner = state.parts
    inner.identical = find_identical(parts, inner.identical, ranks)
    for part, names in inner.identical.items():
        records[part] = {**records[part], "alike": names}
    for part, saved in parts.items():
        names = [_base_name(tensor) for tensor in saved.own_tensors if saved.agreement == "equal"]
        own_names = [name for name in names if name not in inner.identical.get(part, ())]
        key = f"{part} own"
        if own_names and ranks.index == 0 and ranks.size > 1 and key not in inner.warned:
            inner.warned.add(key)
            log.warning(
                "%s: tensors that are not sharded like their parameter differ between ranks (%s). "
                "Such a checkpoint can be resumed only on the same number of ranks with the same "
                "layout. To resume on any number, store them as DTensors (DTensor.from_local).",
                part,
                join_first(own_names, SHOWN),
            )


def _base_name(tensor: ShardedTensor) -> str:
    """Return the name of a rank's own tensor, without the rank."""
    return tensor.name.rpartition("@")[0]


def _split_own(
    parts: Mapping[str, PartState], records: Mapping[str, Any]
) -> tuple[list[ShardedTensor], list[ShardedTensor]]:
    """Split the plain tensors of this rank into those of each rank, and those that are identical on
    every rank.
    """
    own_tensors: list[ShardedTensor] = []
    identical: list[ShardedTensor] = []
    for part, saved in parts.items():
        record = records[part]
        for tensor in saved.own_tensors:
            # An optimizer's were compared one by one, those of other parts with their record.
            is_identical = (
                _base_name(tensor) in record.get("alike", ())
                if saved.agreement == "equal"
                else "by_rank" not in record
            )
            (identical if is_identical else own_tensors).append(tensor)
    return own_tensors, identical


def _build_records(parts: Mapping[str, PartState], summary: StateSummary) -> dict[str, Any]:
    """Build the parts' records; the record of one that differs is in each rank's index."""
    records = {part: saved.record for part, saved in parts.items()}
    for part, compared in summary.records.items():
        if not compared.digest:
            records[part] = {**records[part], "tree": None, "by_rank": True}
    for part, saved in parts.items():
        if saved.unsaved:
            records[part] = {**records[part], "unsaved": saved.unsaved}
    return records


def _describe_layout(tensors: Sequence[ShardedTensor]) -> str:
    """Return a description of the layout that most bytes have on the ranks."""
    bytes_by_layout: dict[str, int] = {}
    for tensor in tensors:
        layout = "replicated" if tensor.layout is None else tensor.layout.in_words()
        nbytes = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
        bytes_by_layout[layout] = bytes_by_layout.get(layout, 0) + nbytes
    return max(bytes_by_layout, key=bytes_by_layout.__getitem__, default="nothing")
