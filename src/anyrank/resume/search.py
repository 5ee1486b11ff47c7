"""Which step a resume restores: the newest that is whole; damaged steps are set aside."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from anyrank.errors import CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.listing import Listing
from anyrank.files.manifest import Manifest, read_manifest
from anyrank.formats.run_folder import ASIDE, list_step
from anyrank.random_state.saved_streams import SavedStreams, from_json
from anyrank.resume.options import ResumeArguments
from anyrank.resume.source import ResumeSource
from anyrank.saving.run_store import DAMAGED, RunFolder
from anyrank.state.part_types import Matched, Stored
from anyrank.state.report import Outcome, SavedOn
from anyrank.state.train_state import TrainState
from anyrank.world.ranks import Ranks

if TYPE_CHECKING:
    from anyrank.peers.memory import Held, PeerMemory

log = logging.getLogger("anyrank.resume")

VERIFIED = "every byte that was read, by checksum"
SIZES_VERIFIED = "sizes of all files, checksums of the small ones"


@dataclass(kw_only=True)
class StepOfRun(ResumeSource):
    """A step of a run whose files look whole.

    Attributes:
        candidate: what the search knows of it.
        manifest: of the step.
        skipped_notes: why newer snapshots were skipped, in sentences.
        memory: for a snapshot, where it is.
    """

    candidate: Candidate
    manifest: Manifest
    skipped_notes: list[str] = field(default_factory=list[str])
    memory: PeerMemory | None = None

    def match(
        self, state: TrainState, arguments: ResumeArguments, ranks: Ranks
    ) -> dict[str, Matched]:
        with _readable_records(self.path, CheckpointError):  # raised in a part's own code, perhaps
            return self._match(state, arguments, ranks)

    def _match(
        self, state: TrainState, arguments: ResumeArguments, ranks: Ranks
    ) -> dict[str, Matched]:
        inner, manifest = state.parts, self.manifest
        saved = [name for name in manifest.parts if name not in arguments.skip]
        records = {name: manifest.parts[name] for name in saved if name in inner.parts}
        same_ranks = self.saved_on.ranks == ranks.size
        stored = Stored(self.listing, self.saved_on.ranks, same_ranks, tuple(arguments.fresh))
        matched = inner.match(records, stored, ranks.index)
        for name in sorted({*saved, *inner.parts} - {*records, *arguments.skip}):
            has, lacks = ("checkpoint", "state") if name in saved else ("state", "checkpoint")
            problem = f"the {has} has {name}, the {lacks} does not: give the same parts, or leave "
            problem += f"it as it is with skip=[{name!r}]"
            matched[name] = Matched(Outcome("exact"), problems=[problem])
        return matched

    def notes(self) -> list[str]:
        return self.skipped_notes

    def bring(self, listing: Listing, files: Iterable[int]) -> Listing:
        held = self.candidate.held
        if self.memory is None or held is None or listing is not self.listing:
            return listing
        return self.memory.bring(held, listing, files)


@dataclass(frozen=True)
class Candidate:
    """A step that may be resumed, in files or in memory.

    Attributes:
        manifest, listing, streams: what it holds; None where damage hides it.
        damaged: what is damaged, or None.
        held: for a snapshot in memory, what the machines hold of it.
    """

    step: int
    name: str
    manifest: Manifest | None = None
    listing: Listing | None = None
    streams: SavedStreams | None = None
    damaged: str | None = None
    held: Held | None = None


class StepSearch:
    """The steps of a run, the newest first, until one is whole. Equal on all ranks.

    Steps are files, and snapshots in memory, which are read where both are as new.
    Damaged steps are renamed `.aside-damaged-...` and skipped. A step whose bytes the disk or the
    network does not return is an error: it may be sound.
    """

    def __init__(
        self,
        folder: RunFolder,
        which: str | int,
        verify: bool,
        ranks: Ranks,
        memory: PeerMemory | None = None,
    ) -> None:
        self.folder, self.which, self.verify, self.ranks = folder, which, verify, ranks
        self.memory = memory if which in ("auto", "must") else None
        self.snapshots = self.memory.whole() if self.memory is not None else []
        self.newest_step = self.newest_samples = 0
        self.reasons: list[str] = []
        self.set_aside: list[str] = []
        self.notes: list[str] = []

    def next(self) -> StepOfRun | None:
        """The next step that looks whole, or the step asked for; None for an empty folder.
        All ranks.

        Raises:
            CheckpointError: there are steps and none can be used, or not the one asked for.
        """
        while (candidate := self._candidate()) is not None:
            if candidate.damaged is None:
                return self._step(candidate)
            self._reject(candidate)
        if self.reasons:
            raise self._error()
        bad = self.ranks.from_one(
            "looking for a checkpoint", lambda: _set_aside_before(self.folder)
        )
        if bad:
            raise CheckpointError(
                f"{self.folder.path}: has no checkpoint but damaged ones set aside "
                f"({', '.join(bad)}): repair one and rename it, or start in an empty folder"
            )
        return None

    def reject(self, step: StepOfRun, error: CorruptCheckpoint) -> None:
        """Skip a step whose damage showed when it was read. All ranks.

        Raises:
            CorruptCheckpoint: it is the step asked for.
            CheckpointError: it cannot be renamed.
        """
        self._reject(replace(step.candidate, damaged=str(error)))

    def _candidate(self) -> Candidate | None:
        """The newest step that was not rejected, in memory or in files. All ranks."""
        held = self.snapshots[0] if self.snapshots else None
        candidate = self.ranks.from_one("looking for a checkpoint", lambda: self._look(held))
        if candidate is None or candidate.held is None:
            return candidate
        del self.snapshots[0]
        newest = candidate.held
        return self.ranks.from_one(
            "looking at a snapshot", lambda: self._look_in_memory(newest), newest.holder
        )

    def _look(self, held: Held | None) -> Candidate | None:
        """The step to try, with what is wrong with it; of a snapshot, its name alone. One rank."""
        folder, steps = self.folder, self.folder.steps()
        if self.which not in ("auto", "must"):
            chosen = [step for step in steps if step.number == self.which]
            if not chosen:
                there = ", ".join(str(step.number) for step in steps[:10]) or "none"
                raise CheckpointError(f"{folder.path}: has no step {self.which}; it has {there}")
            steps = chosen
        if held is not None and (not steps or steps[0].number <= held.step) and self._is_ours(held):
            return Candidate(held.step, held.name, held=held)
        if not steps:
            return None
        number, name, _ = steps[0]
        try:
            manifest, small = folder.examine(name)
            listing = list_step(folder.store, folder.join(name), manifest, small)
            streams = _streams_of(manifest, folder.join(name))
            return Candidate(number, name, manifest, listing, streams)
        except CorruptCheckpoint as error:
            manifest = None  # it may be sound itself, and show how much is lost
            with contextlib.suppress(CheckpointError):
                manifest = read_manifest(folder.store, folder.join(name))
            return Candidate(number, name, manifest, damaged=str(error))
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError | LoadError):
                raise unreadable(folder.shown(name), error) from error
            raise

    def _is_ours(self, held: Held) -> bool:
        """Whether a snapshot is of the files' run. One rank."""
        try:
            self.folder.check_run(held.run)
        except CheckpointError as error:
            log.warning("%s: a snapshot in memory is not used: %s", held.name, error)
            return False
        return True

    def _look_in_memory(self, held: Held) -> Candidate:
        """A snapshot, with what is wrong with it. On its holder."""
        assert self.memory is not None
        try:
            manifest, listing = self.memory.examine(held)
            streams = _streams_of(manifest, self.memory.folder.join(held.name))
            return Candidate(held.step, held.name, manifest, listing, streams, held=held)
        except CheckpointError as error:
            return Candidate(held.step, held.name, damaged=str(error), held=held)

    def _step(self, candidate: Candidate) -> StepOfRun:
        manifest, listing = candidate.manifest, candidate.listing
        assert manifest is not None
        assert listing is not None
        memory = None if candidate.held is None else self.memory
        folder = self.folder if memory is None else memory.folder
        return StepOfRun(
            path=folder.shown(candidate.name),
            listing=listing,
            names=set(manifest.parts),
            step=manifest.step,
            epoch=manifest.epoch,
            samples=manifest.samples,
            saved_on=SavedOn(manifest.saved_on["ranks"], manifest.saved_on["layout"]),
            run=manifest.run,
            lineage=manifest.lineage,
            streams=candidate.streams,
            differed=manifest.differed,
            verify=self.verify,
            verified=VERIFIED if self.verify else SIZES_VERIFIED,
            lost_steps=max(0, self.newest_step - candidate.step),
            lost_samples=max(0, self.newest_samples - manifest.samples),
            set_aside=self.set_aside,
            candidate=candidate,
            manifest=manifest,
            skipped_notes=self.notes,
            memory=memory,
        )

    def _reject(self, candidate: Candidate) -> None:
        """Set a damaged step aside, and go on to the next."""
        if self.which not in ("auto", "must"):
            raise CorruptCheckpoint(
                f"step {self.which} was asked for and is damaged: {candidate.damaged}"
            )
        self.newest_step = max(self.newest_step, candidate.step)
        if candidate.manifest is not None:
            self.newest_samples = max(self.newest_samples, candidate.manifest.samples)
        self.reasons.append(f"{candidate.damaged}")
        if candidate.held is not None:
            note = f"skipped: the snapshot of step {candidate.step} in memory: {candidate.damaged}"
            self.notes.append(note)
            if self.ranks.index == 0:
                log.warning("%s: LOST: %s", self.folder.path, note)
            return
        self.set_aside.append(
            self.ranks.from_one(
                "setting aside", lambda: self.folder.set_aside(candidate.name, DAMAGED)
            )
        )

    def _error(self) -> CheckpointError:
        """What to raise when there is no other step."""
        path, count = self.folder.path, len(self.reasons)
        aside = f", and were set aside as {', '.join(self.set_aside)}" if self.set_aside else ""
        return CorruptCheckpoint(
            f"{path}: all {count} checkpoints are damaged{aside}; the newest: {self.reasons[0]}"
        )


def _streams_of(manifest: Manifest, path: str) -> SavedStreams:
    """The random streams of a step.

    Raises:
        CorruptCheckpoint: a save does not write such ones.
    """
    with _readable_records(path, CorruptCheckpoint):
        return from_json(manifest.streams)


@contextlib.contextmanager
def _readable_records(path: str, kind: type[CheckpointError]) -> Generator[None]:
    """Around what reads the manifest's records, which have a checksum and so are as they were
    written.

    Raises:
        CheckpointError: of the given kind: they are not what a save writes.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise kind(
            f"{path} does not fit the state: its manifest is not what a save writes: "
            f"{type(error).__name__}: {error}"
        ) from error


def unreadable(path: str, error: Exception) -> CheckpointError:
    """The error of a step whose bytes a disk or the network does not return: no proof of damage."""
    return CheckpointError(
        f"{error}\n  {path} may be sound, and stays: try again, or move it out of the run's folder "
        "to go on from the step before"
    )


def _set_aside_before(folder: RunFolder) -> list[str]:
    return [name for name in folder.names() if name.startswith(f"{ASIDE}{DAMAGED}-")]
