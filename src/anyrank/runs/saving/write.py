"""The second half of a save: write the shares, then commit them by a rename of the folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NamedTuple

from anyrank import faults
from anyrank.errors import CheckpointError
from anyrank.files.manifest import Manifest
from anyrank.files.storage import FileRecord, Storage, join_path, write_file
from anyrank.runs.saving.collect import Snapshot
from anyrank.runs.saving.rank_file import write_share
from anyrank.runs.saving.run_folder import RunFolder
from anyrank.sources.dcp_output import metadata_of
from anyrank.sources.run_step import INDEX, METADATA, StoredBox, index_of
from anyrank.training.random_state.saved_streams import StreamState
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


def write(
    snapshot: Snapshot,
    folder: RunFolder,
    ranks: Ranks,
    *,
    keep_newest: int,
    keeps_forever: Callable[[int], bool],
    branch: int | None,
) -> SaveRecord:
    """Write the shares and commit them. All ranks.

    Args:
        snapshot: what this rank writes.
        folder: folder of the run.
        ranks: all ranks that write.
        keep_newest: number of the newest steps to keep.
        keeps_forever: returns whether a step of this number is never removed.
        branch: step that the run went back to, or None.

    Raises:
        CheckpointError: a rank could not write. Nothing was committed then, unless only the last
            operation failed, the sync of the folder that has the step.
        RankError: another rank ended.
    """
    start = time.perf_counter()
    step = snapshot.manifest.step
    run = snapshot.manifest.run
    temporary = ranks.run_on_one("making the folder", lambda: folder.begin(step, run, branch))

    def write_files() -> RankShare:
        faults.point("save.write")
        try:
            return write_own_share(snapshot, folder.store, temporary, ranks)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise _unshared_folder_error(temporary, ranks) from error
            raise

    shares = ranks.together("writing the checkpoint", write_files)

    def commit() -> SaveRecord:
        faults.point("save.commit")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        index, manifest = describe_step(snapshot, shares, now)
        boxes = [box for share in shares for box in share.boxes]
        small_files = {INDEX: index, METADATA: metadata_of(boxes, snapshot.aliases)}
        for file, data in small_files.items():
            manifest.files[file] = write_file(folder.store, join_path(temporary, file), data)
        # From here on the step exists. Older ones are removed only now: it could have been the only
        # one.
        name = folder.commit(temporary, step, manifest)
        removed = folder.tidy(name, keep_newest, keeps_forever)
        nbytes = sum(file.size for file in manifest.files.values())
        seconds = time.perf_counter() - start
        return SaveRecord(step, folder.user_path(name), nbytes, seconds, 0.0, removed)

    return ranks.run_on_one("committing the checkpoint", commit)


class RankShare(NamedTuple):
    """A rank's share of a step: boxes, records of files, states of random streams."""

    boxes: list[StoredBox]
    files: dict[str, FileRecord]
    states: dict[str, StreamState]


def write_own_share(snapshot: Snapshot, store: Storage, folder: str, ranks: Ranks) -> RankShare:
    """Write this rank's file into a step's folder.

    Raises:
        CheckpointError: a write failed.
    """
    name = f"__{ranks.index}_0.distcp"  # DCP names a rank's file so, and its readers expect it
    boxes, files = write_share(store, folder, name, snapshot.items)
    return RankShare(boxes, files, snapshot.streams.states)


def describe_step(
    snapshot: Snapshot, shares: Sequence[RankShare], written: str
) -> tuple[bytes, Manifest]:
    """Make the index of what all ranks wrote, and the manifest, still without the index's record.

    Raises:
        CheckpointError: a tensor was not written whole.
    """
    states = {digest: state for share in shares for digest, state in share.states.items()}
    manifest = replace(
        snapshot.manifest,
        files={name: entry for share in shares for name, entry in share.files.items()},
        written=written,
        streams=replace(snapshot.streams, states=states).to_json(),
    )
    return index_of((box for share in shares for box in share.boxes), snapshot.aliases), manifest


def _unshared_folder_error(folder: str, ranks: Ranks) -> CheckpointError:
    """Make the error for a rank that does not see the folder that the first rank made."""
    own_host, first_host = ranks.hosts[ranks.node], ranks.hosts[ranks.nodes[0]]
    return CheckpointError(
        f"{folder}: {own_host} does not see this folder, which rank {ranks.ranks[0]} made on "
        f"{first_host}: all ranks write into it, so the run's path must be absolute, and on "
        "storage that all machines share"
    )
