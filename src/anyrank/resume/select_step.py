"""Which step a resume restores: the newest that is whole; damaged steps are skipped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.files.listing import Listing
from anyrank.files.manifest import Manifest, read_manifest
from anyrank.formats.run_folder import list_step
from anyrank.resume.records import check_records
from anyrank.saving.peers import Held, PeerMemory
from anyrank.saving.run_store import RunFolder
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")


class Unreadable(CheckpointError):
    """A disk or the network does not return a step's bytes, which is no proof of damage."""


@dataclass(frozen=True)
class Candidate:
    """A step that may be resumed.

    Attributes:
        manifest, listing: what it holds; None where damage hides it.
        damaged: what is damaged, or None.
        unread: why the step could not be read although it may be sound, or None.
        held: for a snapshot in memory, what the machines hold of it.
    """

    step: int
    name: str
    manifest: Manifest | None = None
    listing: Listing | None = None
    damaged: str | None = None
    unread: str | None = None
    held: Held | None = None


@dataclass(frozen=True)
class Selected:
    """A step whose files look whole, and the newer steps that were skipped.

    Attributes:
        newest_step, newest_samples: of the newest step that was seen.
        set_aside: the new names of damaged steps.
        left: names of steps that kept their place, as they could not be read or not be renamed.
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
    left: list[str]
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
    Damaged steps are renamed `.bad-...` and skipped. A step on a disk that does not return its
    bytes is skipped as well, and keeps its name: it may be sound.
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
        self.newest_step = self.newest_samples = self.num_unread = 0
        self.reasons: list[str] = []
        self.set_aside: list[str] = []
        self.left: list[str] = []
        self.notes: list[str] = []

    def next(self) -> Selected | None:
        """The next step that looks whole, or the step asked for; None for an empty folder.
        All ranks.

        Raises:
            CheckpointError: there are steps and none can be used, or not the one asked for.
        """
        while (candidate := self._candidate()) is not None:
            if candidate.damaged is None and candidate.unread is None:
                return self._selected(candidate)
            self._reject(candidate)
        if self.reasons:
            raise self._error()
        bad = self.ranks.from_one("looking for a checkpoint", lambda: _bad(self.folder))
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
        return self.ranks.from_one("looking for a checkpoint", self._look)

    def _is_newest(self, held: Held) -> bool:
        """Whether no file is newer than a snapshot, which is of the files' run. One rank."""
        steps = [step for step in self.folder.claimed() if step[1] not in self.left]
        if steps and steps[0][0] > held.step:
            return False
        try:
            self.folder.check_run(held.run)
        except CheckpointError as error:
            log.warning("%s: a snapshot in memory is not used: %s", held.name, error)
            return False
        return True

    def reject(self, selected: Selected, error: CorruptCheckpoint | Unreadable) -> None:
        """Skip a step whose damage showed when it was read. All ranks.

        Raises:
            CheckpointError: it is the step asked for, or the network did not return its bytes.
        """
        if isinstance(error, CorruptCheckpoint):
            self._reject(replace(selected.candidate, damaged=str(error)))
        elif self.folder.store.renames:
            self._reject(replace(selected.candidate, unread=str(error)))
        else:  # the network: the next try may get through
            raise CheckpointError(str(error), causes=error.causes) from error

    def _look(self) -> Candidate | None:
        return _look(self.folder, self.which, self.left)

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
            left=self.left,
            notes=self.notes,
            verify=self.verify,
            memory=self.memory if candidate.held is not None else None,
        )

    def _reject(self, candidate: Candidate) -> None:
        """Rename a step that is proved to be damaged; leave any other as it is."""
        if self.which not in ("auto", "must"):
            if candidate.damaged is None:
                raise CheckpointError(f"step {self.which} was asked for: {candidate.unread}")
            raise CorruptCheckpoint(
                f"step {self.which} was asked for and is damaged: {candidate.damaged}"
            )
        self.newest_step = max(self.newest_step, candidate.step)
        if candidate.manifest is not None:
            self.newest_samples = max(self.newest_samples, candidate.manifest.samples)
        if candidate.held is not None:
            why = f"{candidate.damaged or candidate.unread}"
            self.reasons.append(why)
            self._note(f"skipped: the snapshot of step {candidate.step} in memory: {why}")
            return
        if candidate.damaged is None:
            self.num_unread += 1
            self._leave(candidate, f"{candidate.unread}", f"cannot be read: {candidate.unread}")
            return
        aside, refusal = self.ranks.from_one(
            "setting aside", lambda: self._set_aside(candidate.name)
        )
        if aside is None:
            why = f"is damaged and cannot be renamed: {refusal}"
            self._leave(candidate, candidate.damaged, why)
            return
        self.reasons.append(candidate.damaged)
        self.set_aside.append(aside)

    def _set_aside(self, name: str) -> tuple[str | None, str]:
        """The new name, or None and why there is none. One rank."""
        try:
            return self.folder.set_aside(name, "bad-damaged"), ""
        except CheckpointError as error:
            return None, str(error)

    def _leave(self, candidate: Candidate, reason: str, why: str) -> None:
        self.reasons.append(reason)
        self.left.append(candidate.name)
        self._note(f"skipped and left as it is: {candidate.name} {why}")

    def _note(self, note: str) -> None:
        self.notes.append(note)
        if self.ranks.index == 0:
            log.warning("%s: LOST: %s", self.folder.path, self.notes[-1])

    def _error(self) -> CheckpointError:
        """What to raise when there is no other step."""
        path, count = self.folder.path, len(self.reasons)
        if self.num_unread:
            return CheckpointError(
                f"{path}: none of {count} checkpoints can be used, and {self.num_unread} may be "
                f"sound but cannot be read; the newest: {self.reasons[0]}"
            )
        aside = f", and were set aside as {', '.join(self.set_aside)}" if self.set_aside else ""
        return CorruptCheckpoint(
            f"{path}: all {count} checkpoints are damaged{aside}; the newest: {self.reasons[0]}"
        )


def _bad(folder: RunFolder) -> list[str]:
    return [name for name in folder.names() if name.startswith(".bad-")]


def _look(folder: RunFolder, which: str | int, left: list[str]) -> Candidate | None:
    """The step to try, with what is wrong with it. One rank."""
    steps = [step for step in folder.claimed() if step[1] not in left]
    if which not in ("auto", "must"):
        chosen = [(step, name) for step, name in steps if step == which]
        if not chosen:
            there = ", ".join(str(step) for step, _ in steps[:10]) or "none"
            raise CheckpointError(f"{folder.path}: has no step {which}; it has {there}")
        steps = chosen
    if not steps:
        return None
    step, name = steps[0]
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
        if which == step or not folder.may_be_sound(error):
            raise
        return Candidate(step, name, unread=str(error))


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
