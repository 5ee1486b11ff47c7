"""Snapshots of a run in the memory of its machines, which survives the processes of the ranks.

A snapshot is a step of a run, in a folder of each machine's tmpfs. A machine holds the files of its
own ranks and a copy of the files of the machine before it, so one machine may be lost. A snapshot
exists when machines that together hold all of its files have committed it. `anyrank run` makes the
folder, and removes it at its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import operator
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from anyrank import faults
from anyrank.errors import CheckpointError
from anyrank.files.manifest import Manifest, RankFiles, read_manifest, step_name
from anyrank.files.storage import LocalStorage, absolute, join_path, storing, write_file
from anyrank.runs.peers.search import PeerSnapshot, SnapshotSearch
from anyrank.runs.peers.transfers import FileTransfer, make_folder, send_files
from anyrank.runs.resume.listener import RunListener
from anyrank.runs.resume.options import Cadence
from anyrank.runs.resume.search import StepOfRun, StepSearch
from anyrank.runs.saving.collect import Snapshot, collect
from anyrank.runs.saving.commit import RankRow, describe_step, describe_tensors, write_own_share
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.runs.state.resume_report import ResumeReport
from anyrank.runs.state.train_state import TrainState
from anyrank.settings import PEERS_FOLDER
from anyrank.sources.step_index import INDEX
from anyrank.world.first_ranks import FirstRanks
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")


class PeerMemory(RunListener):
    """The snapshots of one run, as one rank sees them. Every rank keeps and fetches them together.

    Keeps one snapshot, and a second one while that is written.

    Attributes:
        folder: the run's folder in this machine's memory.
    """

    def __init__(
        self, root: str, path: str, state: TrainState, ranks: Ranks, cadence: Cadence
    ) -> None:
        absolute_path = absolute(path)
        key = hashlib.blake2b(absolute_path.encode(), digest_size=8).hexdigest()
        self.folder = RunFolder(LocalStorage(), join_path(root, key))
        self.ranks = ranks
        self._state, self._cadence, self._last = state, cadence, time.monotonic()
        self._has_room = True
        machines = range(len(ranks.hosts))
        self._machine_ranks = [
            [r for r, n in zip(ranks.ranks, ranks.nodes, strict=True) if n == m] for m in machines
        ]

    def open(self) -> None:
        """Make the run's folder, and remove unfinished snapshots. Any rank may call it."""
        with storing(self.folder.path):
            make_folder(self.folder.path)
        self._remove_except(*(step.name for step in self.folder.whole_steps()))

    # -- keep -------------------------------------------------------------------------------------

    def tell(self, number: int) -> bool:
        """Return True if a snapshot is due after this step; the first rank's clock decides."""
        return self._has_room and self._cadence.is_due(number, self._last)

    def on_step(self, news: Any) -> None:
        """Write and commit a snapshot if it is due.

        If a machine has no room, the memory is emptied with a warning, and no more is kept.
        """
        if not news:
            return
        start = time.perf_counter()
        snapshot = collect(self._state, self.ranks)
        self._state.run = snapshot.manifest.run
        try:
            self._write(snapshot)
        except CheckpointError as error:
            self._has_room = False
            self._remove_except()
            if self.ranks.index == 0:
                log.warning("peers: in-memory snapshots are disabled: %s", error)
            return
        self._last = time.monotonic()
        seconds, step = time.perf_counter() - start, snapshot.manifest.step
        log.debug("in-memory snapshot of step %d done in %.3f s", step, seconds)

    def _write(self, snapshot: Snapshot) -> None:
        """Write and commit a snapshot.

        Raises:
            CheckpointError: a machine has no room; the previous snapshot still exists.
        """
        ranks, folder = self.ranks, self.folder
        name = step_name(snapshot.manifest.step)
        temporary = folder.join(f"{name}.tmp")

        def write_share() -> RankRow:
            faults.point("peers.write")
            with storing(temporary):
                make_folder(temporary)
            return write_own_share(snapshot, folder.store, temporary, ranks)

        _, rows = ranks.run_and_collect("writing the snapshot", lambda: (None, write_share()))

        def describe() -> tuple[bytes, Manifest]:
            now = datetime.now(UTC).isoformat()
            index = describe_tensors(snapshot, rows or ())
            return index.to_bytes(), describe_step(snapshot, rows or (), now)

        # Each machine commits it, and learns from it what it receives.
        index, manifest = ranks.run_on_one("describing the snapshot", describe)
        send_files(self._plan_copies(manifest.ranks), temporary, ranks)

        def commit() -> None:
            faults.point("peers.commit")
            if self._is_first_on_machine:
                # DCP's metadata is left out, because only a resume reads a snapshot.
                manifest.files[INDEX] = write_file(folder.store, join_path(temporary, INDEX), index)
                folder.commit(temporary, manifest.step, manifest)

        ranks.run("committing the snapshot", commit)
        self._remove_except(name)  # the new one is complete on all machines

    @property
    def _is_first_on_machine(self) -> bool:
        """Return True if this rank is the first on its machine."""
        return self._machine_ranks[self.ranks.node][0] == self.ranks.rank

    def _plan_copies(self, files: Sequence[RankFiles]) -> list[FileTransfer]:
        """List the files that each rank sends to the next machine."""
        if len(self._machine_ranks) == 1:
            return []
        transfers: list[FileTransfer] = []
        places = zip(self.ranks.ranks, self.ranks.nodes, files, strict=True)
        for index, (rank, node, own_files) in enumerate(places):
            receivers = self._machine_ranks[(node + 1) % len(self._machine_ranks)]
            receiver = receivers[self._machine_ranks[node].index(rank) % len(receivers)]
            for name, nbytes in own_files.sizes(index).items():
                transfers.append(FileTransfer(name, nbytes, rank, receiver))
        return transfers

    def _remove_except(self, *kept: str) -> None:
        """Remove all other snapshots from this machine's memory. Any rank may call it."""
        for name in set(self.folder.names()) - {*kept} if self._is_first_on_machine else ():
            with contextlib.suppress(OSError):  # the next one tries again
                self.folder.store.remove_folder(self.folder.join(name))

    # -- find -------------------------------------------------------------------------------------

    def open_search(self, folder: RunFolder, verify: bool) -> StepSearch:
        return SnapshotSearch(folder, verify, self.ranks, self._snapshots(), self.bring)

    def on_resume(self, report: ResumeReport | None, step: StepOfRun | None) -> ResumeReport | None:
        """Keep only what was restored: other snapshots are of steps that will be repeated."""
        if report is not None:
            is_snapshot = step is not None and not step.is_on_disk
            self._remove_except(*([step_name(report.step)] if is_snapshot else []))
        return report

    def _snapshots(self) -> list[PeerSnapshot]:
        """List the snapshots without missing files, newest first. The same on every rank."""
        # Once per resume: the first rank of each machine lists its snapshots, the others nothing,
        # and together they find which machine has which file.
        what = "looking at the machines' memory"
        _, answers = self.ranks.run_and_gather(what, lambda: (None, self._list_own()))
        snapshots: dict[tuple[int, str, str], PeerSnapshot] = {}
        missing: dict[tuple[int, str, str], set[str]] = {}
        senders = zip(self.ranks.ranks, self.ranks.nodes, answers, strict=True)
        for rank, node, committed in senders:
            for key, (sizes, absent) in committed.items():
                path = self.folder.join(step_name(key[0]))
                snapshot = snapshots.setdefault(key, PeerSnapshot(path, *key, rank, sizes, {}))
                missing[key] = missing.get(key, absent) & absent
                for name in sizes.keys() - absent:
                    snapshot.machines.setdefault(name, []).append(node)
        return [snapshots[key] for key in sorted(snapshots, reverse=True) if not missing[key]]

    def _list_own(self) -> dict[tuple[int, str, str], tuple[dict[str, int], set[str]]]:
        """List this machine's committed snapshots, with the files' sizes and the absent files."""
        snapshots: dict[tuple[int, str, str], tuple[dict[str, int], set[str]]] = {}
        for step in self.folder.whole_steps() if self._is_first_on_machine else ():
            path = self.folder.join(step.name)
            try:
                manifest = read_manifest(self.folder.store, path)
            except CheckpointError as error:
                log.warning("%s is skipped: %s", path, error)
                continue
            sizes = manifest.sizes
            file_sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path)}
            absent = {file for file, size in sizes.items() if file_sizes.get(file) != size}
            snapshots[step.number, manifest.run, manifest.written] = (sizes, absent)
        return snapshots

    def bring(self, snapshot: PeerSnapshot, names: Sequence[str]) -> None:
        """Fetch files of a snapshot that this machine's ranks read. Collective.

        Args:
            snapshot: the snapshot.
            names: names of the files that this rank reads.
        """
        names_by_rank = self.ranks.gather("asking for the snapshot's files", [*names])
        transfers: list[FileTransfer] = []
        for machine, machine_ranks in enumerate(self._machine_ranks):
            indices = [self.ranks.ranks.index(rank) for rank in machine_ranks]
            wanted = {name for index in indices for name in names_by_rank[index]}
            for name in sorted(wanted):
                holders = snapshot.machines[name]
                if machine not in holders:
                    sender = self._machine_ranks[holders[0]][0]
                    size = snapshot.sizes[name]
                    transfers.append(FileTransfer(name, size, sender, machine_ranks[0]))
                    holders.append(machine)
        send_files(transfers, snapshot.path, self.ranks)


def open_memory(path: str, state: TrainState, ranks: Ranks, cadence: Cadence) -> list[RunListener]:
    """Open the memory that `anyrank run` made for these ranks; warn and return [] if there is none.
    Collective.

    Args:
        path: path of the run.
        state: state of the run.
        ranks: ranks of the run.
        cadence: when a snapshot is due.
    """
    root = os.environ.get(PEERS_FOLDER, "")
    own_rank = [] if os.path.isdir(root) else [ranks.rank]
    without = ranks.reduce(
        "looking for the machines' memory", FirstRanks.first_of(own_rank), operator.add
    )
    if not without.count:
        memory = PeerMemory(root, path, state, ranks, cadence)
        ranks.run("opening the machines' memory", memory.open)
        return [memory]
    if ranks.index == 0:
        log.warning(
            "peers= has no effect: no memory survives %s. Start the script with `anyrank run`. "
            "Checkpoints on disk are saved as usual.",
            ranks.name_ranks(without),
        )
    return []
