"""`.metadata`, the index of torch.distributed.checkpoint, written as its readers expect it.

It is a pickle with an entry for each piece of each tensor: millions, for a step of a thousand
ranks. So it is written opcode by opcode, without the objects that it describes or all of its bytes
in memory. A repeated value is written once, and then recalled by its number, as in any pickle.
"""

from __future__ import annotations

import itertools
import pickle
import pickletools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from anyrank.tensors.box import Box

PART_BYTES = 64 << 10  # yielded at a time: about one millisecond of work
BATCH = 1000  # entries on an unpickler's stack at a time, as in pickle's own


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor with all of its names.

    Attributes:
        names: its own name, followed by those that are tied to it.
        shape, dtype: its shape and dtype.
        boxes: returns the boxes of all its pieces.
        kind: the same for tensors with the same shape and boxes.
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Callable[[], Iterable[Box]]
    kind: object


class DcpPiece(NamedTuple):
    """A piece of a tensor in a file: the position of the tensor, and the bytes of the torch zip."""

    number: int
    box: Box
    start: int
    length: int


def pickle_metadata(
    tensors: Sequence[DcpTensor],
    files: Iterable[tuple[str, Iterable[DcpPiece]]],
    by_part: bool = True,
) -> Iterator[bytes]:
    """Yield the pickle, part by part.

    Args:
        tensors: tensors of all files.
        files: name of a file -> its pieces.
        by_part: whether the text before the first dot of a name is a table of the state, as in
            runs.
    """
    writer = _PickleWriter()
    writer.begin({tensor.dtype for tensor in tensors})
    names = [[writer.new(_text(name)) for name in tensor.names] for tensor in tensors]
    yield from writer.tensors(tensors, names)
    yield from writer.planner_data(tensors, names, by_part)
    yield from writer.storage_data(names, files)
    yield writer.end()


class _PickleWriter:
    """Writes opcodes of protocol 2, and recalls repeated values by number."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.numbers = itertools.count()
        self.get: dict[object, bytes] = {}  # written value -> the opcodes that recall it

    def new(self, opcodes: bytes) -> bytes:
        """Write a value for later use; return the opcodes that recall it."""
        get = self.put(opcodes)
        self.out += b"0"  # pops it; only its number refers to it
        return get

    def put(self, opcodes: bytes) -> bytes:
        """Write a value that is used here and again; return the opcodes that recall it."""
        number = struct.pack("<I", next(self.numbers))
        self.out += opcodes + b"r" + number
        return b"j" + number

    def flush(self) -> Iterator[bytes]:
        """Yield the opcodes so far, if there are enough of them."""
        if len(self.out) >= PART_BYTES:
            yield bytes(self.out)
            self.out.clear()

    def begin(self, dtypes: Iterable[torch.dtype]) -> None:
        """Write the classes and values to which the pickle refers."""
        from torch.distributed.checkpoint.filesystem import (
            _StorageInfo,  # pyright: ignore[reportPrivateUsage] - the format's, without a public name
        )
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            Metadata,
            MetadataIndex,
            StorageMeta,
            TensorProperties,
            TensorStorageMetadata,
        )

        spelled = ("state_dict_metadata", "planner_data", "storage_data")
        shell = Metadata({}, storage_meta=StorageMeta())
        others = {f.name: getattr(shell, f.name) for f in fields(shell) if f.name not in spelled}
        self.others = b"".join(_value(name) + _value(value) for name, value in others.items())
        for dtype in sorted(dtypes, key=str):
            self.get[dtype] = self.new(_value(TensorProperties(dtype)))
        for kind in (
            *(Metadata, TensorStorageMetadata, ChunkStorageMetadata, MetadataIndex),
            *(_StorageInfo, torch.Size),
        ):
            self.get[kind] = self.new(_value(kind))
        words = ("properties", "size", "chunks", "offsets", "sizes", "fqn", "index", "offset")
        word = {name: self.new(_text(name)) for name in (*words, "relative_path", "length")}
        new = b")\x81}("
        self.tensor = self.get[TensorStorageMetadata] + new + word["properties"]
        self.size, self.chunks = word["size"], word["chunks"]
        self.chunk = self.get[ChunkStorageMetadata] + new + word["offsets"]
        self.sizes = word["sizes"]
        self.index = self.get[MetadataIndex] + new + word["index"] + b"N" + word["fqn"]
        self.offset = word["offset"]
        self.info = self.get[_StorageInfo] + new + word["relative_path"]
        self.length = word["length"]
        self.out += self.get[Metadata] + new + _text("state_dict_metadata") + b"}"

    def numbers_of(self, sizes: tuple[int, ...]) -> bytes:
        """Return the opcodes of a torch.Size, which is written where it is used first."""
        known = self.get.get(sizes)
        if known is None:
            number = struct.pack("<I", next(self.numbers))
            self.get[sizes] = b"j" + number
            known = self.get[torch.Size] + b"(" + b"".join(map(_number, sizes)) + b"t\x85R"
            known += b"r" + number
        return known

    def tensors(
        self, tensors: Sequence[DcpTensor], names: Sequence[Sequence[bytes]]
    ) -> Iterator[bytes]:
        """Write each tensor and its pieces."""
        for tensor, texts in zip(tensors, names, strict=True):
            key = tensor.shape, tensor.kind
            for text in texts:
                self.out += text + self.tensor + self.get[tensor.dtype]
                self.out += self.size + self.numbers_of(tensor.shape) + self.chunks
                if key in self.get:
                    self.out += self.get[key] + b"ubs"
                    continue
                self.get[key] = self.put(b"]")
                for box in tensor.boxes():
                    self.out += self.chunk + self.numbers_of(box.offsets)
                    self.out += self.sizes + self.numbers_of(box.sizes) + b"uba"
                self.out += b"ubs"
            yield from self.flush()

    def planner_data(
        self, tensors: Sequence[DcpTensor], names: Sequence[Sequence[bytes]], by_part: bool
    ) -> Iterator[bytes]:
        """Write the position of each tensor in the state dict."""
        self.out += _text("planner_data") + b"}"
        for tensor, texts in zip(tensors, names, strict=True):
            for name, text in zip(tensor.names, texts, strict=True):
                path = tuple(name.split(".", 1)) if by_part else (name,)
                self.out += text + b"(" + b"".join(map(_text, path)) + b"ts"
            yield from self.flush()

    def storage_data(
        self,
        names: Sequence[Sequence[bytes]],
        files: Iterable[tuple[str, Iterable[DcpPiece]]],
    ) -> Iterator[bytes]:
        """Write the position of each piece's bytes."""
        self.out += _text("storage_data") + b"}("
        count = 0
        for file, pieces in files:
            path = self.new(_text(file))
            info, offset, length = self.info + path + self.offset, self.offset, self.length
            for number, box, start, nbytes in pieces:
                where = info + _number(start) + length + _number(nbytes) + b"ub"
                for text in names[number]:
                    offsets = self.numbers_of(box.offsets)
                    self.out += self.index + text + offset + offsets + b"ub" + where
                    count += 1
                if count >= BATCH:
                    self.out += b"u("
                    count = 0
                    yield from self.flush()
        self.out += b"u"

    def end(self) -> bytes:
        """Return the last opcodes."""
        return bytes(self.out + self.others + b"ub.")


def _value(value: Any) -> bytes:
    """Return the opcodes that push a value, without references to other values."""
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _number(number: int) -> bytes:
    if number < 1 << 8:
        return b"K" + bytes((number,))
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    data = number.to_bytes(number.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes((len(data),)) + data
