"""The values of converted tensors: stored bytes, cast if requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.files.reader import Reader, copy_into
from anyrank.files.segments import Job, jobs_of
from anyrank.tensors.spec import StoredTensor, dtype_name
from anyrank.tools.convert.output import FileSpan
from anyrank.wording import count

BUFFER_BYTES = 4 << 20  # staging memory per reading thread


class StoredContent:
    """The values of tensors in files, or of a dict in memory.

    Args:
        listing: the contents of the sources.
        tensors: name in the output -> stored tensor.
    """

    def __init__(self, listing: Listing, tensors: Mapping[str, StoredTensor]) -> None:
        self.tensors = tensors
        # The checksums of a run are verified as its bytes are read.
        self.reader = Reader(listing, buffer_bytes=BUFFER_BYTES, verify=True)

    def open(self) -> None:
        """Open every file to read, and check that it has not changed since its header was read.

        Raises:
            LoadError: a file has changed, or cannot be read.
        """
        stored = self.tensors.values()
        self.reader.open({chunk.file for tensor in stored for chunk in tensor.chunks})

    def fill(self, pieces: Sequence[tuple[FileSpan, torch.Tensor]]) -> None:
        """Read the values of each span into its tensor, a CPU tensor with the sizes of the box.

        Several threads may call it, each with its own memory.

        Raises:
            LoadError: the source cannot be read, or a value is out of range in the output's dtype.
        """
        jobs: list[Job] = []
        casts: list[tuple[FileSpan, torch.Tensor, torch.Tensor]] = []
        for span, memory in pieces:
            stored = self.tensors[span.tensor.name]
            stored_values = memory
            if stored.dtype != memory.dtype:
                stored_values = torch.empty(span.box.sizes, dtype=stored.dtype, device="cpu")
                casts.append((span, stored_values, memory))
            jobs += jobs_of(stored, span.box, stored_values)
        self.reader.run(jobs)
        for span, stored_values, memory in casts:
            _cast_into(memory, stored_values, span.tensor.name)


def _cast_into(memory: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Copy with a cast between floating-point dtypes.

    Raises:
        LoadError: a finite value became infinite.
    """
    copy_into(memory, values)
    if torch.finfo(memory.dtype).max >= torch.finfo(values.dtype).max or all_finite(memory):
        return
    lost = ~memory.isfinite() & values.isfinite()
    if lost.any():
        raise LoadError(
            f"{name}: {count(int(lost.sum()), 'value')} cannot be cast to {memory.dtype}, whose "
            f"maximum is {torch.finfo(memory.dtype).max:g} (one is {values[lost][0].item():g}). "
            f"Pass dtype={_wider(float(values[lost].abs().max()))!r}"
        )


def all_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite, by the extremes: 30 times as fast as isfinite."""
    return not values.numel() or all(bool(end.isfinite()) for end in values.aminmax())


def _wider(value: float) -> str:
    """Return the name of the smallest dtype that can hold a value."""
    dtypes = (torch.bfloat16, torch.float32)
    wide_enough = (dtype for dtype in dtypes if abs(value) <= torch.finfo(dtype).max)
    return dtype_name(next(wide_enough, torch.float64))
