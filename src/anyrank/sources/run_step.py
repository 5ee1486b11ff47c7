"""anyrank's own run folders: `step-N/` folders, each a DCP folder plus `anyrank.json`.

The tensors' places are in `tensors.json` as well as in DCP's pickled `.metadata`, so that anyrank
reads a run without unpickling anything, and without opening each piece's zip.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.files.json_codec import reading_record
from anyrank.files.listing import FileInfo, Listing
from anyrank.files.manifest import (
    FORMAT,
    MANIFEST,
    STEP,
    Manifest,
    read_small,
    step_name,
)
from anyrank.files.storage import FileRecord, Storage, join_path
from anyrank.tensors.box import Box, row_major
from anyrank.tensors.spec import Chunk, StoredTensor, dtype_name

INDEX = "tensors.json"
METADATA = ".metadata"  # of torch.distributed.checkpoint, which a step is too
ASIDE = ".aside-"  # prefix of a step that was moved out of the way


@dataclass(frozen=True, slots=True)
class StoredBox:
    """The place of one box of a tensor: the file, and the byte of its first element.

    Attributes:
        start, length: byte range of the torch zip around it, as DCP's metadata counts it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    file: str
    offset: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed step of a run.

    Attributes:
        step: completed optimizer steps.
        epoch: the current epoch.
        samples: samples of completed steps, over the whole run.
        written: time of the commit, in ISO 8601, UTC.
        ranks: number of ranks that saved it.
        nbytes: size of its files without the manifest.
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
    """Describe a step by its manifest."""
    return SavedStep(
        step=manifest.step,
        epoch=manifest.epoch,
        samples=manifest.samples,
        written=manifest.written,
        ranks=manifest.saved_on["ranks"],
        nbytes=sum(record.size for record in manifest.files.values()),
        path=path,
    )


class StepFolder(NamedTuple):
    """The folder of a step in a run's folder.

    Attributes:
        number: number of the step.
        name: name of the folder.
        is_whole: whether its manifest, which is written last, exists. On a disk the folder gets its
            name only after that, so a step without one is damaged; in an object store its save
            died.
    """

    number: int
    name: str
    is_whole: bool


def number_of(name: str) -> int | None:
    """The step that a folder's name stands for; None for another name."""
    match = STEP.match(name)
    return int(match[1]) if match else None


def is_step(storage: Storage, folder: str) -> bool:
    """Return whether a folder is a committed step."""
    return storage.is_file(join_path(folder, MANIFEST))


def list_steps(storage: Storage, folder: str, names: Iterable[str]) -> list[StepFolder]:
    """The steps of a run, the newest first; `names` are the entries of its folder.

    A folder without a manifest counts if its name is one that a save gives.
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


def list_step(
    storage: Storage, folder: str, manifest: Manifest, small: Mapping[str, bytes] | None = None
) -> Listing:
    """List every tensor of a committed step, from `tensors.json`.

    Args:
        storage: the storage of the folder.
        folder: the step's folder.
        manifest: the step's manifest.
        small: files that `check_sizes` has read already.

    Raises:
        CorruptCheckpoint: the index is damaged, or a file is missing or has another size.
    """
    with reading_record(join_path(folder, INDEX)):
        if small is None:
            small = {INDEX: read_small(storage, folder, INDEX, manifest.files)}
        index = json.loads(small[INDEX])
        records = [manifest.files[name] for name in index["files"]]
        tensors = {key: _tensor(key, entry, records) for key, entry in index["tensors"].items()}
        for alias, key in index["aliases"].items():
            tensors[alias] = tensors[key].renamed(alias)
    files = tuple(_find_listed(storage, folder, name, manifest) for name in index["files"])
    sums = {number: join_path(folder, record.blocks) for number, record in enumerate(records)}
    return Listing(FORMAT, files, tensors, sums=sums)


def check_sizes(storage: Storage, folder: str, manifest: Manifest) -> dict[str, bytes]:
    """Compare every file's size with the manifest, and the bytes of small files; return those.

    Raises:
        CorruptCheckpoint: a file is missing, or is not what was written.
    """
    contents: dict[str, bytes] = {}
    for name in manifest.files:
        if name.endswith(".distcp"):
            _find_listed(storage, folder, name, manifest)
        else:
            contents[name] = read_small(storage, folder, name, manifest.files)
    return contents


def _find_listed(storage: Storage, folder: str, name: str, manifest: Manifest) -> FileInfo:
    path = join_path(folder, name)
    info = storage.find(path)
    if info is None:
        raise CorruptCheckpoint(f"{path}: is missing, but {MANIFEST} lists it")
    if info.size != manifest.files[name].size:
        raise CorruptCheckpoint(
            f"{path}: has {info.size} bytes, {MANIFEST} says {manifest.files[name].size}: "
            "the file is truncated or was written to"
        )
    return info


def _tensor(key: str, entry: Mapping[str, Any], files: Sequence[FileRecord]) -> StoredTensor:
    """Read one tensor of the index; it cannot be larger than its pieces in the files."""
    shape, dtype = _counts(key, entry["shape"]), getattr(torch, entry["dtype"])
    chunks: list[Chunk] = []
    for *box, file, offset in entry["chunks"]:
        offsets, sizes = (_counts(key, part) for part in box)
        _counts(key, (file, offset))
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"{key}: a piece has not the dims of its tensor")
        if offset + math.prod(sizes) * dtype.itemsize > files[file].size:
            raise ValueError(f"{key}: a piece ends after its file")
        chunks.append(Chunk(Box(offsets, sizes), file, offset, row_major(sizes)))
    if sum(chunk.box.numel for chunk in chunks) != math.prod(shape):
        raise ValueError(f"{key}: its pieces do not make up its shape {list(shape)}")
    return StoredTensor(key, shape, dtype, tuple(chunks))


def _counts(key: str, numbers: Sequence[Any]) -> tuple[int, ...]:
    """Return whole numbers of at least 0; ValueError for anything else."""
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{key}: {numbers!r:.80} are not sizes")
    return tuple(numbers)


def index_of(places: Iterable[StoredBox], aliases: Mapping[str, str]) -> bytes:
    """Build `tensors.json` from every rank's places."""
    files: dict[str, int] = {}
    tensors: dict[str, Any] = {}
    for saved in places:
        number = files.setdefault(saved.file, len(files))
        described = {"dtype": dtype_name(saved.dtype), "shape": saved.shape, "chunks": list[Any]()}
        entry = tensors.setdefault(saved.name, described)
        entry["chunks"].append((saved.box.offsets, saved.box.sizes, number, saved.offset))
    for name, entry in tensors.items():
        numel = sum(math.prod(sizes) for _, sizes, _, _ in entry["chunks"])
        if numel != math.prod(entry["shape"]):  # never commit a tensor that cannot be read
            raise CheckpointError(f"{name}: {numel} elements were written of {entry['shape']}")
    index = {"files": list(files), "tensors": tensors, "aliases": dict(aliases)}
    return (json.dumps(index, separators=(",", ":")) + "\n").encode()
