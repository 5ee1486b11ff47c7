"""The search of a resume among a run's steps and the snapshots in its machines' memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from anyrank.errors import CheckpointError
from anyrank.files.manifest import read_manifest, step_name
from anyrank.files.storage import LocalStorage, join_path
from anyrank.runs.resume.search import Candidate, StepOfRun, StepSearch
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.sources.run_step import read_index
from anyrank.sources.step_index import INDEX, parse
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")


@dataclass
class PeerSnapshot:
    """A snapshot with all of its files on the machines.

    Attributes:
        path: path of its folder on this machine.
        step, run, written: those of its manifest.
        holder: global rank that can read the manifest and the index.
        sizes: sizes of its files.
        machines: file -> indices of the machines that hold it.
    """

    path: str
    step: int
    run: str
    written: str
    holder: int
    sizes: dict[str, int]
    machines: dict[str, list[int]]

    def examine(self) -> SnapshotCandidate:
        """Return it as a candidate, with its damage. Only on its holder."""
        name = step_name(self.step)
        try:
            manifest = read_manifest(LocalStorage(), self.path)
            index = read_index(LocalStorage(), self.path, manifest)
            parse(index, join_path(self.path, INDEX), manifest.ranks)
        except CheckpointError as error:
            return SnapshotCandidate(self.step, name, damage=str(error), snapshot=self)
        return SnapshotCandidate(self.step, name, manifest, index, snapshot=self)


@dataclass(frozen=True)
class SnapshotCandidate(Candidate):
    """A candidate that is a snapshot."""

    snapshot: PeerSnapshot = field(kw_only=True)


class SnapshotSearch(StepSearch):
    """Searches the folder's steps and the snapshots; a snapshot is read if both are equally new.
    Corrupt snapshots are skipped, and not moved.

    Args:
        folder, verify, ranks: as for `StepSearch`.
        snapshots: snapshots, newest first.
        bring: makes files of a snapshot readable on this rank. Collective.
    """

    def __init__(
        self,
        folder: RunFolder,
        verify: bool,
        ranks: Ranks,
        snapshots: Sequence[PeerSnapshot],
        bring: Callable[[PeerSnapshot, Sequence[str]], None],
    ) -> None:
        super().__init__(folder, None, verify, ranks)
        self.snapshots, self.bring = [*snapshots], bring
        self.notes: list[str] = []

    def find_candidate(self) -> Candidate | None:
        snapshot = self.snapshots[0] if self.snapshots else None
        what = "looking for a checkpoint"
        if snapshot is None or not self.ranks.run_on_one(what, lambda: self._is_next(snapshot)):
            return super().find_candidate()
        del self.snapshots[0]
        candidate = self.ranks.run_on_one(what, snapshot.examine, snapshot.holder)
        return replace(candidate, snapshot=snapshot)  # each machine has its own folder

    def _is_next(self, snapshot: PeerSnapshot) -> bool:
        """Return True if a snapshot is of this run and the folder has no newer step. On one
        rank."""
        steps = self.folder.steps()
        if steps and steps[0].number > snapshot.step:
            return False
        try:
            self.folder.check_run(snapshot.run)
        except CheckpointError as error:
            log.warning("%s: an in-memory snapshot is not used: %s", snapshot.path, error)
            return False
        return True

    def open_step(self, candidate: Candidate) -> StepOfRun:
        if isinstance(candidate, SnapshotCandidate):
            snapshot = candidate.snapshot
            bring = partial(self.bring, snapshot)
            step = self.open_files(candidate, LocalStorage(), snapshot.path, bring)
            step.path = snapshot.path
        else:
            step = super().open_step(candidate)
        step.skipped_notes = self.notes
        return step

    def reject(self, candidate: Candidate, damage: str) -> None:
        if not isinstance(candidate, SnapshotCandidate):
            super().reject(candidate, damage)
            return
        self.count_lost(candidate, damage)
        note = f"skipped: the in-memory snapshot of step {candidate.step}: {damage}"
        self.notes.append(note)
        if self.ranks.index == 0:
            log.warning("%s: LOST: %s", self.folder.path, note)
