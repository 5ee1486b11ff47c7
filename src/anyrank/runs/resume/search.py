"""Finds the step that a resume restores: the newest undamaged one. Corrupt steps are renamed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from anyrank.errors import CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.block_sums import sums_name
from anyrank.files.json_codec import reading_record
from anyrank.files.listing import Listing, TensorFill
from anyrank.files.manifest import Manifest, data_name, index_name, read_manifest
from anyrank.files.storage import Storage, join_path
from anyrank.runs.resume.options import ResumeArguments
from anyrank.runs.resume.source import ResumeSource, loader_counts
from anyrank.runs.saving.run_folder import DAMAGED, RunFolder
from anyrank.runs.state.part_types import PartMatch, PartSource
from anyrank.runs.state.resume_report import Outcome, SavedOn
from anyrank.runs.state.train_state import TrainState
from anyrank.sources.rank_index import RankIndex, read_indexes
from anyrank.sources.run_step import ASIDE
from anyrank.sources.step_index import INDEX, parse
from anyrank.sources.step_listing import StepLocator, own_tensors_of
from anyrank.tensors.spec import StoredTensor
from anyrank.training.random_state.saved import SavedGenerators, from_json
from anyrank.world.device import read_threads
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")

Bring: TypeAlias = Callable[[Sequence[str]], None]

VERIFIED = "every byte that was read, by checksum"
SIZES_VERIFIED = "sizes of all files, checksums of the indexes"


@dataclass(kw_only=True)
class StepOfRun(ResumeSource):
    """A step of a run whose files are complete by their names and sizes.

    Attributes:
        candidate: the step, from the search.
        manifest: manifest of the step.
        locator: finds its bytes.
        bring: makes files of the step readable on this rank, by their names; None if all can be
            read. Collective.
        own_parts: one rank's records of the parts in which the ranks differed.
        skipped_notes: the reason for each newer step that was skipped and is not in the folder.
    """

    candidate: Candidate
    manifest: Manifest
    locator: StepLocator
    bring: Bring | None
    own_parts: Mapping[str, Any]
    skipped_notes: list[str] = field(default_factory=list[str])

    @property
    def is_on_disk(self) -> bool:
        """True if its files are in the run's folder."""
        return self.bring is None

    def match(
        self, state: TrainState, arguments: ResumeArguments, ranks: Ranks
    ) -> dict[str, PartMatch]:
        parts, manifest = state.parts, self.manifest
        saved = [name for name in manifest.parts if name not in arguments.skip]
        records = {name: self._record(name) for name in saved if name in parts.by_name}
        same_ranks = self.saved_on.ranks == ranks.size
        fresh, drop = tuple(arguments.fresh), tuple(arguments.drop)
        joins = arguments.settings == "script"
        part_source = PartSource(
            self.listing, self.saved_on.ranks, same_ranks, fresh, drop, joins=joins
        )
        try:
            matched = parts.match(records, part_source, ranks.index)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # It does not prove corruption: the state_dict() of a part may have raised it.
            raise CheckpointError(
                f"{self.path} does not match the state: {type(error).__name__}: {error}"
            ) from error
        for name in sorted({*saved, *parts.by_name} - {*records, *arguments.skip}):
            has, lacks, way_out = "checkpoint", "TrainState", "ignore it"
            if name not in saved:
                has, lacks, way_out = "TrainState", "checkpoint", "leave it unchanged"
            problem = f"the {has} has the part {name}, but the {lacks} does not. Pass the same "
            problem += f"parts to TrainState, or {way_out} with skip=[{name!r}]."
            matched[name] = PartMatch(Outcome("exact"), problems=[problem])
        return matched

    def _record(self, name: str) -> Any:
        """Return the saved record of a part; if the ranks differed, with one rank's state."""
        record = self.manifest.parts[name]
        if not (isinstance(record, dict) and "by_rank" in record):
            return record
        return record | {"tree": self.own_parts[name]}

    def locate(self, fills: Sequence[TensorFill], ranks: Ranks) -> tuple[Listing, list[TensorFill]]:
        locator, threads = self.locator, read_threads(ranks.ranks_on_node)
        wanted = [(fill.stored, fill.target.pieces) for fill in fills]
        met = locator.ranks_for(wanted)
        if self.bring is not None:
            self.bring([index_name(rank) for rank in sorted(met)])

        def find() -> list[StoredTensor]:
            with _naming_step(self.path):
                locator.read(met, threads)
                return locator.with_chunks(wanted)

        located = ranks.run("reading the ranks' indexes", find)
        files = {chunk.file for stored in located for chunk in stored.chunks}
        if self.bring is not None:
            names = [data_name(rank) for rank in sorted(files)]
            self.bring([*names, *map(sums_name, names)])

        def look() -> Listing:
            with _naming_step(self.path):
                return locator.open(files, threads)

        listing = ranks.run("looking at the ranks' files", look)
        pairs = zip(fills, located, strict=True)
        return listing, [replace(fill, stored=stored) for fill, stored in pairs]

    def notes(self) -> list[str]:
        return self.skipped_notes


@dataclass(frozen=True)
class Candidate:
    """A step that may be resumed.

    Attributes:
        manifest: its manifest; None if it cannot be read.
        index: the bytes of its index; None if it is corrupt.
        damage: description of the corruption, or None.
    """

    step: int
    name: str
    manifest: Manifest | None = None
    index: bytes | None = None
    damage: str | None = None


class StepSearch:
    """Searches the steps of a run's folder, newest first, until one is undamaged, or for one step
    by its number. The same on every rank.

    Corrupt steps are renamed `.aside-damaged-...` and skipped. A read error of the disk or the
    network does not prove corruption, and is raised.
    """

    def __init__(self, folder: RunFolder, number: int | None, verify: bool, ranks: Ranks) -> None:
        self.folder, self.number, self.verify, self.ranks = folder, number, verify, ranks
        self.newest_step = self.newest_samples = 0
        self.reasons: list[str] = []
        self.set_aside: list[str] = []

    def next(self) -> StepOfRun | None:
        """Find the next step that is not visibly corrupt, or the requested one; None if no step
        exists.
        Collective.

        Raises:
            CheckpointError: no step can be used, or the requested one cannot.
        """
        while (candidate := self.find_candidate()) is not None:
            try:
                if candidate.damage is None:
                    return self.open_step(candidate)
                damage = candidate.damage
            except CorruptCheckpoint as error:
                damage = str(error)
            self.reject(candidate, damage)
        if self.reasons:
            raise self._error()
        names = self.ranks.run_on_one("looking for a checkpoint", self.folder.names)
        damaged_names = [name for name in names if name.startswith(f"{ASIDE}{DAMAGED}-")]
        if damaged_names:
            raise CheckpointError(
                f"{self.folder.path}: has only corrupt steps, which were renamed to "
                f"{', '.join(damaged_names)}. Repair one and rename it back to step-N, or start in "
                "an empty folder."
            )
        return None

    def find_candidate(self) -> Candidate | None:
        """Find the newest step that was not rejected. Collective."""
        return self.ranks.run_on_one("looking for a checkpoint", self._find_step)

    def _find_step(self) -> Candidate | None:
        """Find the step to try, with its damage. On one rank."""
        folder, steps = self.folder, self.folder.steps()
        if self.number is not None:
            chosen = [step for step in steps if step.number == self.number]
            if not chosen:
                numbers = ", ".join(str(step.number) for step in steps[:10]) or "none"
                raise CheckpointError(f"{folder.path}: has no step {self.number}; it has {numbers}")
            steps = chosen
        if not steps:
            return None
        number, name, _ = steps[0]
        try:
            manifest, index = folder.examine(name)
            parse(index, join_path(folder.join(name), INDEX), manifest.ranks)
            return Candidate(number, name, manifest, index)
        except CorruptCheckpoint as error:
            manifest = None  # if readable, it says how many samples are lost
            with contextlib.suppress(CheckpointError):
                manifest = read_manifest(folder.store, folder.join(name))
            return Candidate(number, name, manifest, damage=str(error))
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError | LoadError):
                raise unreadable_error(folder.user_path(name), error) from error
            raise

    def open_step(self, candidate: Candidate) -> StepOfRun:
        """Open the step of a candidate that is not visibly corrupt. Collective.

        Raises:
            CorruptCheckpoint: the index of a rank is corrupt.
            CheckpointError: an index cannot be read.
        """
        return self.open_files(candidate, self.folder.store, self.folder.join(candidate.name), None)

    def open_files(
        self, candidate: Candidate, storage: Storage, folder: str, bring: Bring | None
    ) -> StepOfRun:
        """Open a step whose files are in a folder, or are brought there by `bring`. Collective."""
        manifest, ranks = candidate.manifest, self.ranks
        assert manifest is not None
        assert candidate.index is not None
        index = parse(candidate.index, join_path(folder, INDEX), manifest.ranks)
        # The record of one rank goes to the same rank, or the first rank's to every rank.
        own_rank = ranks.index if len(manifest.ranks) == ranks.size else 0
        if bring is not None:
            bring([index_name(own_rank)])
        path = self.folder.user_path(candidate.name)

        def read() -> tuple[RankIndex, SavedGenerators, dict[str, tuple[int, int]]]:
            with _naming_step(path):
                indexes = read_indexes(storage, folder, manifest.ranks, index, [own_rank])
            with reading_record(path):
                generators = from_json(manifest.generators, indexes[own_rank].generators)
                return indexes[own_rank], generators, loader_counts(manifest.parts)

        own_index, generators, counts = ranks.run("reading the rank's index", read)
        own_tensors = own_tensors_of(own_rank, own_index)
        indexes = {own_rank: own_index}
        locator = StepLocator(folder, manifest.ranks, index, own_tensors, indexes=indexes)
        return StepOfRun(
            path=path,
            listing=locator.list_shapes(),
            locator=locator,
            bring=bring,
            own_parts=own_index.parts,
            names=set(manifest.parts),
            step=manifest.step,
            epoch=manifest.epoch,
            samples=manifest.samples,
            loader_counts=counts,
            saved_on=SavedOn(manifest.saved_on["ranks"], manifest.saved_on["layout"]),
            run=manifest.run,
            lineage=manifest.lineage,
            settings=manifest.settings,
            generators=generators,
            differed=manifest.differed,
            verify=self.verify,
            verified=VERIFIED if self.verify else SIZES_VERIFIED,
            lost_steps=max(0, self.newest_step - candidate.step),
            lost_samples=max(0, self.newest_samples - manifest.samples),
            set_aside=self.set_aside,
            candidate=candidate,
            manifest=manifest,
        )

    def reject(self, candidate: Candidate, damage: str) -> None:
        """Skip a corrupt step, and set it aside. Collective.

        Raises:
            CorruptCheckpoint: it is the requested step.
            CheckpointError: it cannot be renamed.
        """
        if self.number is not None:
            raise CorruptCheckpoint(
                f"step {self.number}, requested by its number, is corrupt: {damage}. Resume an "
                "older step, or pass 'auto' to resume the newest undamaged one."
            )
        self.count_lost(candidate, damage)
        self.set_aside.append(
            self.ranks.run_on_one("setting aside", lambda: self._set_aside(candidate, damage))
        )

    def count_lost(self, candidate: Candidate, damage: str) -> None:
        """Count the steps and samples that are lost with a corrupt step."""
        self.newest_step = max(self.newest_step, candidate.step)
        if candidate.manifest is not None:
            self.newest_samples = max(self.newest_samples, candidate.manifest.samples)
        self.reasons.append(damage)

    def _set_aside(self, candidate: Candidate, damage: str) -> str:
        """Set a corrupt step aside; return its new name. On one rank."""
        try:
            return self.folder.set_aside(candidate.name, DAMAGED)
        except CheckpointError as error:
            raise CheckpointError(
                f"{damage}\n  {candidate.name} is corrupt, and cannot be renamed "
                f"({error.__cause__}). Make the folder writable, or resume another step by its "
                "number."
            ) from error

    def _error(self) -> CheckpointError:
        """Make the error for the case that every step is corrupt."""
        path, count = self.folder.path, len(self.reasons)
        renamed = f", and renamed to {', '.join(self.set_aside)}" if self.set_aside else ""
        which = "its only checkpoint is" if count == 1 else f"all {count} checkpoints are"
        return CorruptCheckpoint(f"{path}: {which} corrupt{renamed}. The newest: {self.reasons[0]}")


@contextlib.contextmanager
def _naming_step(path: str) -> Generator[None]:
    """Turn the error of a disk or network into one that says that the step may be undamaged."""
    try:
        yield
    except CorruptCheckpoint:
        raise
    except (CheckpointError, LoadError, OSError) as error:
        is_of_disk = not isinstance(error, CheckpointError)
        if is_of_disk or isinstance(error.__cause__, OSError | LoadError):
            raise unreadable_error(path, error) from error
        raise


def unreadable_error(path: str, error: Exception) -> CheckpointError:
    """Make the error for a failing disk or network, which does not prove that a step is corrupt."""
    return CheckpointError(
        f"{error}\n  {path} may be undamaged, and was not renamed. Try again, or move it out of "
        "the run's folder to resume the previous step."
    )
