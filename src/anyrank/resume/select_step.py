"""Which step a resume restores: the newest that is whole; damaged steps are skipped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from anyrank.errors import CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.listing import Listing
from anyrank.files.manifest import Manifest, read_manifest
from anyrank.formats.run_folder import list_step
from anyrank.resume.records import check_records
from anyrank.saving.peers import Held, PeerMemory
from anyrank.saving.run_store import ASIDE, DAMAGED, RunFolder
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")


def unreadable(path: str, error: Exception) -> CheckpointError:
    """The error of a step whose bytes a disk or the network does not return: no proof of damage."""
    return CheckpointError(
        f"{error}\n  {path} may be sound, and stays: try again, or move it out of the run's folder "
        "to go on from the step before"
    )


@dataclass(frozen=True)
class Candidate:
    """A step that may be resumed.

    Attributes:
        manifest, listing: what it holds; None where damage hides it.
        damaged: what is damaged, or None.
        held: for a snapshot in memory, what the machines hold of it.
    """

    step: int
    name: str
    manifest: Manifest | None = None
    listing: Listing | None = None
    damaged: str | None = None
    held: Held | None = None


@dataclass(frozen=True)
class Selected:
    """A step whose files look whole, and the newer steps that were skipped.

    Attributes:
        newest_step, newest_samples: of the newest step that was seen.
        set_aside: the new names of damaged steps.
        notes: why, in sentences.
        verify: whether what is read is compared with its checksums.
        memory: for a snapshot, where it is.
    """

    candidate: Candidate
    manifest: Manifest
    listing: Listing
    newest_step: int
    newest_samples: int
    set_aside: list[str]
    notes: list[str]
    verify: bool
    memory: PeerMemory | None = None

    @property
    def name(self) -> str:
        """The step's folder."""
        return self.candidate.name

    def bring(self, listing: Listing, files: Iterable[int]) -> Listing:
        """Let this rank have the files that it reads; the listing with their places. All ranks."""
        held = self.candidate.held
        if self.memory is None or held is None or listing is not self.listing:
            return listing
        return self.memory.bring(held, listing, files)


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

    def next(self) -> Selected | None:
        """The next step that looks whole, or the step asked for; None for an empty folder.
        All ranks.

        Raises:
            CheckpointError: there are steps and none can be used, or not the one asked for.
        """
        while (candidate := self._candidate()) is not None:
            if candidate.damaged is None:
                return self._selected(candidate)
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

    def _candidate(self) -> Candidate | None:
        """The newest step that was not rejected, in memory or in files. All ranks."""
        if self.memory is not None and self.snapshots:
            memory, held = self.memory, self.snapshots[0]
            if self.ranks.from_one("comparing memory and files", lambda: self._is_newest(held)):
                del self.snapshots[0]
                return self.ranks.from_one(
                    "looking at a snapshot", lambda: _look_in_memory(memory, held), held.holder
                )
        return self.ranks.from_one(
            "looking for a checkpoint", lambda: _look(self.folder, self.which)
        )

    def _is_newest(self, held: Held) -> bool:
        """Whether no file is newer than a snapshot, which is of the files' run. One rank."""
        steps = self.folder.steps()
        if steps and steps[0].number > held.step:
            return False
        try:
            self.folder.check_run(held.run)
        except CheckpointError as error:
            log.warning("%s: a snapshot in memory is not used: %s", held.name, error)
            return False
        return True

    def reject(self, selected: Selected, error: CorruptCheckpoint) -> None:
        """Skip a step whose damage showed when it was read. All ranks.

        Raises:
            CorruptCheckpoint: it is the step asked for.
            CheckpointError: it cannot be renamed.
        """
        self._reject(replace(selected.candidate, damaged=str(error)))

    def _selected(self, candidate: Candidate) -> Selected:
        manifest, listing = candidate.manifest, candidate.listing
        assert manifest is not None
        assert listing is not None
        return Selected(
            candidate,
            manifest,
            listing,
            newest_step=max(self.newest_step, candidate.step),
            newest_samples=max(self.newest_samples, manifest.samples),
            set_aside=self.set_aside,
            notes=self.notes,
            verify=self.verify,
            memory=self.memory if candidate.held is not None else None,
        )

    def _reject(self, candidate: Candidate) -> None:
        """Rename a step that is damaged, and go on to the next."""
        if self.which not in ("auto", "must"):
            raise CorruptCheckpoint(
                f"step {self.which} was asked for and is damaged: {candidate.damaged}"
            )
        self.newest_step = max(self.newest_step, candidate.step)
        if candidate.manifest is not None:
            self.newest_samples = max(self.newest_samples, candidate.manifest.samples)
        self.reasons.append(f"{candidate.damaged}")
        if candidate.held is not None:
            why = f"the snapshot of step {candidate.step} in memory: {candidate.damaged}"
            self._note(f"skipped: {why}")
            return
        self.set_aside.append(
            self.ranks.from_one(
                "setting aside", lambda: self.folder.set_aside(candidate.name, DAMAGED)
            )
        )

    def _note(self, note: str) -> None:
        self.notes.append(note)
        if self.ranks.index == 0:
            log.warning("%s: LOST: %s", self.folder.path, self.notes[-1])

    def _error(self) -> CheckpointError:
        """What to raise when there is no other step."""
        path, count = self.folder.path, len(self.reasons)
        aside = f", and were set aside as {', '.join(self.set_aside)}" if self.set_aside else ""
        return CorruptCheckpoint(
            f"{path}: all {count} checkpoints are damaged{aside}; the newest: {self.reasons[0]}"
        )


def _set_aside_before(folder: RunFolder) -> list[str]:
    return [name for name in folder.names() if name.startswith(f"{ASIDE}{DAMAGED}-")]


def _look(folder: RunFolder, which: str | int) -> Candidate | None:
    """The step to try, with what is wrong with it. One rank."""
    steps = folder.steps()
    if which not in ("auto", "must"):
        chosen = [step for step in steps if step.number == which]
        if not chosen:
            there = ", ".join(str(step.number) for step in steps[:10]) or "none"
            raise CheckpointError(f"{folder.path}: has no step {which}; it has {there}")
        steps = chosen
    if not steps:
        return None
    step, name, _ = steps[0]
    try:
        manifest, small = folder.examine(name)
        listing = list_step(folder.store, folder.join(name), manifest, small)
        check_records(manifest, listing.tensors, folder.join(name))
        return Candidate(step, name, manifest, listing)
    except CorruptCheckpoint as error:
        manifest = None  # it may be sound itself, and show how much is lost
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(folder.store, folder.join(name))
        return Candidate(step, name, manifest, damaged=str(error))
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError | LoadError):
            raise unreadable(folder.shown(name), error) from error
        raise


def _look_in_memory(memory: PeerMemory, held: Held) -> Candidate:
    """A snapshot, with what is wrong with it. On its holder."""
    try:
        manifest, listing = memory.examine(held)
        check_records(manifest, listing.tensors, memory.folder.join(held.name))
        return Candidate(held.step, held.name, manifest, listing, held=held)
    except CheckpointError as error:
        return Candidate(held.step, held.name, damaged=str(error), held=held)


def verified_in_words(verify: bool) -> str:
    """What a resume has compared, for its report."""
    if verify:
        return "every byte that was read, by checksum"
    return "sizes of all files, checksums of the small ones"
