"""torch.save files: the zip format, and the older pickle stream (torch < 1.6)."""

from __future__ import annotations

import io
import struct
import zipfile
from collections import Counter
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from anyrank.errors import AnyrankError, LoadError, UnsafeFile
from anyrank.files.listing import Checksum, FileInfo, Listing
from anyrank.files.storage import OpenFile, Storage, read_range
from anyrank.sources.readers import pickled_tables, pickles
from anyrank.sources.readers.config_json import MAX_CONFIG_BYTES, config_in
from anyrank.sources.torch_zip import KEPT_CONFIG
from anyrank.tensors.box import Box
from anyrank.tensors.spec import Chunk, StoredTensor

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001
MAX_PICKLE_BYTES = 1 << 30
MAX_SHOWN_BYTES = 16 << 20  # read of a rejected pickle, to explain it


class RangeIO(io.RawIOBase):
    """A seekable stream of bytes [start, start + size) of an open file."""

    def __init__(self, file: OpenFile, start: int, size: int) -> None:
        super().__init__()
        self.file, self.start, self.size, self.position = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = max(0, base + offset)
        return self.position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self.size - self.position)]
        got = self.file.readv([view], self.start + self.position) if len(view) else 0
        self.position += got
        return got


def is_head(head: bytes) -> bool:
    """Return whether a file with these first bytes is a zip, or a pickle of torch before 1.6."""
    return head[:4] == ZIP_MAGIC or head[:1] == b"\x80"


def list_file(storage: Storage, path: str) -> Listing:
    """List the weights in a `.pt`, `.pth`, `.bin` or `.ckpt` file.

    Raises:
        UnsafeFile: the file has neither format, is corrupt, or its pickle names unknown globals.
    """
    read = read_file(storage, path)
    is_lightning = isinstance(read.tree, dict) and "pytorch-lightning_version" in read.tree
    content = pickled_tables.find_table(read.tree, path)
    tensors = {key: read.stored(key, ref) for key, ref in content.tensors.items()}
    beside, unread = _beside(read, content)
    return Listing(
        "lightning" if is_lightning else read.name,
        (read.info,),
        tensors,
        checksums=read.checksums,
        skipped=content.others,
        extras=content.extras,
        unreadable=content.unread,
        tables=content.tables,
        table=content.name,
        beside=beside,
        unread_beside=unread,
        quantization=read.quantization,
        states_table=is_lightning,
        has_companions=not is_lightning,
    )


def _beside(
    read: TorchFile, content: pickled_tables.FoundTable
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors outside the chosen table, by whole keys, and which of them are not read.

    A tensor that cannot be read in a table that is not used is not an error.
    """
    beside: dict[str, StoredTensor] = {}
    unread: dict[str, str] = {}
    for key, value in pickled_tables.values_beside(read.tree, content):
        if isinstance(value, str):
            unread[key] = value
            continue
        try:
            beside[key] = read.stored(key, value)
        except UnsafeFile:
            raise
        except LoadError:
            unread[key] = f"a {' and '.join(value.views)} view"
    return beside, unread


@dataclass(frozen=True)
class TorchFile:
    """The contents of a torch.save file.

    Attributes:
        name: name of the format.
        info: the file.
        tree: containers and plain values, with a `TensorRef` for each tensor.
        places: key of a storage -> its byte offset and size.
        checksums: checksums of the storages.
        quantization: `quantization_config` that `convert` has stored in the file.
    """

    name: str
    info: FileInfo
    tree: Any
    places: dict[str, tuple[int, int]]
    checksums: tuple[Checksum, ...] = ()
    quantization: dict[str, Any] = field(default_factory=dict[str, Any])

    def stored(self, key: str, ref: pickles.TensorRef) -> StoredTensor:
        """Locate the bytes of a tensor of the tree.

        Raises:
            LoadError: a conj or neg view.
            UnsafeFile: the view reaches outside its storage, or the storage outside the file.
        """
        path = self.info.path
        if ref.views:
            raise LoadError(
                f"{path}: {key}: was saved as a {' and '.join(ref.views)} view, whose bytes are "
                "not its values. Call .resolve_conj() and .resolve_neg() before you save it."
            )
        if ref.storage.key not in self.places:
            raise UnsafeFile(f"{path}: {key}: its storage {ref.storage.key!r} is not in the file")
        start, size = self.places[ref.storage.key]
        first = ref.storage.offset * ref.storage.dtype.itemsize + ref.offset * ref.dtype.itemsize
        box = Box.whole(ref.shape)
        reach = sum((n - 1) * s for n, s in zip(ref.shape, ref.strides, strict=False)) + 1
        last = first + reach * ref.dtype.itemsize if box.numel else first
        sane = len(ref.shape) == len(ref.strides) and min((0, *ref.shape, *ref.strides, first)) == 0
        if not sane or last > size or start + size > self.info.size:
            raise UnsafeFile(
                f"{path}: {key}: shape {list(ref.shape)} with strides {list(ref.strides)} at byte "
                f"{first} exceeds its storage of {size} bytes"
            )
        chunk = Chunk(box, 0, start + first, ref.strides)
        return StoredTensor(key, ref.shape, ref.dtype, (chunk,))


def read_file(storage: Storage, path: str) -> TorchFile:
    """Read the tree of a file in either format, and the positions of its tensors' bytes.

    Raises:
        UnsafeFile: the file has neither format, is corrupt, or its pickle names unknown globals.
    """
    with closing(storage.open(path)) as file, parsing(path):
        info = file.info
        magic = read_range(file, 0, min(4, info.size))
        if magic == ZIP_MAGIC:
            return read_zip(file, info, 0, info.size)
        if magic[:1] == b"\x80":
            return TorchFile("torch legacy", info, *_read_legacy(file, info.size))
    raise UnsafeFile(f"{path}: is not a torch.save file; it starts with {magic!r}")


@contextmanager
def parsing(path: str) -> Generator[None]:
    """Turn the error of a parser for corrupt bytes, which can be any, into an UnsafeFile."""
    try:
        yield
    except (AnyrankError, OSError):
        raise
    except Exception as error:
        raise UnsafeFile(
            f"{path}: is corrupt ({type(error).__name__}: {error}); copy it again"
        ) from error


def read_zip(file: OpenFile, info: FileInfo, start: int, size: int) -> TorchFile:
    """Read a zip at [start, start + size) of a file, which `info` describes.

    Raises:
        UnsafeFile: it is not a complete torch zip.
    """
    path = file.path
    try:
        archive = zipfile.ZipFile(io.BufferedReader(RangeIO(file, start, size), 1 << 16))
    except (zipfile.BadZipFile, ValueError, OSError, struct.error) as error:
        raise UnsafeFile(f"{path}: truncated or corrupt zip ({error}); copy it again") from error
    entries = archive.infolist()
    names = [entry.filename.partition("/")[2] for entry in entries]
    twice = next((name for name, number in Counter(names).items() if name and number > 1), None)
    if twice is not None:  # torch reads the first one, other readers the last
        raise UnsafeFile(
            f"{path}: has the record {twice} twice, so its values are "
            "ambiguous. Save the file again."
        )
    records = dict(zip(names, entries, strict=True))
    # No checksum was stored (torch.serialization.set_crc32_options), or the record is empty.
    unknown = {name for name, entry in records.items() if not entry.CRC}
    for name in unknown:
        records[name].CRC = None  # pyright: ignore[reportAttributeAccessIssue] - not compared then
    pickled = records.get("data.pkl")
    if pickled is None or pickled.file_size > MAX_PICKLE_BYTES:
        raise UnsafeFile(
            f"{path}: is not a torch.save file, but a zip without a data.pkl of plausible size"
        )
    places: dict[str, tuple[int, int]] = {}
    checksums: list[Checksum] = []
    for name, entry in records.items():
        if entry.compress_type != zipfile.ZIP_STORED:
            raise UnsafeFile(f"{path}: record {name} is compressed, which torch.save never does")
        if name.startswith("data/"):
            offset = start + entry.header_offset
            header = read_range(file, offset, 30)
            if header[:4] != ZIP_MAGIC:
                raise UnsafeFile(
                    f"{path}: record {name} does not have a header; copy the file again"
                )
            offset += 30 + sum(struct.unpack("<HH", header[26:30]))
            places[name[5:]] = (offset, entry.file_size)
            if name not in unknown:
                stop, digest = offset + entry.file_size, f"{entry.CRC:08x}"
                checksums.append(Checksum(0, offset, stop, digest, f"record {name}"))
    try:
        order = archive.read("".join((pickled.filename[: -len("data.pkl")], "byteorder")))
    except KeyError:
        order = b"little"  # older files do not have the record
    if order != b"little":
        raise UnsafeFile(
            f"{path}: was written on a {order.decode(errors='replace')}-endian machine; only "
            "little-endian files are read"
        )
    kept = records.get(KEPT_CONFIG)
    return TorchFile(
        "torch zip",
        info,
        pickles.loads(archive.read(pickled), path),
        places,
        tuple(checksums),
        config_in(archive.read(kept)) if kept and kept.file_size <= MAX_CONFIG_BYTES else {},
    )


def _read_legacy(file: OpenFile, size: int) -> tuple[Any, dict[str, tuple[int, int]]]:
    path = file.path
    stream = io.BufferedReader(RangeIO(file, 0, size), 1 << 16)
    magic, protocol = pickles.load(stream, path), pickles.load(stream, path)
    system = pickles.load(stream, path)
    if magic != LEGACY_MAGIC or protocol != LEGACY_PROTOCOL:
        raise UnsafeFile(f"{path}: is a pickle, but was not written by torch.save")
    if isinstance(system, dict) and not system.get("little_endian", True):
        raise UnsafeFile(
            f"{path}: was written on a big-endian machine; only little-endian files are read"
        )
    finder = _ElementSizes(stream, path)
    start = stream.tell()
    try:
        tree = finder.tree()
    except pickles.UnknownName as error:
        data = read_range(file, start, min(size - start, MAX_SHOWN_BYTES))
        raise pickles.explained(error, data, finder) from error
    keys = pickles.load(stream, path)
    position = stream.tell()
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        itemsize = finder.itemsizes.get(str(key), 1)
        nbytes = int.from_bytes(read_range(file, position, 8), "little") * itemsize
        places[str(key)] = (position + 8, nbytes)
        position += 8 + nbytes
        if position > size:
            raise UnsafeFile(
                f"{path}: is truncated: storage {key} ends at byte {position}, the file at byte "
                f"{size}"
            )
    return tree, places


class _ElementSizes(pickles.TensorUnpickler):
    """Records the element size of each storage, which the legacy format has only in the pickle."""

    def __init__(self, file: Any, path: str) -> None:
        super().__init__(file, path)
        self.itemsizes: dict[str, int] = {}

    def persistent_load(self, pid: Any, /) -> Any:
        if pid[0] == "module":  # (module, class, source file, source text): the class is enough
            return pid[1]
        ref = super().persistent_load(pid)
        self.itemsizes[ref.key] = ref.dtype.itemsize
        return ref
