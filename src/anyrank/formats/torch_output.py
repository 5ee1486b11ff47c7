"""What one file of `torch.save` is to hold: a zip of a pickled dict and its storages.

Payloads are aligned to 64 bytes, and their CRC-32 is left out, as by
`torch.serialization.set_crc32_options(False)`: torch does not look at it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anyrank.files.output import FileSpan, Output, OutputFile, OutputTensor
from anyrank.formats.torch_blob import ALIGN, UTF8, tensor_opcodes, value_opcodes
from anyrank.tensors.box import Box

MOST_32 = 0xFFFFFFFF  # stands for "in the 64-bit record"
MOST_16 = 0xFFFF
ROOT = "archive"


def plan_file(name: str, tensors: Sequence[OutputTensor], tied: Mapping[str, str]) -> Output:
    """One file with a dict of tensors; tied names share a storage."""
    keys = {tensor.name: str(number) for number, tensor in enumerate(tensors)}
    table = {tensor.name: tensor for tensor in tensors}
    opcodes = bytearray(b"\x80\x02}(")
    for each, owner in [*((n, n) for n in keys), *tied.items()]:
        tensor = table[owner]
        opcodes += value_opcodes(each) + tensor_opcodes(tensor.shape, tensor.dtype, keys[owner])
    made = _Zip()
    made.add("data.pkl", bytes(opcodes + b"u."))
    made.add("byteorder", b"little")
    made.add("version", b"3\n")
    spans: list[FileSpan] = []
    for tensor in tensors:
        start = made.reserve(f"data/{keys[tensor.name]}", tensor.nbytes)
        spans.append(FileSpan(tensor, Box.whole(tensor.shape), start))
    made.close()
    return Output((OutputFile(name, made.size, tuple(made.fixed), tuple(spans)),))


@dataclass
class _Zip:
    """Headers and directory of a zip of stored records, with 64-bit records where they are needed.

    Attributes:
        size: bytes so far.
        fixed: offset and bytes of all but the reserved records.
    """

    size: int = 0
    fixed: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    directory: list[bytes] = field(default_factory=list[bytes])

    def add(self, name: str, data: bytes) -> None:
        """A record whose bytes are known."""
        self._open(name, len(data), zlib.crc32(data), 1)
        self._put(data)

    def reserve(self, name: str, nbytes: int) -> int:
        """A record to be filled; where its bytes begin, a multiple of 64."""
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
        """The directory."""
        start, count = self.size, len(self.directory)
        data = b"".join(self.directory)
        end = start + len(data)
        if end >= MOST_32 or count >= MOST_16:
            counts = (count, count, len(data), start)
            data += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, *counts)
            data += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        counts = (min(count, MOST_16),) * 2
        place = (min(end - start, MOST_32), min(start, MOST_32))
        self._put(data + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *counts, *place, 0))
