"""The second half of a save: write the shares, then commit them by a rename of the folder."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple

from anyrank import faults
from anyrank.errors import CheckpointError
from anyrank.files.manifest import Manifest, RankFiles
from anyrank.files.storage import Storage, join_path, write_file
from anyrank.runs.saving.collect import Snapshot
from anyrank.runs.saving.metadata import write_metadata
from anyrank.runs.saving.rank_file import write_share
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.sources.step_index import INDEX, StepIndex
from anyrank.training.random_state.saved import (
    RankCoords,
    SavedGenerators,
    digests_of_generators,
    scopes_of,
)
from anyrank.world.ranks import Ranks


@dataclass(frozen=True)
class SaveRecord:
    """One finished save.

    Attributes:
        step: number of the step that was saved.
        path: path of the checkpoint.
        nbytes: bytes written by all ranks.
        seconds: time from the call to the commit.
        stall_seconds: time during which this rank did not train.
        removed: names of old steps that were removed.

    Example::

        state = anyrank.TrainState(torch.nn.Linear(4, 1))
        records = []
        with anyrank.Checkpoints("runs/a", state, on_commit=records.append) as ckpts:
            ckpts.save()
        assert records[0].nbytes == ckpts.saved()[0].nbytes
    """

    step: int
    path: str
    nbytes: int
    seconds: float
    stall_seconds: float
    removed: list[str] = field(default_factory=list[str])


def write_step(
    snapshot: Snapshot,
    folder: RunFolder,
    ranks: Ranks,
    *,
    keep_newest: int,
    keeps_forever: Callable[[int], bool],
    branch: int | None,
) -> SaveRecord:
    """Write the shares and commit them. Collective.

    Args:
        snapshot: what this rank writes.
        folder: folder of the run.
        ranks: all ranks that write.
        keep_newest: number of newest steps to keep.
        keeps_forever: returns True if a step of this number is never removed.
        branch: step that the run returned to, or None.

    Raises:
        CheckpointError: a rank could not write. In that case nothing was committed, unless only the
            last operation failed, the sync of the folder that has the step.
        RankError: another rank ended.
    """
    start = time.perf_counter()
    step = snapshot.manifest.step
    run = snapshot.manifest.run
    temporary = ranks.run_on_one("making the folder", lambda: folder.begin(step, run, branch))

    def write_files() -> RankRow:
        faults.point("save.write")
        try:
            return write_own_share(snapshot, folder.store, temporary, ranks)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise _unshared_folder_error(temporary, ranks) from error
            raise

    _, rows = ranks.run_and_collect("writing the checkpoint", lambda: (None, write_files()))

    def commit() -> SaveRecord:
        faults.point("save.commit")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = describe_step(snapshot, rows or (), now)
        index = describe_tensors(snapshot, rows or ())
        data = index.to_bytes()
        manifest.files[INDEX] = write_file(folder.store, join_path(temporary, INDEX), data)
        # From here on the step exists. Older ones are removed only now, because one of them could
        # have been the only good one.
        name = folder.commit(temporary, step, manifest)
        owners = {rank: row.own_tensors for rank, row in enumerate(rows or ()) if row.own_tensors}
        rests = ranks.channel > 0  # in another thread, during the training
        write_metadata(folder, name, snapshot.plan, index, manifest, owners, rests)
        removed = folder.tidy(name, keep_newest, keeps_forever)
        seconds = time.perf_counter() - start
        nbytes = sum(manifest.sizes.values())
        return SaveRecord(step, folder.user_path(name), nbytes, seconds, 0.0, removed)

    return ranks.run_on_one("committing the checkpoint", commit)


class RankRow(NamedTuple):
    """A rank's report to the first rank on its share.

    Attributes:
        files: files that it wrote.
        own_tensors: digest of the names, boxes and order of tensors that only it has; or empty.
        coords: position of the rank.
        generators: random generator -> digest of its state, if the ranks differ.
    """

    files: RankFiles
    own_tensors: bytes
    coords: RankCoords
    generators: dict[str, str]


def write_own_share(snapshot: Snapshot, store: Storage, folder: str, ranks: Ranks) -> RankRow:
    """Write this rank's files into a step's folder.

    Raises:
        CheckpointError: a write failed.
    """
    args = (snapshot.items, snapshot.parts, snapshot.generators)
    files = write_share(store, folder, ranks.index, *args)
    own_items = [(i.name, i.dtype, i.box) for i in snapshot.items if i.number is None]
    digest = hashlib.blake2b(repr(own_items).encode(), digest_size=8).digest()
    generators = digests_of_generators(snapshot.generators)
    return RankRow(files, digest if own_items else b"", snapshot.coords, generators)


def describe_step(snapshot: Snapshot, rows: Sequence[RankRow], written: str) -> Manifest:
    """Make the manifest, still without the record of the step's index.

    Args:
        snapshot: snapshot of the first rank.
        rows: rows of all ranks.
        written: time of the commit.
    """
    coords = [row.coords for row in rows]
    scopes = scopes_of(coords, [row.generators for row in rows])
    scopes |= dict.fromkeys(snapshot.shared_generators, "global")
    shared, unused = snapshot.shared_generators, snapshot.unused_generators
    generators = SavedGenerators(coords, scopes, shared, unused=unused)
    files = [row.files for row in rows]
    manifest = snapshot.manifest
    return replace(manifest, written=written, ranks=files, generators=generators.to_json())


def describe_tensors(snapshot: Snapshot, rows: Sequence[RankRow]) -> StepIndex:
    """Make the index of the step, from the snapshot of the first rank and the rows of all."""
    owners = tuple(rank for rank, row in enumerate(rows) if row.own_tensors)
    return replace(snapshot.index, owners=owners)


def _unshared_folder_error(folder: str, ranks: Ranks) -> CheckpointError:
    """Make the error for a rank that cannot see the folder that the first rank made."""
    own_host, first_host = ranks.hosts[ranks.node], ranks.hosts[ranks.nodes[0]]
    return CheckpointError(
        f"{folder}: {own_host} cannot see this folder, which rank {ranks.ranks[0]} created on "
        f"{first_host}. Use an absolute path on storage that is shared by all machines."
    )
