"""`anyrank.inspect`: list the contents of a source; reads only headers."""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from anyrank.errors import LoadError
from anyrank.files.listing import Listing, ties_of
from anyrank.models.dialects.registry import values_without_model
from anyrank.models.dialects.transformers.dequantize import (
    packed_in_words,
    packed_weights,
    unknown_method,
)
from anyrank.runs.resume.run_log import read_log
from anyrank.runs.resume.run_time import RunTime, sum_up
from anyrank.sources.readers.runs import steps_in
from anyrank.sources.run_step import SavedStep
from anyrank.sources.source import Source, check_source, list_source
from anyrank.tensors.spec import StoredTensor, dtype_name
from anyrank.tools.inspect.groups import TensorGroup, group
from anyrank.wording import count, group_by_part, in_units, printable, rows, short_dtype

SHOWN_GROUPS = 30  # with head and tail, these fit on one screen
SHOWN_NOTES = 3
SHOWN_LETTERS = 60
COLUMNS = 80


@dataclass(frozen=True, slots=True)
class InspectedFile:
    """A file of the source.

    Attributes:
        path: its path, as in the source.
        nbytes: its size, including headers.
    """

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """A stored tensor.

    Attributes:
        name: its key.
        shape: its shape; the global shape if it is stored in parts.
        dtype: name of the dtype, without "torch.".
        nbytes: size in bytes.
        files: paths of the files that contain it; more than one only for tensors in parts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Total:
    """The tensors of one dtype: their number, elements and bytes. Tied ones count once."""

    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """The contents of a source. `print` it for a summary.

    Attributes:
        path: the source, as passed.
        format: for example "safetensors, 4 files", "torch zip", "lightning" or "dcp".
        files: the files that contain the tensors; empty for tensors in memory.
        tensors: all tensors, in the order of the headers.
        dtypes: dtype -> totals, the largest dtype first.
        parameters: number of elements of all tensors, with tied ones counted once. A file does not
            distinguish parameters from buffers.
        nbytes: size of all tensors in bytes, with tied ones counted once.
        tied: name -> the name of an earlier tensor whose bytes it shares.
        metadata: free text from the format.
        skipped: files and keys that `load` ignores, with the reasons.
        quantised: tensors that `load` dequantizes -> how they are quantized.
        steps: for a run folder, its committed steps, the newest first. `tensors` are those of the
            newest.
        run_time: for a run folder on a local disk, how its time was spent, from its `log.jsonl`.
    """

    path: str
    format: str
    files: list[InspectedFile]
    tensors: list[InspectedTensor]
    dtypes: dict[str, Total]
    parameters: int
    nbytes: int
    metadata: dict[str, str]
    skipped: list[str]
    tied: dict[str, str] = field(default_factory=dict[str, str])
    quantised: dict[str, str] = field(default_factory=dict[str, str])
    steps: list[SavedStep] = field(default_factory=list[SavedStep])
    run_time: RunTime | None = None

    def to_json(self) -> str:
        """Return all fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return "\n".join([*summary(self), *tensor_rows(self, SHOWN_GROUPS), *notes(self)])


def summary(inspection: Inspection) -> list[str]:
    """Return the lines above the tensors: format, counts, sizes and dtypes."""
    kinds = (
        f"{short_dtype(dtype)}: {count(total.tensors, 'tensor')}, {in_units(total.nbytes)}"
        for dtype, total in inspection.dtypes.items()
    )
    tied = f" ({len(inspection.tied):,} tied)" if inspection.tied else ""
    parts = [inspection.format, count(len(inspection.tensors), "tensor") + tied]
    parts += [f"{inspection.parameters:,} parameters", in_units(inspection.nbytes)]
    methods = Counter(inspection.quantised.values())
    ways = (
        f"{method}, which `load` dequantizes: {count(number, 'tensor')} and scales"
        for method, number in methods.items()
    )
    lines = [*kinds, *ways]
    first = f"{printable(inspection.path)}: {', '.join(parts)}"
    return [first, *(row for line in lines for row in _wrapped(f"  {line}"))]


def tensor_rows(
    inspection: Inspection, shown: int | None = None, *, grouped: bool = True
) -> list[str]:
    """Return a line per tensor, or per group of layers: name, shape, dtype and size.

    Args:
        inspection: the inspection.
        shown: maximum number of groups to show. Default: all.
        grouped: False for one line per tensor, in the order of the headers.
    """
    tensors = [(t.name, t.shape, t.dtype, t.nbytes) for t in inspection.tensors]
    groups = group(tensors)
    if not grouped:
        groups = [TensorGroup(printable(n), s, d, 1, b) for n, s, d, b in tensors]
    lines = [f"  {row}" for row in groups[:shown]]
    left = len(tensors) - sum(row.count for row in groups[:shown])
    return [*lines, f"  and {count(left, 'tensor')} more"] if left else lines


def notes(inspection: Inspection) -> list[str]:
    """Return the lines below the tensors: steps, metadata and skipped keys, shortened."""
    lines = [
        f"  step {saved.step:<8} epoch {saved.epoch}, {saved.samples:,} samples, "
        f"{count(saved.ranks, 'rank')}, {in_units(saved.nbytes)}, {printable(saved.written)}"
        for saved in inspection.steps
    ]
    if inspection.run_time is not None:
        lines.append(f"  {inspection.run_time}")
    texts = [f"{key}: {value}" for key, value in inspection.metadata.items()]
    groups = (("metadata", texts), ("skipped", group_by_part(inspection.skipped)))
    shortened = ((title, [_shorten(item) for item in items]) for title, items in groups)
    return [*(row for line in lines for row in _wrapped(line)), *rows(shortened, 9, SHOWN_NOTES)]


def inspect(source: Source) -> Inspection:
    """List the tensors of a source. Reads only headers, in milliseconds.

    Needs no process group and no GPU. For a run folder, lists the committed steps, and the tensors
    of the newest. Any process may call it; does not communicate.

    Example::

        torch.save({"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}, "w.pt")
        inspection = anyrank.inspect("w.pt")
        assert inspection.parameters == 9
        assert [tensor.name for tensor in inspection.tensors] == ["weight", "bias"]
        print(inspection)

    Args:
        source: a path or URL (Hugging Face folder, `.safetensors`, `.pt .pth .bin .ckpt`, DCP
            folder, anyrank run), a list of files, or a dict of tensors; as for `load`.

    Raises:
        LoadError: the source does not exist, cannot be read, has missing files, or has an unknown
            format.
        UnsafeFile: a header has impossible sizes, or a pickle would run code.
        TypeError: the source is not a path, a list of paths or a dict of tensors.
    """
    check_source(source)
    listing = list_source(source)
    quantised, not_read = _quantised(listing)
    dtypes = _totals(listing)
    folder = os.fspath(source) if isinstance(source, (str, os.PathLike)) else None
    return Inspection(
        path=name_of(source),
        format=listing.format,
        files=[InspectedFile(file.path, file.size) for file in listing.files if not file.in_memory],
        tensors=_tensors(listing),
        dtypes=dtypes,
        parameters=sum(total.elements for total in dtypes.values()),
        nbytes=listing.nbytes,
        metadata=listing.metadata,
        skipped=[*listing.skipped_texts, *not_read],
        tied=ties_of(listing.tensors),
        quantised=quantised,
        steps=[] if folder is None else steps_in(folder),
        run_time=None if folder is None else sum_up(read_log(folder)),
    )


def _quantised(listing: Listing) -> tuple[dict[str, str], list[str]]:
    """Return the tensors that `load` dequantizes, and why it does not dequantize others."""
    try:
        weights = values_without_model(listing)
    except LoadError as error:
        return {}, [str(error)]
    methods = {
        name: weights.kind_of(stored)
        for name, stored in weights.tensors.items()
        if any(weights.files[chunk.file].computed is not None for chunk in stored.chunks)
    }
    packed = packed_weights(weights)
    text = unknown_method(weights) or (packed_in_words(packed) if packed else None)
    return methods, [] if text is None else [text]


def name_of(source: Source) -> str:
    """Return the name of a source for reports."""
    if isinstance(source, Mapping):
        return "memory"
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    return ", ".join(os.fspath(path) for path in source)


def _tensors(listing: Listing) -> list[InspectedTensor]:
    return [
        InspectedTensor(
            name,
            stored.shape,
            dtype_name(stored.dtype),
            stored.nbytes,
            tuple(
                listing.files[index].path
                for index in dict.fromkeys(chunk.file for chunk in stored.chunks)
                if not listing.files[index].in_memory
            ),
        )
        for name, stored in listing.tensors.items()
    ]


def _elements(stored: StoredTensor) -> int:
    """Return the number of elements; torch counts packed ones (float4_e2m1fn_x2) as bytes."""
    return stored.numel * (2 if str(stored.dtype).endswith("_x2") else 1)


def _totals(listing: Listing) -> dict[str, Total]:
    members: dict[str, list[tuple[int, int]]] = {}
    tied = ties_of(listing.tensors)
    for name, stored in listing.tensors.items():
        size = (0, 0) if name in tied else (_elements(stored), stored.nbytes)
        members.setdefault(dtype_name(stored.dtype), []).append(size)
    totals = {
        dtype: Total(len(sizes), sum(n for n, _ in sizes), sum(b for _, b in sizes))
        for dtype, sizes in members.items()
    }
    return dict(sorted(totals.items(), key=lambda item: (-item[1].nbytes, item[0])))


def _wrapped(line: str) -> list[str]:
    """Wrap a line to 80 columns, without splitting words."""
    return textwrap.wrap(
        line, COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _shorten(text: str) -> str:
    line = printable(text)
    return line if len(line) <= SHOWN_LETTERS else f"{line[: SHOWN_LETTERS - 3]}..."
