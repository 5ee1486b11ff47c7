"""The safetensors format: 8 bytes of header length, a JSON header, then the tensors' bytes. It is
read, and planned for writing, a file or a Hugging Face folder of several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from anyrank.errors import LoadError, UnsafeFile
from anyrank.files.listing import Listing
from anyrank.files.output import FileSpan, Output, OutputFile, OutputTensor, shards_of
from anyrank.files.storage import Storage, read_range
from anyrank.tensors.box import Box
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
    "F4": torch.float4_e2m1fn_x2,  # two elements a byte: the file counts halves, torch counts bytes
    "C64": torch.complex64,
}

CODES = {dtype: code for code, dtype in DTYPES.items()}
RESERVED = "__metadata__"
ALIGN = 64  # of the first tensor, so that readers can map it


def is_head(head: bytes) -> bool:
    """Whether a file of these first bytes has a header in JSON behind its length."""
    return head[8:9] == b"{"


def list_file(storage: Storage, path: str) -> Listing:
    """The tensors of one file, from its header.

    Raises:
        UnsafeFile: the header is not what the format allows: too long, not JSON, an unknown dtype,
            or offsets that overlap, leave holes, run backwards or pass the end of the file.
    """
    with closing(storage.open(path)) as file:
        info = file.info
        if info.size < 8:
            raise UnsafeFile(f"{path}: {info.size} bytes are too few for a safetensors file")
        length = int.from_bytes(read_range(file, 0, 8), "little")
        if length > min(MAX_HEADER_BYTES, info.size - 8):
            raise UnsafeFile(
                f"{path}: its header claims {length} bytes; the file has {info.size} and the "
                f"format allows {MAX_HEADER_BYTES}: not a safetensors file, or a truncated one"
            )
        header = _parse(read_range(file, 8, length), path)
    metadata = header.pop(RESERVED, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise UnsafeFile(f"{path}: its __metadata__ is not a JSON object of strings")
    texts: dict[str, str] = metadata
    tensors = {key: _tensor(key, entry, 8 + length, path) for key, entry in header.items()}
    spans = [(*entry["data_offsets"], key) for key, entry in header.items()]
    _check_cover(spans, 8 + length, info.size, path)
    # A tie is stored once, and the name of the other place leads to it, as `save_model` writes it.
    ties = {name: kept for name, kept in texts.items() if kept in tensors and name not in tensors}
    tensors |= {name: tensors[kept].renamed(name) for name, kept in ties.items()}
    return Listing("safetensors", (info,), tensors, texts)


def _parse(text: bytes, path: str) -> dict[str, Any]:
    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise UnsafeFile(f"{path}: a key stands twice in the header")
        return table

    try:
        header = json.loads(text, object_pairs_hook=refuse_twice)
    except (ValueError, RecursionError) as error:
        raise UnsafeFile(f"{path}: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise UnsafeFile(f"{path}: its header is not a JSON object")
    return header


def _tensor(key: str, entry: Any, base: int, path: str) -> StoredTensor:
    try:
        code, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = {int}.issuperset(map(type, (*shape, start, stop))) and min(*shape, start, stop) >= 0
    except (TypeError, KeyError, ValueError):
        whole, code, shape, start, stop = False, None, (), 0, 0
    if not whole:
        raise UnsafeFile(f"{path}: {key}: its header entry is malformed: {str(entry)[:200]}")
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise UnsafeFile(f"{path}: {key}: dtype {code!r} is unknown; known are {', '.join(DTYPES)}")
    if code == "F4":
        if not shape or shape[-1] % 2:
            raise UnsafeFile(
                f"{path}: {key}: F4 needs an even last size, found shape {list(shape)}"
            )
        shape = (*shape[:-1], shape[-1] // 2)
    expected = math.prod(shape) * dtype.itemsize
    if stop - start != expected:
        raise UnsafeFile(
            f"{path}: {key}: {code} of shape {list(shape)} takes {expected} bytes, "
            f"its offsets [{start}, {stop}] span {stop - start}"
        )
    return StoredTensor.contiguous(key, shape, dtype, 0, base + start)


def _check_cover(spans: list[tuple[int, int, str]], base: int, size: int, path: str) -> None:
    position = 0
    for start, stop, key in sorted(spans):
        if start != position:
            word = "overlap" if start < position else "leave a hole"
            raise UnsafeFile(
                f"{path}: {key}: offsets {word}: starts at byte {base + start}, "
                f"the tensor before it ends at {base + position}"
            )
        position = stop
    if base + position != size:
        raise UnsafeFile(
            f"{path}: has {size} bytes where its header describes {base + position}: "
            "the file is truncated or something was appended; copy it again"
        )


def plan_file(
    name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str]
) -> OutputFile:
    """One file, its tensors by element size so that each is aligned.

    Raises:
        LoadError: a dtype or a name that the format does not have, or too many names.
    """
    for tensor in tensors:
        if tensor.dtype not in CODES or tensor.name == RESERVED:
            raise LoadError(
                f"{tensor.name}: is the name of the header's own table in safetensors, and so "
                "of no tensor: give rename= or another to="
                if tensor.name == RESERVED
                else f"{tensor.name}: is {tensor.dtype}, which safetensors does not have: give "
                "another to="
            )
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {RESERVED: dict(metadata)}
    position = 0
    for tensor in ordered:
        shape, code = list(tensor.shape), CODES[tensor.dtype]
        if code == "F4":  # two elements a byte, which torch counts as one
            shape[-1:] = [shape[-1] * 2] if shape else []
        offsets = [position, position + tensor.nbytes]
        header[tensor.name] = {"dtype": code, "shape": shape, "data_offsets": offsets}
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > MAX_HEADER_BYTES:
        raise LoadError(f"{name}: a header of {len(text)} bytes is too long: give shard_bytes=")
    head = len(text).to_bytes(8, "little") + text
    spans: list[FileSpan] = []
    start = len(head)
    for tensor in ordered:
        spans.append(FileSpan(tensor, Box.whole(tensor.shape), start))
        start += tensor.nbytes
    return OutputFile(name, start, ((0, head),), tuple(spans))


def plan_folder(
    tensors: Sequence[OutputTensor], metadata: Mapping[str, str], shard_bytes: int, stem: str
) -> Output:
    """A Hugging Face folder: one file, or shards of at most `shard_bytes` and their index.

    Raises:
        LoadError: as `plan_file`.
    """
    groups = shards_of(tensors, shard_bytes)
    if len(groups) == 1:
        return Output((plan_file(f"{stem}.safetensors", groups[0], metadata),))
    files: list[OutputFile] = []
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        files.append(plan_file(name, group, metadata))
        weight_map |= dict.fromkeys((tensor.name for tensor in group), name)
    total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
    index = {"metadata": total, "weight_map": weight_map}
    text = json.dumps(index, indent=2) + "\n"
    return Output(tuple(files), {f"{stem}.safetensors.index.json": text.encode()})
