"""`anyrank.inspect`: lists the contents of a source, from its headers alone."""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from anyrank.files.listing import Listing, ties_of
from anyrank.models.dialects.transformers.dequantize import (
    packed_in_words,
    packed_weights,
    unknown_method,
)
from anyrank.models.dialects.transformers.quantized import pairs_of
from anyrank.runs.resume.run_log import read_log
from anyrank.runs.resume.run_time import RunTime, sum_up
from anyrank.sources.readers.runs import steps_in
from anyrank.sources.run_step import SavedStep
from anyrank.sources.source import Source, check_source, list_source
from anyrank.tensors.spec import StoredTensor, dtype_name
from anyrank.tools.inspect.groups import TensorGroup, group
from anyrank.wording import count, group_by_part, in_units, printable, rows, short_dtype

SHOWN_GROUPS = 30  # with head and tail, what fits on one screen
SHOWN_NOTES = 3
SHOWN_LETTERS = 60
COLUMNS = 80


@dataclass(frozen=True, slots=True)
class InspectedFile:
    """A file of the source.

    Attributes:
        path: as the source names it.
        nbytes: its size, headers included.
    """

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """A tensor at rest.

    Attributes:
        name: its key.
        shape: the global shape, if a format keeps a tensor in parts.
        dtype: torch's name, without "torch.".
        nbytes: size of its elements.
        files: paths of the files that hold it; several only in DCP folders.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Total:
    """Tensors of one dtype: their number, elements and bytes. Tied ones count once."""

    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """The contents of a source. Printable as one screen.

    Attributes:
        path: the source, as given.
        format: for example "safetensors, 4 files", "torch zip", "lightning" or "dcp".
        files: the files that hold the tensors; empty for tensors in memory.
        tensors: all of them, in the order of the headers.
        dtypes: dtype -> total, the largest first.
        parameters: elements of all tensors, tied ones once: a file does not tell parameters from
            buffers.
        nbytes: size of all tensors, tied ones once.
        tied: name -> the name of the tensor before it whose bytes it shares.
        metadata: free text that the format carries.
        skipped: files and keys that `load` ignores, each with the reason.
        quantized: tensors that `load` dequantizes -> how they are quantized.
        steps: the committed steps of a run folder, the newest first; its tensors are the newest's.
        run_time: for a run folder on a local disk, where its time went, from its `log.jsonl`.
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
    quantized: dict[str, str] = field(default_factory=dict[str, str])
    steps: list[SavedStep] = field(default_factory=list[SavedStep])
    run_time: RunTime | None = None

    def to_json(self) -> str:
        """All fields, as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return "\n".join([*summary(self), *tensor_rows(self, SHOWN_GROUPS), *notes(self)])


def summary(inspection: Inspection) -> list[str]:
    """Format, counts and sizes, dtypes: the lines above the tensors."""
    kinds = (
        f"{short_dtype(dtype)}: {count(total.tensors, 'tensor')}, {in_units(total.nbytes)}"
        for dtype, total in inspection.dtypes.items()
    )
    tied = f" ({len(inspection.tied):,} tied)" if inspection.tied else ""
    parts = [inspection.format, count(len(inspection.tensors), "tensor") + tied]
    parts += [f"{inspection.parameters:,} parameters", in_units(inspection.nbytes)]
    methods = Counter(inspection.quantized.values())
    ways = (
        f"{method}, which `load` dequantizes: {count(number, 'tensor')} with their scales"
        for method, number in methods.items()
    )
    lines = [*kinds, *ways]
    first = f"{printable(inspection.path)}: {', '.join(parts)}"
    return [first, *(row for line in lines for row in _wrapped(f"  {line}"))]


def tensor_rows(
    inspection: Inspection, shown: int | None = None, *, grouped: bool = True
) -> list[str]:
    """Name, shape, dtype and bytes of each tensor, or of each group of layers, a line each.

    Args:
        inspection: what was inspected.
        shown: most groups to show; default: all.
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
    """Steps, metadata and what was skipped, shortened: the lines below the tensors."""
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
    """Read the headers of a source, and no payload: no process group, no GPU, milliseconds.

    For a run folder, it lists the committed steps, and the tensors of the newest.

    Called by one process; ranks need not agree.

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
        LoadError: nothing exists there, no permission, an incomplete set of files, or an unknown
            format.
        UnsafeFile: a header that lies, or a pickle that would run code.
        TypeError: neither path, list of paths nor dict of tensors.
    """
    check_source(source)
    listing = list_source(source)
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
        skipped=[*listing.skipped, *_not_read(listing)],
        tied=ties_of(listing.tensors),
        quantized={pair.name: pair.method for pair in pairs_of(listing.tensors)},
        steps=[] if folder is None else steps_in(folder),
        run_time=None if folder is None else sum_up(read_log(folder)),
    )


def _not_read(listing: Listing) -> list[str]:
    """Explain that `load` does not read the weights into floating ones, if it does not."""
    packed = packed_weights(listing)
    text = unknown_method(listing) or (packed_in_words(packed) if packed else None)
    return [] if text is None else [text]


def name_of(source: Source) -> str:
    """The name of a source in reports."""
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
    """The elements of a tensor; torch counts packed ones (float4_e2m1fn_x2) by the byte."""
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
    """Wrap a line to a terminal of 80 columns; words stay whole."""
    return textwrap.wrap(
        line, COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _shorten(text: str) -> str:
    line = printable(text)
    return line if len(line) <= SHOWN_LETTERS else f"{line[: SHOWN_LETTERS - 3]}..."
