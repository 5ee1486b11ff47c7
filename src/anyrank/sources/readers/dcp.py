"""torch.distributed.checkpoint folders: `.metadata` and the `.distcp` files that it describes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from anyrank.errors import LoadError, UnsafeFile
from anyrank.files.block_sums import sums_name
from anyrank.files.listing import NOT_A_TENSOR, Checksum, FileInfo, Listing
from anyrank.files.storage import OpenFile, Storage, inside, join_path, read_whole
from anyrank.sources.readers import pickles, torch_file
from anyrank.sources.readers.config_json import CONFIG, with_quantization
from anyrank.sources.run_step import METADATA
from anyrank.tensors.box import Box
from anyrank.tensors.spec import Chunk, StoredTensor

RECORDS = {
    f"torch.distributed.checkpoint.{name}": type(name.rsplit(".", 1)[-1], (pickles.Record,), {})
    for name in (
        "metadata.Metadata",
        "metadata.TensorStorageMetadata",
        "metadata.BytesStorageMetadata",
        "metadata.ChunkStorageMetadata",
        "metadata.TensorProperties",
        "metadata.MetadataIndex",
        "metadata.StorageMeta",
        "metadata._MEM_FORMAT_ENCODING",
        "filesystem._StorageInfo",
    )
}


@dataclass(frozen=True)
class DcpFolder:
    """The contents of a DCP folder.

    Attributes:
        listing: its tensors.
        paths: key -> its path in the saved state dict; other keys are split at their dots.
        objects: key -> plain value, for the requested keys.
        others: keys of all other values.
    """

    listing: Listing
    paths: dict[str, tuple[str | int, ...]]
    objects: dict[str, Any]
    others: list[str]

    def tree(self) -> dict[str | int, Any]:
        """Rebuild the saved state dict, with a stored tensor for each tensor.

        A list becomes a table with numbers as keys.
        """
        tree: dict[str | int, Any] = {}
        for key, value in {**self.listing.tensors, **self.objects}.items():
            *path, last = self.paths.get(key) or (key,)
            inner: Any = tree
            for part in path:
                inner = inner.setdefault(part, {}) if isinstance(inner, dict) else {}
            if isinstance(inner, dict):
                inner[last] = value
        return tree


def list_folder(storage: Storage, folder: str) -> Listing:
    """List every tensor of a DCP folder, with one chunk for each piece that a rank wrote.

    Raises:
        LoadError: a data file is missing, or the chunks do not cover a tensor.
        UnsafeFile: the metadata names unknown globals, or was not written by DCP.
    """
    return read_folder(storage, folder, lambda key: False).listing


def read_folder(storage: Storage, folder: str, wanted: Callable[[str], bool]) -> DcpFolder:
    """List a folder as `list_folder` does, and read the requested values that are not tensors.

    Raises:
        LoadError: as for `list_folder`.
        UnsafeFile: as for `list_folder`; a requested value whose pickle names unknown globals.
    """
    path = join_path(folder, METADATA)
    metadata = pickles.loads(read_whole(storage, path), path, RECORDS)
    with torch_file.parsing(path), closing(_Reader(storage, folder)) as reader:
        described = dict(metadata["state_dict_metadata"])
        places = {
            (index["fqn"], tuple(index.fields.get("offset") or ())): span.fields
            for index, span in dict(metadata["storage_data"]).items()
        }
        planned: Any = metadata.fields.get("planner_data")
        paths = {
            str(key): tuple(path)
            for key, path in (planned.items() if isinstance(planned, dict) else ())
            if isinstance(path, tuple) and all(type(part) in (str, int) for part in path)
        }
        tensors = {
            fqn: reader.tensor(fqn, entry, places)
            for fqn, entry in described.items()
            if type(entry).__name__ == "TensorStorageMetadata"
        }
        others = [fqn for fqn in described if fqn not in tensors]
        for fqn in others:
            kind = type(described[fqn]).__name__
            if kind != "BytesStorageMetadata":
                raise UnsafeFile(
                    f"{path}: the entry of {fqn} is a {kind}, neither a tensor nor bytes. The file "
                    "is corrupt; copy it again."
                )
        objects = {fqn: reader.value(fqn, places) for fqn in others if wanted(fqn)}
    listing = Listing(
        "dcp",
        tuple(reader.files),
        tensors,
        skipped=dict.fromkeys(others, NOT_A_TENSOR),
        checksums=tuple(reader.checksums),
        sums=reader.sums,
        tables=frozenset(
            ".".join(map(str, path[:n])) for path in paths.values() for n in range(1, len(path))
        ),
    )
    listing = with_quantization(listing, storage, join_path(folder, CONFIG))
    return DcpFolder(listing, paths, objects, [fqn for fqn in others if fqn not in objects])


class _Reader:
    """Finds the bytes of each chunk, which are in a small torch zip inside a data file."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage, self.folder = storage, folder
        self.files: list[FileInfo] = []
        self.checksums: list[Checksum] = []
        self.sums: dict[int, str] = {}
        self.names = set(storage.names(folder))
        self.opened: dict[str, tuple[int, OpenFile]] = {}

    def close(self) -> None:
        for _, file in self.opened.values():
            file.close()

    def tensor(self, fqn: str, entry: Any, places: dict[Any, Any]) -> StoredTensor:
        shape = tuple(entry["size"])
        chunks: list[Chunk] = []
        dtypes: set[Any] = set()
        for piece in entry["chunks"]:
            box = Box(tuple(piece["offsets"]), tuple(piece["sizes"]))
            span = places.get((fqn, box.offsets))
            if span is None:
                raise LoadError(
                    f"{self.folder}: {fqn}: no file contains its piece at {box.offsets}"
                )
            chunk, dtype = self._chunk(fqn, box, span)
            chunks.append(chunk)
            dtypes.add(dtype)
        numel = sum(chunk.box.numel for chunk in chunks)
        if numel != math.prod(shape) or len(dtypes) != 1:
            raise LoadError(
                f"{self.folder}: {fqn}: its pieces have {numel} elements of dtypes "
                f"{sorted(map(str, dtypes))}, but its shape {list(shape)} needs {math.prod(shape)}"
            )
        return StoredTensor(fqn, shape, dtypes.pop(), tuple(chunks))

    def _chunk(self, fqn: str, box: Box, span: dict[str, Any]) -> tuple[Chunk, Any]:
        number, record = self._record(fqn, span)
        path, start = self.files[number].path, span["offset"]
        if not isinstance(record.tree, pickles.TensorRef) or record.tree.shape != box.sizes:
            raise UnsafeFile(
                f"{path}: {fqn}: its piece of sizes {box.sizes} is not at byte {start}"
            )
        stored = record.stored(fqn, record.tree)
        self.checksums += (replace(c, file=number) for c in record.checksums)
        inner = stored.chunks[0]
        return Chunk(box, number, inner.offset, inner.strides), stored.dtype

    def value(self, fqn: str, places: dict[Any, Any]) -> Any:
        """Read a value that is not a tensor."""
        span = places.get((fqn, ()))
        if span is None:
            raise LoadError(f"{self.folder}: {fqn}: no file contains it")
        tree = self._record(fqn, span)[1].tree
        if isinstance(tree, pickles.TensorRef):
            raise UnsafeFile(f"{self.folder}: {fqn}: is a tensor, but not according to {METADATA}")
        return tree

    def _record(self, fqn: str, span: dict[str, Any]) -> tuple[int, torch_file.TorchFile]:
        """Return the number of a file, and the small torch file in a span of it."""
        if span.get("transform_descriptors"):
            raise LoadError(f"{self.folder}: {fqn}: compressed pieces are not supported")
        number, file = self._open(str(span["relative_path"]))
        path, start, size = (
            self.files[number].path,
            int(span["offset"]),
            int(span["length"]),
        )
        if start < 0 or size < 0 or start + size > self.files[number].size:
            raise LoadError(
                f"{path}: ends at byte {self.files[number].size}, but {fqn} is at {start} to "
                f"{start + size}. The file is truncated; copy it again."
            )
        with torch_file.parsing(path):
            return number, torch_file.read_zip(file, self.files[number], start, size)

    def _open(self, name: str) -> tuple[int, OpenFile]:
        if name not in self.opened:
            path = inside(self.folder, name)
            try:
                file = self.storage.open(path)
                self.opened[name] = (len(self.files), file)
                self.files.append(file.info)
            except FileNotFoundError as error:
                raise LoadError(
                    f"{path}: is missing, but {METADATA} lists it. Copy the folder again."
                ) from error
            if sums_name(name) in self.names:
                self.sums[self.opened[name][0]] = inside(self.folder, sums_name(name))
        return self.opened[name]
