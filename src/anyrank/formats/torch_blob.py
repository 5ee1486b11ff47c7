"""One tensor as `torch.save` writes it, made around bytes that stay where they are.

`torch.distributed.checkpoint` keeps each piece of a tensor as a small torch zip. Only the zip's
head and tail are built here; the payload between them is written from the tensor's own memory.
The layout is that of torch 1.6 and later: stored records, the payload aligned to 64 bytes. The
payload's CRC-32 is left out, as by `torch.serialization.set_crc32_options(False)`: torch does not
look at it, and a better checksum of the whole file lies next to it.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Sequence

import torch

from anyrank.tensors.box import row_major
from anyrank.tensors.spec import dtype_name

ALIGN = 64
MAX_BYTES = (1 << 32) - (1 << 20)  # beyond, a zip needs its 64-bit records
UTF8 = 0x0800
LEGACY_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}


def wrap(
    nbytes: int, shape: Sequence[int], dtype: torch.dtype, name: str = "archive"
) -> tuple[bytes, bytes]:
    """What precedes and what follows the payload of a row-major tensor.

    Args:
        nbytes: of the payload, fewer than 4 GiB.
        shape: of the tensor.
        dtype: of the tensor.
        name: of the zip's only folder.

    Returns:
        Head and tail. Written at a multiple of 64 bytes, the head ends at one.
    """
    if nbytes > MAX_BYTES:
        raise ValueError(f"a payload of {nbytes} bytes: cut it into pieces below 4 GiB")
    small = [("data.pkl", _pickled(shape, dtype)), ("byteorder", b"little"), ("version", b"3\n")]
    head, directory = bytearray(), bytearray()
    for record, data in small:
        _record(head, directory, f"{name}/{record}", len(data), zlib.crc32(data), 1)
        head += data
    _record(head, directory, f"{name}/data/0", nbytes, 0, ALIGN)
    count, start = len(small) + 1, len(head) + nbytes
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(directory), start, 0)
    return bytes(head), bytes(directory + end)


def _record(
    head: bytearray,
    directory: bytearray,
    name: str,
    nbytes: int,
    crc: int,
    align: int,
) -> None:
    """Append a record's local header to `head`, padded so that its data is aligned, and its entry.

    Padding is an extra field, as zip tools expect it: a tag, a length, and zeros.
    """
    encoded, offset = name.encode(), len(head)
    extra = b""
    if align > 1:
        spare = -(offset + 30 + len(encoded) + 4) % align
        extra = struct.pack("<2sH", b"FB", spare) + bytes(spare)
    sizes = (crc, nbytes, nbytes, len(encoded))
    head += struct.pack("<4s5H3I2H", b"PK\3\4", 0, UTF8, 0, 0, 33, *sizes, len(extra))
    head += encoded + extra
    directory += struct.pack("<4s6H3I", b"PK\1\2", 0, 0, UTF8, 0, 0, 33, *sizes[:3])
    directory += struct.pack("<5H2I", len(encoded), 0, 0, 0, 0, 0, offset) + encoded


def _pickled(shape: Sequence[int], dtype: torch.dtype) -> bytes:
    """The pickle of a row-major tensor over storage "0"."""
    return b"\x80\x02" + tensor_opcodes(shape, dtype, "0") + b"."


def tensor_opcodes(shape: Sequence[int], dtype: torch.dtype, storage_key: str) -> bytes:
    """What pushes a row-major tensor over a storage, by opcode: protocol 2."""
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
    """The opcodes that push a plain value, without the frame around them."""
    return pickle.dumps(value, 2)[2:-1]
