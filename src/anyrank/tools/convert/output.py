"""A plan of files, byte by byte: the fixed bytes, and the position of each box of each tensor.

Each format makes such a plan, and one writer executes all plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from anyrank.files.block_sums import sums_name
from anyrank.tensors.box import Box


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A whole tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Contents:
    """What an output holds, in any format.

    Attributes:
        tensors: the tensors to write.
        tied: name -> the name whose bytes it shares.
        file_name: name of the output's only file; "" if the output is a folder.
        stem: start of the names of weight files in a folder.
        shard_bytes: maximum bytes of tensors per file in a folder; None for the default.
        metadata: free text of the source.
        quantization: the `quantization_config` of the source, if the weights stay quantized.
    """

    tensors: Sequence[OutputTensor]
    tied: Mapping[str, str] = field(default_factory=dict[str, str])
    file_name: str = ""
    stem: str = "model"
    shard_bytes: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    quantization: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes [start, stop) of a file: the elements of one box of a tensor, row-major.

    Attributes:
        tensor: the tensor.
        box: whole rows of the tensor, so that any part of the span is a box too.
        start: byte offset in the file, a multiple of the element size.
    """

    tensor: OutputTensor
    box: Box
    start: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.tensor.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def cut(self, most_bytes: int) -> Iterator[FileSpan]:
        """Yield consecutive spans of at most `most_bytes` (or one element)."""
        position = self.start
        for box in self.box.cut(most_bytes // self.tensor.dtype.itemsize):
            part = FileSpan(self.tensor, box, position)
            yield part
            position = part.stop


@dataclass(frozen=True)
class OutputFile:
    """One file of a conversion.

    Attributes:
        name: name in the folder of the output.
        size: size in bytes.
        fixed: offsets and bytes of all that is already known: headers, directories, padding.
        spans: the rest, in order. With `fixed`, they cover every byte of the file once.
    """

    name: str
    size: int
    fixed: tuple[tuple[int, bytes], ...]
    spans: tuple[FileSpan, ...]


@dataclass(frozen=True)
class Output:
    """All files of one conversion.

    Attributes:
        files: the files with tensors.
        small: name -> bytes of indexes and configurations, which are written after the files.
        has_sums: whether the checksums of the blocks of each file are written next to it.
    """

    files: tuple[OutputFile, ...]
    small: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    has_sums: bool = False

    @property
    def names(self) -> list[str]:
        """Names of all files."""
        sums = [sums_name(file.name) for file in self.files] if self.has_sums else []
        return [*(file.name for file in self.files), *sums, *self.small]

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files) + sum(map(len, self.small.values()))


def shards_of(tensors: Sequence[OutputTensor], most_bytes: int) -> list[list[OutputTensor]]:
    """Group tensors, in order, by at most `most_bytes`; a larger tensor is its own group."""
    groups: list[list[OutputTensor]] = [[]]
    group_bytes = 0
    for tensor in tensors:
        if groups[-1] and group_bytes + tensor.nbytes > most_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(tensor)
        group_bytes += tensor.nbytes
    return groups
