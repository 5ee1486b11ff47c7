"""The safetensors format: 8 bytes of header length, a JSON header, then the tensors' bytes.

Only lists a file; `tools/convert/planned_files.py` plans the files that are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any

import torch

from anyrank.errors import LoadError, UnsafeFile
from anyrank.files.listing import Listing
from anyrank.files.storage import Storage, read_range
from anyrank.sources.endings import OF_RANK
from anyrank.sources.readers.config_json import QUANTIZATION, config_in
from anyrank.tensors.spec import StoredTensor

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,  # two elements per byte; torch counts bytes
    "C64": torch.complex64,
}

CODES = {dtype: code for code, dtype in DTYPES.items()}
RESERVED = "__metadata__"
TIES = "anyrank.ties"  # metadata entry that lists, as JSON, which names in the metadata are ties
PARTS = "DCP_SHARDING_INFO"  # metadata entry of torch: where a rank's parts begin, as JSON
ALIGN = 64  # alignment of the first tensor, so that readers can map it


def is_head(head: bytes) -> bool:
    """Return whether a file with these first bytes has a JSON header after its length."""
    return head[8:9] == b"{"


def list_file(storage: Storage, path: str) -> Listing:
    """List the tensors of one file, from its header.

    Raises:
        LoadError: it holds one rank's parts of tensors.
        UnsafeFile: the file's size does not match its header, or the header breaks the format: it
            is not JSON, has an unknown dtype, or has offsets that overlap or leave gaps.
    """
    with closing(storage.open(path)) as file:
        info = file.info
        length = int.from_bytes(read_range(file, 0, 8), "little") if info.size >= 8 else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, info.size - 8):
            raise UnsafeFile(
                f"{path}: its header claims {length} bytes, but the file has {info.size} and the "
                f"format allows {MAX_HEADER_BYTES}. It is not a safetensors file, or is truncated."
            )
        text = read_range(file, 8, length)
    try:
        header = json.loads(text, object_pairs_hook=_table)
        texts: Any = header.pop(RESERVED, {})
        if not all(isinstance(value, str) for value in texts.values()):
            raise ValueError(f"{RESERVED} contains values other than text")
        tensors = {key: _tensor(key, entry, 8 + length, path) for key, entry in header.items()}
        ties = _ties_among(texts, tensors)
        end = _end_of(header)
        offsets = [part["saved_offsets"] for part in config_in(texts.pop(PARTS, "")).values()]
        is_part = any(map(any, offsets))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UnsafeFile(
            f"{path}: its header breaks the safetensors format ({type(error).__name__}: "
            f"{str(error)[:300]}). Copy the file again."
        ) from error
    if 8 + length + end != info.size:
        raise UnsafeFile(
            f"{path}: has {info.size} bytes, but its header describes {8 + length + end}. The file "
            "is truncated or something was appended; copy it again."
        )
    if is_part:
        raise LoadError(f"{path}: is {OF_RANK}")
    tensors |= {name: tensors[kept].renamed(name) for name, kept in ties.items()}
    others = {name: text for name, text in texts.items() if name not in ties and name != TIES}
    quantization = config_in(texts.get(QUANTIZATION, ""))
    return Listing(
        "safetensors",
        (info,),
        tensors,
        others,
        quantization=quantization,
        is_file_named=True,
        has_companions=True,
    )


def with_ties(
    texts: Mapping[str, str], tied: Mapping[str, str], names: Collection[str]
) -> dict[str, str]:
    """Return the metadata of a file: free text, and ties of tensors in the form of `save_model`.

    Args:
        texts: free text.
        tied: name -> the name of the tensor that it is tied to, in any file.
        names: names of the file's tensors.
    """
    ties = {name: kept for name, kept in tied.items() if kept in names}
    metadata = {**texts, **ties}
    # A text that happens to be a tensor's name is not a tie.
    if not {*names}.isdisjoint(metadata.values()):
        metadata[TIES] = json.dumps([*ties])
    return metadata


def _ties_among(texts: Mapping[str, str], tensors: Collection[str]) -> dict[str, str]:
    """Map each name to the name of the tensor that it is tied to, from a file's metadata.

    A tied tensor is stored once, and the metadata maps the other name to it. `save_model` does not
    distinguish such entries from free text; those count as ties only if both names end the same.
    """
    names: Any = (name for name in texts if _end(name) == _end(texts[name]))
    if TIES in texts:
        names = json.loads(texts[TIES])
    return {n: texts[n] for n in names if texts.get(n) in tensors and n not in tensors}


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("duplicate key")
    return table


def _tensor(key: str, entry: dict[str, Any], base: int, path: str) -> StoredTensor:
    """Read one tensor of the header, with offsets from `base`; raise an error if it is invalid."""
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise UnsafeFile(
            f"{path}: {key}: unknown dtype {entry['dtype']!r}; the known ones are "
            f"{', '.join(DTYPES)}"
        )
    dtype = DTYPES[entry["dtype"]]
    if not {int}.issuperset(map(type, (*shape, start, stop))) or min(*shape, start, stop) < 0:
        raise ValueError(f"{key}: invalid shape {shape} or offsets {start}, {stop}")
    if entry["dtype"] == "F4":
        if shape[-1] % 2:
            raise ValueError(f"{key}: F4 needs an even last size, but the shape is {shape}")
        shape = (*shape[:-1], shape[-1] // 2)
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{key}: the number of bytes in {entry} does not match the shape")
    return StoredTensor.contiguous(key, shape, dtype, 0, base + start)


def _end_of(header: Mapping[str, Any]) -> int:
    """Return the end of the last tensor; raise ValueError if tensors overlap or leave gaps."""
    end = 0
    for start, stop, key in sorted((*entry["data_offsets"], key) for key, entry in header.items()):
        if start != end:
            raise ValueError(f"{key}: starts at {start}, but the previous tensor ends at {end}")
        end = stop
    return end
