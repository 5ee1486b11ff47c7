"""Finds the step that a resume restores: the newest whole one. Damaged steps are set aside."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field

from anyrank.errors import CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.json_codec import reading_record
from anyrank.files.listing import Listing
from anyrank.files.manifest import Manifest, read_manifest
from anyrank.runs.resume.options import ResumeArguments
from anyrank.runs.resume.source import ResumeSource
from anyrank.runs.saving.run_folder import DAMAGED, RunFolder
from anyrank.runs.state.part_types import PartMatch, PartSource
from anyrank.runs.state.resume_report import Outcome, SavedOn
from anyrank.runs.state.train_state import TrainState
from anyrank.sources.run_step import ASIDE, list_step
from anyrank.training.random_state.saved_streams import from_json
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")

VERIFIED = "every byte that was read, by checksum"
SIZES_VERIFIED = "sizes of all files, checksums of the small ones"


@dataclass(kw_only=True)
class StepOfRun(ResumeSource):
    """A step of a run whose files look whole.

    Attributes:
        candidate: the step as the search found it.
        manifest: manifest of the step.
        skipped_notes: the reason for each newer step that was skipped and is not in the folder.
    """

    candidate: Candidate
    manifest: Manifest
    skipped_notes: list[str] = field(default_factory=list[str])

    @property
    def is_on_disk(self) -> bool:
        """Whether its files are in the run's folder."""
        return self.bring is None

    def match(
        self, state: TrainState, arguments: ResumeArguments, ranks: Ranks
    ) -> dict[str, PartMatch]:
        inner, manifest = state.parts, self.manifest
        saved = [name for name in manifest.parts if name not in arguments.skip]
        records = {name: manifest.parts[name] for name in saved if name in inner.parts}
        same_ranks = self.saved_on.ranks == ranks.size
        fresh, drop = tuple(arguments.fresh), tuple(arguments.drop)
        joins = arguments.settings == "script"
        part_source = PartSource(
            self.listing, self.saved_on.ranks, same_ranks, fresh, drop, joins=joins
        )
        try:
            matched = inner.match(records, part_source, ranks.index)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # It does not prove damage: the state_dict() of a part may have raised it.
            raise CheckpointError(
                f"{self.path} does not fit the state: {type(error).__name__}: {error}"
            ) from error
        for name in sorted({*saved, *inner.parts} - {*records, *arguments.skip}):
            has, lacks = ("checkpoint", "state") if name in saved else ("state", "checkpoint")
            problem = f"the {has} has {name}, the {lacks} does not: give the same parts, or leave "
            problem += f"it as it is with skip=[{name!r}]"
            matched[name] = PartMatch(Outcome("exact"), problems=[problem])
        return matched

    def notes(self) -> list[str]:
        return self.skipped_notes


@dataclass(frozen=True)
class Candidate:
    """A step that may be resumed.

    Attributes:
        manifest, listing: its contents; None if they cannot be read.
        damage: description of what is damaged, or None.
    """

    step: int
    name: str
    manifest: Manifest | None = None
    listing: Listing | None = None
    damage: str | None = None


class StepSearch:
    """Searches the steps of a run's folder, the newest first, until one is whole, or for one step
    by its number. Equal on all ranks.

    Damaged steps are renamed `.aside-damaged-...` and skipped. A read error of the disk or the
    network does not prove damage, and is raised.
    """

    def __init__(self, folder: RunFolder, number: int | None, verify: bool, ranks: Ranks) -> None:
        self.folder, self.number, self.verify, self.ranks = folder, number, verify, ranks
        self.newest_step = self.newest_samples = 0
        self.reasons: list[str] = []
        self.set_aside: list[str] = []

    def next(self) -> StepOfRun | None:
        """Find the next step that looks whole, or the requested one; None for an empty folder.
        All ranks.

        Raises:
            CheckpointError: no step can be used, or not the requested one.
        """
        while (candidate := self.find_candidate()) is not None:
            if candidate.damage is None:
                return self.open_step(candidate)
            self.reject(candidate, candidate.damage)
        if self.reasons:
            raise self._error()
        names = self.ranks.run_on_one("looking for a checkpoint", self.folder.names)
        damaged_names = [name for name in names if name.startswith(f"{ASIDE}{DAMAGED}-")]
        if damaged_names:
            raise CheckpointError(
                f"{self.folder.path}: has no checkpoint but damaged ones, which were set aside "
                f"({', '.join(damaged_names)}): repair and rename one, or start in an empty folder"
            )
        return None

    def find_candidate(self) -> Candidate | None:
        """Find the newest step that was not rejected. All ranks."""
        return self.ranks.run_on_one("looking for a checkpoint", self._find_step)

    def _find_step(self) -> Candidate | None:
        """Find the step to try, with its damage. One rank."""
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
            manifest, small_files = folder.examine(name)
            listing = list_step(folder.store, folder.join(name), manifest, small_files)
            return Candidate(number, name, manifest, listing)
        except CorruptCheckpoint as error:
            manifest = None  # when readable, it says how many samples are lost
            with contextlib.suppress(CheckpointError):
                manifest = read_manifest(folder.store, folder.join(name))
            return Candidate(number, name, manifest, damage=str(error))
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError | LoadError):
                raise unreadable_error(folder.user_path(name), error) from error
            raise

    def open_step(self, candidate: Candidate) -> StepOfRun:
        """Open the step of a candidate that looks whole."""
        manifest, listing = candidate.manifest, candidate.listing
        assert manifest is not None
        assert listing is not None
        path = self.folder.user_path(candidate.name)
        with reading_record(path):
            streams = from_json(manifest.streams)
        return StepOfRun(
            path=path,
            listing=listing,
            names=set(manifest.parts),
            step=manifest.step,
            epoch=manifest.epoch,
            samples=manifest.samples,
            saved_on=SavedOn(manifest.saved_on["ranks"], manifest.saved_on["layout"]),
            run=manifest.run,
            lineage=manifest.lineage,
            settings=manifest.settings,
            streams=streams,
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
        """Skip a damaged step, and set it aside. All ranks.

        Raises:
            CorruptCheckpoint: it is the requested step.
            CheckpointError: it cannot be renamed.
        """
        if self.number is not None:
            raise CorruptCheckpoint(f"step {self.number} was asked for and is damaged: {damage}")
        self.count_lost(candidate, damage)
        self.set_aside.append(
            self.ranks.run_on_one("setting aside", lambda: self._set_aside(candidate, damage))
        )

    def count_lost(self, candidate: Candidate, damage: str) -> None:
        """Count the steps and samples that are lost with a damaged step."""
        self.newest_step = max(self.newest_step, candidate.step)
        if candidate.manifest is not None:
            self.newest_samples = max(self.newest_samples, candidate.manifest.samples)
        self.reasons.append(damage)

    def _set_aside(self, candidate: Candidate, damage: str) -> str:
        """Set a damaged step aside; return its new name. One rank."""
        try:
            return self.folder.set_aside(candidate.name, DAMAGED)
        except CheckpointError as error:
            raise CheckpointError(
                f"{damage}\n  {candidate.name} is damaged, and cannot be set aside "
                f"({error.__cause__}): make the folder writable, or resume another step by its "
                "number"
            ) from error

    def _error(self) -> CheckpointError:
        """Make the error for the case that all steps are damaged."""
        path, count = self.folder.path, len(self.reasons)
        set_aside = f", and were set aside as {', '.join(self.set_aside)}" if self.set_aside else ""
        return CorruptCheckpoint(
            f"{path}: all {count} checkpoints are damaged{set_aside}; the newest: {self.reasons[0]}"
        )


def unreadable_error(path: str, error: Exception) -> CheckpointError:
    """Make the error for a disk or network that fails, which does not prove the step damaged."""
    return CheckpointError(
        f"{error}\n  {path} may be sound, and was not set aside: try again, or move it out of the "
        "run's folder to go on from the step before"
    )
