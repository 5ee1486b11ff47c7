"""Snapshots of a run in the memory of its machines, which outlives the processes of the ranks.

A snapshot is a step of a run as in files, in a folder of each machine's tmpfs: what the machine's
own ranks write, and a copy of what those of the machine before it write, so that a machine may be
lost. It is there when the machines that hold all of its files have committed it. `anyrank run`
makes the folder, and removes it at its end.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from anyrank import faults
from anyrank.errors import CheckpointError
from anyrank.files.listing import FileInfo, Listing
from anyrank.files.manifest import MANIFEST, Manifest, read_manifest, step_name
from anyrank.files.storage import LocalStorage, absolute, digest_of, join_path, storing, write_file
from anyrank.formats.run_folder import INDEX, list_step
from anyrank.peers.transfers import FileTransfer, make_folder, pass_on
from anyrank.saving.collect import Snapshot
from anyrank.saving.run_store import RunFolder
from anyrank.saving.write import RankShare, describe, write_own_share
from anyrank.settings import PEERS_FOLDER
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.saving")

IsDue = Callable[[int, float], bool]


@dataclass(frozen=True)
class Held:
    """A snapshot that the machines hold all files of.

    Attributes:
        step, run, written: of its manifest.
        holder: global rank that can read its manifest and its index.
        sizes: of its files.
        machines: file -> numbers of the machines that hold it.
    """

    step: int
    run: str
    written: str
    holder: int
    sizes: dict[str, int]
    machines: dict[str, list[int]]

    @property
    def name(self) -> str:
        """Its folder."""
        return step_name(self.step)


class _Together(LocalStorage):
    """The files of a snapshot by their sizes, wherever they are."""

    def __init__(self, folder: str, sizes: Mapping[str, int]) -> None:
        self.sizes = {join_path(folder, name): size for name, size in sizes.items()}

    def find(self, path: str) -> FileInfo | None:
        return FileInfo(path, self.sizes[path], "") if path in self.sizes else None


class PeerMemory:
    """The snapshots of one run, as one rank sees them. All ranks call its methods together.

    One is kept, and beside it the next one while that is written.

    Attributes:
        folder: of the run, in this machine's memory.
    """

    def __init__(self, root: str, path: str, ranks: Ranks, is_due: IsDue) -> None:
        place = absolute(path)
        key = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
        self.folder = RunFolder(LocalStorage(), join_path(root, key))
        self.ranks = ranks
        self._is_due, self._last = is_due, time.monotonic()
        self._tag = ranks.from_one("naming the memory", lambda: uuid.uuid4().hex[:8])
        self._count = 0
        machines = range(len(ranks.hosts))
        self._on = [
            [r for r, n in zip(ranks.ranks, ranks.nodes, strict=True) if n == m] for m in machines
        ]

    def open(self) -> None:
        """Make the run's folder, and remove what killed ranks left of snapshots. Any rank."""
        with storing(self.folder.path):
            make_folder(self.folder.path)
        self.remove_but(*(step.name for step in self.folder.whole()))

    # -- keep -------------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether a snapshot follows this step."""
        return self._is_due(step, self._last)

    def keep(self, snapshot: Snapshot) -> bool:
        """Write a snapshot, and commit it; False, and a warning, where a machine has no room.

        The memory is empty then, and is not to be used again: the files are there.
        """
        start = time.perf_counter()
        try:
            nbytes = self._write(snapshot)
        except CheckpointError as error:
            self.remove_but()
            if self.ranks.index == 0:
                log.warning("peers: nothing is kept in memory from now on: %s", error)
            return False
        self._last = time.monotonic()
        seconds, step = time.perf_counter() - start, snapshot.manifest.step
        log.debug("step %d is in memory: %d bytes, %.3f s", step, nbytes, seconds)
        return True

    def _write(self, snapshot: Snapshot) -> int:
        """The bytes of a snapshot that was committed, on all machines.

        Raises:
            CheckpointError: a machine has no room; the snapshot before it is still there.
        """
        ranks, folder = self.ranks, self.folder
        self._count += 1
        name = step_name(snapshot.manifest.step)
        temporary = folder.join(f"{name}.tmp-{self._tag}-{self._count}")

        def share() -> RankShare:
            faults.point("peers.write")
            with storing(temporary):
                make_folder(temporary)
            return write_own_share(snapshot, folder.store, temporary, ranks)

        shares = ranks.together("writing the snapshot", share)
        pass_on(self._copies(shares), temporary, ranks)
        small = ranks.from_one("describing the snapshot", lambda: _small_files(snapshot, shares))

        def commit() -> int:
            faults.point("peers.commit")
            if not self._leads:
                return 0
            for each, data in small.items():
                write_file(folder.store, join_path(temporary, each), data)
            with storing(temporary):
                folder.store.rename(temporary, folder.join(name))
                return sum(entry.stat().st_size for entry in os.scandir(folder.join(name)))

        nbytes = sum(ranks.together("committing the snapshot", commit))
        self.remove_but(name)  # it is whole on all machines by now
        return nbytes

    @property
    def _leads(self) -> bool:
        """Whether this rank is the first on its machine."""
        return self._on[self.ranks.node][0] == self.ranks.rank

    def _copies(self, shares: Sequence[RankShare]) -> list[FileTransfer]:
        """What each rank sends to the next machine."""
        if len(self._on) == 1:
            return []
        found: list[FileTransfer] = []
        for rank, node, share in zip(self.ranks.ranks, self.ranks.nodes, shares, strict=True):
            there = self._on[(node + 1) % len(self._on)]
            receiver = there[self._on[node].index(rank) % len(there)]
            for name, file in share.files.items():
                found.append(FileTransfer(name, file.size, rank, receiver))
        return found

    def remove_but(self, *kept: str) -> None:
        """Give the other snapshots' memory back to the machine. Any rank."""
        for name in set(self.folder.names()) - {*kept} if self._leads else ():
            with contextlib.suppress(OSError):  # the next one tries again
                self.folder.store.remove_folder(self.folder.join(name))

    # -- find -------------------------------------------------------------------------------------

    def whole(self) -> list[Held]:
        """The snapshots that every file is there of, the newest first. The same on all ranks."""
        seen = self.ranks.together("looking at the machines' memory", self._look)
        held: dict[tuple[int, str, str], Held] = {}
        missing: dict[tuple[int, str, str], set[str]] = {}
        for rank, node, found in zip(self.ranks.ranks, self.ranks.nodes, seen, strict=True):
            for key, (sizes, absent) in found.items():
                snapshot = held.setdefault(key, Held(*key, rank, sizes, {}))
                missing[key] = missing.get(key, absent) & absent
                for name in sizes.keys() - absent:
                    snapshot.machines.setdefault(name, []).append(node)
        return [held[key] for key in sorted(held, reverse=True) if not missing[key]]

    def _look(self) -> dict[tuple[int, str, str], tuple[dict[str, int], set[str]]]:
        """What this machine has committed: of each, its files' sizes, and which are absent."""
        found: dict[tuple[int, str, str], tuple[dict[str, int], set[str]]] = {}
        for step in self.folder.whole() if self._leads else ():
            path = self.folder.join(step.name)
            try:
                manifest = read_manifest(self.folder.store, path)
            except CheckpointError as error:
                log.warning("%s: is skipped: %s", path, error)
                continue
            sizes = {name: file.size for name, file in manifest.files.items()}
            there = {entry.name: entry.stat().st_size for entry in os.scandir(path)}
            absent = {file for file, size in sizes.items() if there.get(file) != size}
            found[step.number, manifest.run, manifest.written] = (sizes, absent)
        return found

    def examine(self, held: Held) -> tuple[Manifest, Listing]:
        """What a snapshot holds. On its holder.

        Raises:
            CorruptCheckpoint: a small file is not what was written.
        """
        path = self.folder.join(held.name)
        manifest = read_manifest(self.folder.store, path)
        return manifest, list_step(_Together(path, held.sizes), path, manifest)

    def bring(self, held: Held, listing: Listing, files: Iterable[int]) -> Listing:
        """Let this machine have what its ranks read; the listing with its paths here.

        Args:
            held: the snapshot.
            listing: as its holder sees it.
            files: that this rank reads, by their numbers in the listing.
        """
        numbers = sorted(files)
        path = self.folder.join(held.name)
        mine = {os.path.basename(listing.files[n].path) for n in numbers}
        mine |= {os.path.basename(listing.sums[n]) for n in numbers}
        every = self.ranks.gather(mine, "asking for the snapshot's files")
        transfers: list[FileTransfer] = []
        for machine, there in enumerate(self._on):
            wanted = {
                n for r, s in zip(self.ranks.ranks, every, strict=True) if r in there for n in s
            }
            for name in sorted(wanted):
                holders = held.machines[name]
                if machine not in holders:
                    sender = self._on[holders[0]][0]
                    transfers.append(FileTransfer(name, held.sizes[name], sender, there[0]))
                    holders.append(machine)
        pass_on(transfers, path, self.ranks)
        infos, sums = [*listing.files], dict(listing.sums)
        for n in numbers:
            found = LocalStorage().find(_moved(infos[n].path, path))
            assert found is not None  # it was here, or came just now
            infos[n] = found
            sums[n] = _moved(sums[n], path)
        return replace(listing, files=tuple(infos), sums=sums)


def _moved(path: str, folder: str) -> str:
    return join_path(folder, os.path.basename(path))


def _small_files(snapshot: Snapshot, shares: Sequence[RankShare]) -> dict[str, bytes]:
    """The index and the manifest, which each machine has; the manifest is the last to be written.

    Without DCP's metadata and a receipt: only a resume reads a snapshot.
    """
    index, manifest = describe(snapshot, shares, datetime.now(UTC).isoformat())
    manifest.files[INDEX] = digest_of(index)
    return {INDEX: index, MANIFEST: manifest.to_bytes()}


def open_memory(path: str, ranks: Ranks, is_due: IsDue) -> PeerMemory | None:
    """The memory that `anyrank run` has for these ranks; None, and a warning, without it.
    All ranks.

    Args:
        path: of the run.
        ranks: of the run.
        is_due: whether a snapshot follows a step, the last one having been at a monotonic time.
    """
    roots = ranks.gather(os.environ.get(PEERS_FOLDER, ""), "looking for the machines' memory")
    there = ranks.together(
        "looking for the machines' memory", lambda: os.path.isdir(roots[ranks.index])
    )
    if all(there):
        memory = PeerMemory(roots[ranks.index], path, ranks, is_due)
        ranks.together("opening the machines' memory", memory.open)
        return memory
    if ranks.index == 0:
        without = [rank for rank, is_there in zip(ranks.ranks, there, strict=True) if not is_there]
        log.warning(
            "peers= keeps nothing in memory: %s have none that outlives them: start the script "
            "with `anyrank run`; the files are saved as usual",
            ranks.named(without),
        )
    return None
