"""Files in the format of `torch.save`, planned around payloads that stay where they are.

A file is a zip of uncompressed records: a pickle, and one record per storage, aligned to 64 bytes.
Only the headers and the directory of the zip are built here; payloads are written from where they
are. `torch.distributed.checkpoint` keeps each piece of a tensor as a small file of this kind. The
CRC-32s of payloads are omitted, as with `torch.serialization.set_crc32_options(False)`, because
torch does not check them.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from anyrank.tensors.box import row_major
from anyrank.tensors.spec import dtype_name

ALIGN = 64
MOST_32 = 0xFFFFFFFF  # means "in the 64-bit record"
MOST_16 = 0xFFFF
UTF8 = 0x0800
ROOT = "archive"
KEPT_CONFIG = (
    "quantization_config.json"  # a record in files that `convert` writes; torch ignores it
)
STORAGES = {  # torch's storage classes, which only tell the dtype
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
LEGACY_STORAGES = {kind: name for name, kind in STORAGES.items() if not name.startswith("Q")}


def wrap(nbytes: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return the bytes before and after the payload of one row-major tensor.

    Args:
        nbytes: size of the payload.
        shape: shape of the tensor.
        dtype: dtype of the tensor.

    Returns:
        Head and tail. If the head is written at a multiple of 64 bytes, it ends at one.
    """
    archive = TorchZip(b"\x80\x02" + tensor_opcodes(shape, dtype, "0") + b".")
    start = archive.reserve("data/0", nbytes)
    archive.close()
    head = b"".join(data for offset, data in archive.fixed if offset < start)
    return head, b"".join(data for offset, data in archive.fixed if offset >= start)


@lru_cache(maxsize=4096)
def wrapped_bytes(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes before a row-major tensor's payload in its zip, and those of the zip."""
    nbytes = torch.Size(sizes).numel() * dtype.itemsize
    head, tail = wrap(nbytes, sizes, dtype)
    return len(head), len(head) + nbytes + len(tail)


class ZipSpan(NamedTuple):
    """The place of a tensor in a file of several, each in its own zip.

    Attributes:
        start: offset of its zip, a multiple of 64.
        payload: offset of its bytes.
        length: number of bytes of the zip.
        next: offset of the next zip; the bytes up to it are zeros.
    """

    start: int
    payload: int
    length: int
    next: int


def place_zip(sizes: tuple[int, ...], dtype: torch.dtype, start: int) -> ZipSpan:
    """Place a row-major tensor. Whoever writes such files, or knows what others have written, must
    find the same places.
    """
    before, length = wrapped_bytes(sizes, dtype)
    return ZipSpan(start, start + before, length, start + length + -length % ALIGN)


@dataclass
class TorchZip:
    """Headers and directory of a zip of uncompressed records, with 64-bit fields if needed.

    Attributes:
        pickled: the first record.
        quantization: the record that says how the weights are quantized, as JSON; empty for none.
        size: bytes so far.
        fixed: offset and bytes of everything except the reserved records.
    """

    pickled: bytes
    quantization: bytes = b""
    size: int = 0
    fixed: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    directory: list[bytes] = field(default_factory=list[bytes])

    def __post_init__(self) -> None:
        small = {"data.pkl": self.pickled, "byteorder": b"little", "version": b"3\n"}
        small |= {KEPT_CONFIG: self.quantization} if self.quantization else {}
        for name, data in small.items():
            self._open(name, len(data), zlib.crc32(data), 1)
            self._put(data)

    def reserve(self, name: str, nbytes: int) -> int:
        """Reserve a record to be filled; return the offset of its bytes, a multiple of 64."""
        self._open(name, nbytes, 0, ALIGN)
        start = self.size
        self.size += nbytes
        return start

    def _put(self, data: bytes) -> None:
        self.fixed.append((self.size, data))
        self.size += len(data)

    def _open(self, name: str, nbytes: int, crc: int, align: int) -> None:
        encoded, offset = f"{ROOT}/{name}".encode(), self.size
        is_long = nbytes >= MOST_32
        short = MOST_32 if is_long else nbytes
        extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if is_long else b""
        if align > 1:  # padding is an extra field: a tag, a length, and zeros
            spare = -(offset + 30 + len(encoded) + len(extra) + 4) % align
            extra += struct.pack("<2sH", b"FB", spare) + bytes(spare)
        needs = 45 if is_long else 0
        sizes = (crc, short, short, len(encoded), len(extra))
        self._put(
            struct.pack("<4s5H3I2H", b"PK\3\4", needs, UTF8, 0, 0, 33, *sizes) + encoded + extra
        )
        wide = [nbytes, nbytes] if is_long else []
        wide += [offset] if offset >= MOST_32 else []
        extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        entry = struct.pack("<4s6H3I", b"PK\1\2", needs, needs, UTF8, 0, 0, 33, *sizes[:3])
        entry += struct.pack("<5H2I", len(encoded), len(extra), 0, 0, 0, 0, min(offset, MOST_32))
        self.directory.append(entry + encoded + extra)

    def close(self) -> None:
        """Write the directory."""
        start, count = self.size, len(self.directory)
        data = b"".join(self.directory)
        end = start + len(data)
        if end >= MOST_32 or count >= MOST_16:
            counts = (count, count, len(data), start)
            data += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, *counts)
            data += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        counts = (min(count, MOST_16),) * 2
        bounds = (min(end - start, MOST_32), min(start, MOST_32))
        self._put(data + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *counts, *bounds, 0))


def tensor_opcodes(shape: Sequence[int], dtype: torch.dtype, storage_key: str) -> bytes:
    """Return the pickle opcodes that push a row-major tensor on a storage, in protocol 2."""
    legacy = LEGACY_STORAGES.get(dtype)
    numel = torch.Size(shape).numel()
    stored = numel if legacy else numel * dtype.itemsize
    storage = _global("torch", legacy) if legacy else _global("torch.storage", "UntypedStorage")
    named = value_opcodes(storage_key) + value_opcodes("cpu") + value_opcodes(stored)
    key = b"(" + value_opcodes("storage") + storage + named + b"tQ"
    hooks = _global("collections", "OrderedDict") + b")R"
    sizes = value_opcodes(tuple(shape)) + value_opcodes(row_major(shape))
    arguments = key + value_opcodes(0) + sizes + b"\x89" + hooks
    if legacy is None:
        arguments += _global("torch", dtype_name(dtype))
    rebuild = _global("torch._utils", f"_rebuild_tensor_v{2 if legacy else 3}")
    return rebuild + b"(" + arguments + b"tR"


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def value_opcodes(value: object) -> bytes:
    """Return the pickle opcodes that push a plain value, without the frame around them."""
    return pickle.dumps(value, 2)[2:-1]
