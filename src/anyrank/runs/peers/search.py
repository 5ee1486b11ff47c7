"""The search of a resume among a run's steps and the snapshots in its machines' memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from anyrank.errors import CheckpointError
from anyrank.files.listing import FileInfo, Listing
from anyrank.files.manifest import read_manifest, step_name
from anyrank.files.storage import LocalStorage, join_path
from anyrank.runs.resume.search import Candidate, StepOfRun, StepSearch
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.sources.run_step import list_step
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")


@dataclass
class PeerSnapshot:
    """A snapshot all of whose files are on the machines.

    Attributes:
        path: of its folder on this machine.
        step, run, written: of its manifest.
        holder: global rank that can read the manifest and the index.
        sizes: of its files.
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
        """It as a candidate, with its damage. On its holder."""
        name = step_name(self.step)
        try:
            manifest = read_manifest(LocalStorage(), self.path)
            listing = list_step(_SnapshotStorage(self.path, self.sizes), self.path, manifest)
        except CheckpointError as error:
            return SnapshotCandidate(self.step, name, damage=str(error), snapshot=self)
        return SnapshotCandidate(self.step, name, manifest, listing, snapshot=self)


class _SnapshotStorage(LocalStorage):
    """Finds the files of a snapshot by their known sizes, also if they are on other machines."""

    def __init__(self, folder: str, sizes: Mapping[str, int]) -> None:
        self.sizes = {join_path(folder, name): size for name, size in sizes.items()}

    def find(self, path: str) -> FileInfo | None:
        return FileInfo(path, self.sizes[path], "") if path in self.sizes else None


@dataclass(frozen=True)
class SnapshotCandidate(Candidate):
    """A candidate that is a snapshot."""

    snapshot: PeerSnapshot = field(kw_only=True)


class SnapshotSearch(StepSearch):
    """As `StepSearch`, of the folder's steps and of snapshots, which are read if both are equally
    new. Damaged snapshots are skipped, and stay where they are.

    Args:
        folder, verify, ranks: as for `StepSearch`.
        snapshots: the newest first.
        bring: makes files of a snapshot readable on this rank. Called by all ranks.
    """

    def __init__(
        self,
        folder: RunFolder,
        verify: bool,
        ranks: Ranks,
        snapshots: Sequence[PeerSnapshot],
        bring: Callable[[PeerSnapshot, Listing, Iterable[int]], Listing],
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
        return replace(candidate, snapshot=snapshot)  # each machine has a folder of its own

    def _is_next(self, snapshot: PeerSnapshot) -> bool:
        """Whether a snapshot is of this run, and no step of the folder is newer. One rank."""
        steps = self.folder.steps()
        if steps and steps[0].number > snapshot.step:
            return False
        try:
            self.folder.check_run(snapshot.run)
        except CheckpointError as error:
            log.warning("%s: a snapshot in memory is not used: %s", snapshot.path, error)
            return False
        return True

    def open_step(self, candidate: Candidate) -> StepOfRun:
        step = super().open_step(candidate)
        step.skipped_notes = self.notes
        if isinstance(candidate, SnapshotCandidate):
            snapshot = candidate.snapshot
            step.path, step.bring = snapshot.path, partial(self.bring, snapshot)
        return step

    def reject(self, candidate: Candidate, damage: str) -> None:
        if not isinstance(candidate, SnapshotCandidate):
            super().reject(candidate, damage)
            return
        self.count_lost(candidate, damage)
        note = f"skipped: the snapshot of step {candidate.step} in memory: {damage}"
        self.notes.append(note)
        if self.ranks.index == 0:
            log.warning("%s: LOST: %s", self.folder.path, note)
