"""anyrank's run folders: `step-N/` folders, each of which is a DCP folder with `anyrank.json`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from anyrank.errors import CorruptCheckpoint
from anyrank.files.manifest import MANIFEST, STEP, Manifest, read_small, step_name
from anyrank.files.storage import Storage, join_path, reading
from anyrank.sources.step_index import INDEX

METADATA = ".metadata"  # of torch.distributed.checkpoint; a step has one too
ASIDE = ".aside-"  # starts the name of a step that was renamed, so that it is not used


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed step of a run.

    Attributes:
        step: completed optimizer steps.
        epoch: the current epoch.
        samples: samples of completed steps, over the whole run.
        written: time of the commit, in ISO 8601, UTC.
        ranks: number of ranks that saved it.
        nbytes: size of its files without the manifest and files that only DCP reads.
        path: path of its folder.

    Example::

        ckpts = anyrank.Checkpoints("runs/a", anyrank.TrainState(torch.nn.Linear(4, 1)))
        ckpts.save()
        saved = ckpts.saved()[0]
        assert (saved.step, saved.ranks, saved.path) == (0, 1, ckpts.latest())
    """

    step: int
    epoch: int
    samples: int
    written: str
    ranks: int
    nbytes: int
    path: str


def describe(manifest: Manifest, path: str) -> SavedStep:
    """Describe a step, from its manifest."""
    return SavedStep(
        step=manifest.step,
        epoch=manifest.epoch,
        samples=manifest.samples,
        written=manifest.written,
        ranks=manifest.saved_on["ranks"],
        nbytes=sum(manifest.sizes.values()),
        path=path,
    )


class StepFolder(NamedTuple):
    """The folder of a step in the folder of a run.

    Attributes:
        number: number of the step.
        name: name of the folder.
        is_whole: whether its manifest, which is written last, exists. On a disk the folder gets its
            name only after that, so a step without a manifest is corrupt; in an object store its
            save was killed.
    """

    number: int
    name: str
    is_whole: bool


def number_of(name: str) -> int | None:
    """Return the number of the step of a folder with this name; None for other names."""
    match = STEP.match(name)
    return int(match[1]) if match else None


def is_step(storage: Storage, folder: str) -> bool:
    """Return whether a folder is a committed step."""
    return storage.is_file(join_path(folder, MANIFEST))


def list_steps(storage: Storage, folder: str, names: Iterable[str]) -> list[StepFolder]:
    """Return the steps of a run, the newest first; `names` are the entries of its folder.

    A folder without a manifest counts if its name is one that a save uses.
    """
    steps: list[StepFolder] = []
    for name in names:
        number, path = number_of(name), join_path(folder, name)
        if number is None:
            continue
        is_whole = is_step(storage, path)
        if is_whole or (name == step_name(number) and not storage.is_file(path)):
            steps.append(StepFolder(number, name, is_whole))
    return sorted(steps, reverse=True)


def check_sizes(storage: Storage, folder: str, manifest: Manifest) -> bytes:
    """Compare the sizes of a step's files with the manifest, with one listing of the folder;
    compare and return the bytes of its index.

    Raises:
        CorruptCheckpoint: a file is missing, or has changed since it was written.
        CheckpointError: they cannot be read; chained to the storage's error.
    """
    with reading(folder):
        sizes = storage.sizes(folder)
    for name, expected in manifest.sizes.items():
        path = join_path(folder, name)
        if name not in sizes:
            raise CorruptCheckpoint(
                f"{path}: is missing, but {MANIFEST} lists it. Restore it from a copy, or use an "
                "older step."
            )
        if sizes[name] != expected:
            raise CorruptCheckpoint(
                f"{path}: has {sizes[name]} bytes, but {MANIFEST} lists {expected}. The file was "
                "truncated or changed; restore it from a copy, or use an older step."
            )
    return read_index(storage, folder, manifest)


def read_index(storage: Storage, folder: str, manifest: Manifest) -> bytes:
    """Read the bytes of a step's index, and compare them with the manifest.

    Raises:
        CorruptCheckpoint, CheckpointError: as for `check_sizes`.
    """
    record = manifest.files.get(INDEX)
    if record is None:
        raise CorruptCheckpoint(
            f"{folder}: its {MANIFEST} does not list {INDEX}. The step is corrupt; use an older "
            "one."
        )
    return read_small(storage, folder, INDEX, record)
