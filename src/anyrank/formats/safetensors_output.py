"""What a safetensors file, or a Hugging Face folder of them, is to hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from anyrank.errors import LoadError
from anyrank.files.output import FileSpan, Output, OutputFile, OutputTensor, shards_of
from anyrank.formats.safetensors import DTYPES, MAX_HEADER_BYTES
from anyrank.tensors.box import Box

CODES = {dtype: code for code, dtype in DTYPES.items()}
RESERVED = "__metadata__"
ALIGN = 64  # of the first tensor, so that readers can map it


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
