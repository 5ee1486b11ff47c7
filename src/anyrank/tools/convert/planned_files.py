"""Plan the files of each output format, byte by byte; `OUTPUTS` in formats.py lists the formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial

from anyrank.errors import LoadError
from anyrank.sources.dcp_output import DcpPiece, DcpTensor, pickle_metadata
from anyrank.sources.readers.config_json import CONFIG, QUANTIZATION
from anyrank.sources.run_step import METADATA
from anyrank.sources.safetensors import ALIGN, CODES, MAX_HEADER_BYTES, RESERVED, with_ties
from anyrank.sources.torch_zip import TorchZip, place_zip, tensor_opcodes, value_opcodes, wrap
from anyrank.tensors.box import Box
from anyrank.tensors.writes import PIECE_BYTES
from anyrank.tools.convert.output import (
    Contents,
    FileSpan,
    Output,
    OutputFile,
    OutputTensor,
    shards_of,
)

DCP_DATA = "__0_0.distcp"
FOR_TRANSFORMERS = {"format": "pt"}  # transformers requires it
SHARD_BYTES = 5_000_000_000


def plan_safetensors(contents: Contents) -> Output:
    """Plan a file of safetensors, or a Hugging Face folder.

    Raises:
        LoadError: the format does not have a dtype or allow a name, or the header is too long.
    """
    metadata = {key: text for key, text in contents.metadata.items() if key != QUANTIZATION}
    if contents.quantization:
        metadata[QUANTIZATION] = json.dumps(contents.quantization)
    metadata |= FOR_TRANSFORMERS
    tensors, tied = contents.tensors, contents.tied
    if contents.file_name:
        return Output((_plan_file(contents.file_name, tensors, tied, metadata),))
    shard_bytes = contents.shard_bytes or SHARD_BYTES
    return _plan_folder(tensors, tied, metadata, shard_bytes, contents.stem)


def _plan_file(
    name: str,
    tensors: Sequence[OutputTensor],
    tied: Mapping[str, str],
    metadata: Mapping[str, str],
) -> OutputFile:
    """Plan one file of safetensors, its tensors sorted by element size so that each is aligned.

    Args:
        name: name of the file.
        tensors: tensors of the file.
        tied: name -> the name whose bytes it shares, in this file or another one.
        metadata: free text.

    Raises:
        LoadError: the format does not have a dtype or allow a name, or the header is too long.
    """
    for tensor in tensors:
        if tensor.dtype not in CODES or tensor.name == RESERVED:
            raise LoadError(
                f"{tensor.name}: safetensors reserves this name, so a tensor cannot have it. Pass "
                "rename= or a different to="
                if tensor.name == RESERVED
                else f"{tensor.name}: safetensors does not support {tensor.dtype}. Pass a "
                "different to="
            )
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {
        RESERVED: with_ties(metadata, tied, {tensor.name for tensor in tensors})
    }
    position = 0
    for tensor in ordered:
        shape, code = list(tensor.shape), CODES[tensor.dtype]
        if code == "F4":  # two elements per byte, which torch counts as one
            shape[-1:] = [shape[-1] * 2] if shape else []
        offsets = [position, position + tensor.nbytes]
        header[tensor.name] = {"dtype": code, "shape": shape, "data_offsets": offsets}
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > MAX_HEADER_BYTES:
        raise LoadError(f"{name}: a header of {len(text)} bytes is too long. Pass shard_bytes=")
    head = len(text).to_bytes(8, "little") + text
    spans: list[FileSpan] = []
    start = len(head)
    for tensor in ordered:
        spans.append(FileSpan(tensor, Box.whole(tensor.shape), start))
        start += tensor.nbytes
    return OutputFile(name, start, ((0, head),), tuple(spans))


def _plan_folder(
    tensors: Sequence[OutputTensor],
    tied: Mapping[str, str],
    metadata: Mapping[str, str],
    shard_bytes: int,
    stem: str,
) -> Output:
    """Plan a Hugging Face folder: one file, or shards of at most `shard_bytes` and their index.

    Raises:
        LoadError: as for `_plan_file`.
    """
    groups = shards_of(tensors, shard_bytes)
    if len(groups) == 1:
        return Output((_plan_file(f"{stem}.safetensors", groups[0], tied, metadata),))
    files: list[OutputFile] = []
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors"
        files.append(_plan_file(name, group, tied, metadata))
        weight_map |= dict.fromkeys((tensor.name for tensor in group), name)
    total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
    index = {"metadata": total, "weight_map": weight_map}
    text = json.dumps(index, indent=2) + "\n"
    return Output(tuple(files), {f"{stem}.safetensors.index.json": text.encode()})


def plan_torch(contents: Contents) -> Output:
    """Plan a file with a dict of tensors, and JSON in the archive; tied names share a storage."""
    tensors = contents.tensors
    keys = {tensor.name: str(number) for number, tensor in enumerate(tensors)}
    by_name = {tensor.name: tensor for tensor in tensors}
    opcodes = bytearray(b"\x80\x02}(")
    for key, owner in [*((n, n) for n in keys), *contents.tied.items()]:
        tensor = by_name[owner]
        opcodes += value_opcodes(key) + tensor_opcodes(tensor.shape, tensor.dtype, keys[owner])
    kept = json.dumps(contents.quantization) if contents.quantization else ""
    archive = TorchZip(bytes(opcodes + b"u."), kept.encode())
    spans: list[FileSpan] = []
    for tensor in tensors:
        start = archive.reserve(f"data/{keys[tensor.name]}", tensor.nbytes)
        spans.append(FileSpan(tensor, Box.whole(tensor.shape), start))
    archive.close()
    return Output(
        (OutputFile(contents.file_name, archive.size, tuple(archive.fixed), tuple(spans)),)
    )


def plan_dcp(contents: Contents) -> Output:
    """Plan a DCP folder of a flat dict of tensors; tied names refer to the same bytes."""
    tensors = contents.tensors
    fixed: list[tuple[int, bytes]] = []
    spans: list[FileSpan] = []
    pieces: list[DcpPiece] = []
    names = {tensor.name: [tensor.name] for tensor in tensors}
    for alias, name in contents.tied.items():
        names[name].append(alias)
    described: list[DcpTensor] = []
    position = 0
    for number, tensor in enumerate(tensors):
        most = PIECE_BYTES // tensor.dtype.itemsize
        boxes = [*Box.whole(tensor.shape).cut(most)]
        what = (names[tensor.name], tensor.shape, tensor.dtype, partial(iter, boxes), most)
        described.append(DcpTensor(*what))
        for box in boxes:
            nbytes = box.numel * tensor.dtype.itemsize
            head, tail = wrap(nbytes, box.sizes, tensor.dtype)
            span = place_zip(box.sizes, tensor.dtype, position)
            padding = bytes(span.next - span.start - span.length)
            pieces.append(DcpPiece(number, box, span.start, span.length))
            fixed += [(span.start, head), (span.payload + nbytes, tail + padding)]
            spans.append(FileSpan(tensor, box, span.payload))
            position = span.next
    file = OutputFile(DCP_DATA, position, tuple(fixed), tuple(spans))
    parts = pickle_metadata(described, [(DCP_DATA, pieces)], by_part=False)
    small = {METADATA: b"".join(parts)}
    if contents.quantization:
        small[CONFIG] = json.dumps({QUANTIZATION: contents.quantization}).encode()
    return Output((file,), small, has_sums=True)
