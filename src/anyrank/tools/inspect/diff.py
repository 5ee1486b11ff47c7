"""`anyrank.diff`: compare two sources by names, shapes, dtypes and values."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from anyrank.errors import LoadError
from anyrank.files.listing import Listing, ties_of
from anyrank.files.manifest import MANIFEST, Manifest, read_manifest
from anyrank.files.progress import progress_of_tool
from anyrank.files.reader import Reader
from anyrank.files.storage import join_path, storage_for
from anyrank.models.dialects.registry import values_without_model
from anyrank.models.dialects.transformers.quantized import BLOCK_SIZE
from anyrank.sources.rank_index import RankIndex
from anyrank.sources.readers.folders import RUN, looks_like
from anyrank.sources.readers.runs import no_step, whole_steps
from anyrank.sources.source import Source, check_source, list_source
from anyrank.sources.step_listing import open_step
from anyrank.sources.tables.parts import comparable_views
from anyrank.tensors.spec import StoredTensor
from anyrank.tools.inspect.inspect import name_of
from anyrank.tools.inspect.records import Ignore, record_differences
from anyrank.tools.inspect.stream import as_numbers, boxes_of, open_values
from anyrank.tools.inspect.tool_folders import is_tool_folder, with_optimizers
from anyrank.wording import count, rows

IN_PART = re.compile(r"@\d{5}$")  # ending of the names of tensors in the state of a part
SHOWN = 10
LONGEST = 60  # characters of a value
BEFORE = 10  # characters shown before the first difference of two values


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between the values of two tensors.

    Attributes:
        largest: largest absolute difference; NaN if exactly one of two values is NaN.
        elements: number of elements that differ.
        of: total number of elements.
    """

    largest: float
    elements: int
    of: int

    def __str__(self) -> str:
        return f"{self.elements:,} of {self.of:,} values differ, by at most {self.largest:.3g}"


@dataclass(frozen=True)
class DiffReport:
    """The result of `diff`. `print` it for a summary; it is true if nothing differs.

    Two runs need not have saved the same steps. They are equal if they have common steps, and all
    of these are equal.

    Attributes:
        a, b: the sources, as passed; for runs, the folders of the step.
        equal: number of tensors with the same bits under the same name.
        only_a, only_b: names that only one of the two has; for steps, also parts.
        tied: names that only one of the two has, but that are not a difference -> the tensor in
            both whose bytes the name shares.
        shapes: name -> both shapes.
        dtypes: name -> both dtypes; the values are compared too.
        values: name -> the difference, the largest one first.
        numbers: for two steps, all differences except for tensors and data, such as options of
            optimizer groups, values in the state of schedulers or your own parts, and the epoch ->
            both values; "absent" for a missing one.
        data: for two steps, the differences between the states of their ElasticLoaders -> both
            values.
        step: for two runs, the first common step that differs, which the fields above describe;
            None if no step differs.
        newest: for two runs, the newest common step; None if no step is common.
        parts: for two runs, part of the state -> whether it is equal in the newest common step; for
            two steps, part -> whether it is equal.
        steps_equal: for two runs, the steps that are equal.
        steps_only: for two runs, the steps that only one of the two has; they are not compared.
        unreadable: tensors that were not compared because they are not dense -> what they are. Such
            sources are not equal.
        not_compared: parts that only one of the two has (a flat file has no optimizer or averages)
            -> number of tensors. In this case, only the weights are compared.
    """

    a: str
    b: str
    equal: int
    only_a: list[str]
    only_b: list[str]
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    dtypes: dict[str, tuple[str, str]]
    values: dict[str, Difference]
    numbers: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    data: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    step: int | None = None
    newest: int | None = None
    parts: dict[str, bool] = field(default_factory=dict[str, bool])
    steps_equal: list[int] = field(default_factory=list[int])
    steps_only: list[int] = field(default_factory=list[int])
    unreadable: dict[str, str] = field(default_factory=dict[str, str])
    not_compared: dict[str, int] = field(default_factory=dict[str, int])
    tied: dict[str, str] = field(default_factory=dict[str, str])

    def __bool__(self) -> bool:
        names = self.only_a or self.only_b
        others = self.numbers or self.data or self.unreadable
        if self.steps_only and not self.steps_equal:
            return False
        return not (names or self.shapes or self.dtypes or self.values or others)

    def to_json(self) -> str:
        """Return all fields as a JSON object; a NaN becomes null."""
        fields = asdict(self)
        for difference in fields["values"].values():
            if not math.isfinite(difference["largest"]):
                difference["largest"] = None
        return json.dumps(fields, indent=2)

    def __str__(self) -> str:
        lines = [f"{self.a} and {self.b}: {self._verdict()}"]
        if self.step is not None:
            lines.append(f"  first difference at step {self.step}")
        groups: list[tuple[str, list[str]]] = [
            ("only in", [f"{self.a}: {name}" for name in self.only_a]),
            ("only in", [f"{self.b}: {name}" for name in self.only_b]),
            (
                "tied",
                [f"{name} = {kept}, only in one of the two" for name, kept in self.tied.items()],
            ),
            ("shape", [f"{n}: {list(x)} and {list(y)}" for n, (x, y) in self.shapes.items()]),
            ("dtype", [f"{n}: {x} and {y}" for n, (x, y) in self.dtypes.items()]),
            ("values", [f"{name}: {value}" for name, value in self.values.items()]),
            ("data", _data_in_words(self.data)),
            (
                "number",
                [f"{n}: {_both_shown(x, y)}" for n, (x, y) in self.numbers.items()],
            ),
            ("unread", [f"{name}: {what}" for name, what in self.unreadable.items()]),
            (
                "beside",
                [f"{n}: {count(k, 'tensor')}, not compared" for n, k in self.not_compared.items()],
            ),
            ("steps", [f"{step}: only in one of the two" for step in self.steps_only]),
        ]
        lines += rows(groups, 10, SHOWN)
        if self.newest is not None and not self:
            lines.append(f"  newest common step ({self.newest}), by part:")
            lines += rows(
                [
                    ("equal", [part for part, same in self.parts.items() if same]),
                    ("different", [part for part, same in self.parts.items() if not same]),
                ],
                10,
                SHOWN,
            )
        return "\n".join(lines)

    def _verdict(self) -> str:
        steps = f" in {count(len(self.steps_equal), 'step')}" if self.steps_equal else ""
        if self:
            what = "the weights are equal" if self.not_compared else "equal"
            return f"{what}, {count(self.equal, 'tensor')}{steps}"
        if self.step is None and self.steps_only:
            return "no step in common"
        before = f" after {count(len(self.steps_equal), 'equal step')}" if steps else ""
        same = count(self.equal, "tensor") if self.equal else "no tensor"
        return f"different{before}; {same} equal"


def _data_in_words(data: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return a line for each difference between the data of two steps."""
    lines = [f"{name}: {x} and {y}" for name, (x, y) in data.items() if name != "receipt"]
    return ["different samples were seen in this epoch", *lines] if "receipt" in data else lines


def _both_shown(x: Any, y: Any) -> str:
    """Return the texts of two different values; long ones start near their first difference."""
    texts = str(x), str(y)
    pairs = enumerate(zip(*texts, strict=False))
    start = next((n for n, (p, q) in pairs if p != q), min(map(len, texts))) - BEFORE
    start = start if start > 0 and max(map(len, texts)) > LONGEST else 0
    return " and ".join(_shown(text, start) for text in texts)


def _shown(text: str, start: int) -> str:
    before, after = "..." * (start > 0), "..." * (len(text) > start + LONGEST)
    return f"{before}{text[start : start + LONGEST]}{after}"


def diff(a: Source, b: Source, *, ignore: str | Sequence[str] = ()) -> DiffReport:
    """Compare two sources of any formats, tensor by tensor, a few MiB at a time.

    Two runs are compared step by step, with all tensors and plain values of all their parts. The
    report describes the first step that differs, and says for each part whether it is equal in the
    newest common step. Values that may differ between equal runs (id, time, rank counts, layouts,
    versions) and random generators are not compared; if the rank counts differ, neither is a part
    that each rank saved for itself.

    For two folders of other tools (Trainer, Accelerate, DeepSpeed), the weights and the tensors of
    optimizers are compared. For two checkpoints of one other format (`.pt`, Lightning, DCP), the
    tensors of all their tables are compared. For any other pair, such as a run and the output of
    `convert`, the weights are compared, and the report names everything else.

    Any process may call it; does not communicate.

    Example::

        torch.save({"weight": torch.zeros(3), "bias": torch.ones(2)}, "a.pt")
        torch.save({"weight": torch.zeros(3), "b": torch.ones(2)}, "b.pt")
        report = anyrank.diff("a.pt", "b.pt")
        assert not report
        assert (report.only_a, report.only_b) == (["bias"], ["b"])

    Args:
        a, b: paths or URLs, lists of files, or dicts of tensors; as for `load`.
        ignore: a pattern or a list of patterns, with the wildcards of file names, for what to
            ignore: a part of the state ("timer"), or names as in the report (`"*.bias"`,
            `"scheduler.step_size"`), with all names below them.

    Returns:
        The report, which is true if nothing differs.

    Raises:
        LoadError, UnsafeFile: a source cannot be read.
        CheckpointError: the folder of another tool is incomplete.
        TypeError: a source is not a path, a list of paths or a dict of tensors; or `ignore` is not
            a str or a list of str.
    """
    check_source(a)
    check_source(b)
    ignored = _ignored(ignore)
    steps_a, steps_b = _committed_steps(a), _committed_steps(b)
    if steps_a is not None and steps_b is not None:
        return _diff_runs(name_of(a), name_of(b), steps_a, steps_b, ignored)
    in_a, in_b = list_source(a), list_source(b)
    if is_tool_folder(a) and is_tool_folder(b):
        in_a, in_b = with_optimizers(a, in_a), with_optimizers(b, in_b)
    in_a, in_b, beside = comparable_views(in_a, in_b)
    # With different block sizes, the same numbers and scales are different weights.
    sizes = [q[BLOCK_SIZE] for q in (in_a.quantization, in_b.quantization) if BLOCK_SIZE in q]
    is_other = len(sizes) == 2 and sizes[0] != sizes[1]
    wide_a = values_without_model(in_a, {} if is_other else _dtypes(in_b))
    wide_b = values_without_model(in_b, {} if is_other else _dtypes(in_a))
    report = _diff(name_of(a), name_of(b), wide_a, wide_b, ignored)
    parts = Counter(_part_of(name) for name in beside if not ignored(name))
    return replace(report, not_compared=dict(parts))


def _ignored(ignore: object) -> Ignore:
    """Return a function that says whether a name or a table above it matches a pattern."""
    patterns: Any = [ignore] if isinstance(ignore, str) else ignore
    if not isinstance(patterns, Sequence) or not all(isinstance(text, str) for text in patterns):
        kind = type(ignore).__name__
        raise TypeError(f"ignore={ignore!r}: expected a pattern or a list of patterns, got {kind}")
    with_inner = [*patterns, *(f"{pattern}.*" for pattern in patterns)]
    return lambda name: any(fnmatchcase(_place_of(name), text) for text in with_inner)


def _dtypes(listing: Listing) -> dict[str, torch.dtype]:
    return {name: stored.dtype for name, stored in listing.tensors.items()}


def _committed_steps(source: Source) -> dict[int, str] | None:
    """Return step -> folder for a run or a step; None for any other source."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    path = os.fspath(source)
    storage = storage_for(path)
    if not storage.is_dir(path) or not looks_like(RUN, names := storage.names(path)):
        return None
    if MANIFEST in names:
        return {read_manifest(storage, path).step: path}
    steps = {step.number: join_path(path, step.name) for step in whole_steps(storage, path, names)}
    if not steps:
        raise LoadError(f"{path}: {no_step(names)}")
    return steps


def _diff_runs(
    a: str, b: str, steps_a: Mapping[int, str], steps_b: Mapping[int, str], ignore: Ignore
) -> DiffReport:
    if len(steps_a) == len(steps_b) == 1 and a in steps_a.values() and b in steps_b.values():
        return _diff_steps(a, b, ignore)  # whatever their numbers
    equal: list[int] = []
    only = sorted(steps_a.keys() ^ steps_b.keys())
    both = sorted(steps_a.keys() & steps_b.keys())
    report = DiffReport(a, b, 0, [], [], {}, {}, {})
    parts: dict[str, bool] = {}
    for step in both:
        of_step = _diff_steps(steps_a[step], steps_b[step], ignore)
        parts = of_step.parts
        if not of_step:
            report = replace(of_step, step=step)
            break
        equal.append(step)
        report = replace(report, equal=report.equal + of_step.equal)
    if report.step is not None and report.step != both[-1]:
        parts = _diff_steps(steps_a[both[-1]], steps_b[both[-1]], ignore).parts
    newest = both[-1] if both else None
    return replace(report, newest=newest, parts=parts, steps_equal=equal, steps_only=only)


def _diff_steps(a: str, b: str, ignore: Ignore) -> DiffReport:
    """Compare two steps: their tensors, and all plain values of their parts."""
    manifest_a, manifest_b = (read_manifest(storage_for(folder), folder) for folder in (a, b))
    in_a, indexes_a = open_step(storage_for(a), a, manifest_a)
    in_b, indexes_b = open_step(storage_for(b), b, manifest_b)
    by_rank = _parts_of_ranks(manifest_a, manifest_b)
    report = _diff(a, b, in_a, in_b, lambda name: ignore(name) or _part_of(name) in by_rank)
    records = _with_ranks(manifest_a, indexes_a), _with_ranks(manifest_b, indexes_b)
    numbers, data = record_differences(*records, ignore)
    absent = {_place_of(name) for name in (*report.only_a, *report.only_b)}
    names = [part for part in {**manifest_a.parts, **manifest_b.parts} if not ignore(part)]
    report = replace(
        report,
        only_a=[*(part for part in names if part not in manifest_b.parts), *report.only_a],
        only_b=[*(part for part in names if part not in manifest_a.parts), *report.only_b],
        numbers={name: pair for name, pair in numbers.items() if name not in absent},
        data=data,
    )
    differing = _differing_parts(report)
    return replace(report, parts={part: part not in differing for part in names})


def _differing_parts(report: DiffReport) -> set[str]:
    """Return the parts of two steps that differ; a part is the start of a name."""
    by_name = (report.shapes, report.dtypes, report.values, report.numbers)
    names = {name for names in by_name for name in names}
    names |= {*report.only_a, *report.only_b}
    return {_part_of(name) for name in names} | ({"data"} if report.data else set[str]())


def _with_ranks(manifest: Manifest, indexes: Mapping[int, RankIndex]) -> Manifest:
    """Return a manifest whose records include the parts that each rank saved for itself."""
    parts = {
        part: record | {"by_rank": [indexes[rank].parts.get(part) for rank in sorted(indexes)]}
        if isinstance(record, dict) and "by_rank" in record
        else record
        for part, record in manifest.parts.items()
    }
    return replace(manifest, parts=parts)


def _parts_of_ranks(a: Manifest, b: Manifest) -> set[str]:
    """Return the parts that each rank saved for itself, if the rank counts differ."""
    if a.saved_on["ranks"] == b.saved_on["ranks"]:
        return set()
    return {
        part
        for step in (a, b)
        for part, record in step.parts.items()
        if isinstance(record, dict) and "by_rank" in record
    }


def _place_of(name: str) -> str:
    """Return the path of a tensor in the state, without the number of a part's own tensor."""
    return IN_PART.sub("", name)


def _part_of(name: str) -> str:
    return _place_of(name).partition(".")[0]


def _diff(name_a: str, name_b: str, a: Listing, b: Listing, ignore: Ignore) -> DiffReport:
    a, b = (
        listing.with_tensors({n: t for n, t in listing.tensors.items() if not ignore(n)})
        for listing in (a, b)
    )
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    dtypes: dict[str, tuple[str, str]] = {}
    values: dict[str, Difference] = {}
    unread = {n: what for n, what in {**a.unreadable, **b.unreadable}.items() if not ignore(n)}
    tied = _second_names(a, b) | _second_names(b, a)
    beside = unread.keys() | tied.keys()
    only_a = [name for name in a.tensors if name not in b.tensors and name not in beside]
    only_b = [name for name in b.tensors if name not in a.tensors and name not in beside]
    equal = 0
    both = [name for name in a.tensors if name in b.tensors]
    total = sum(a.tensors[name].nbytes + b.tensors[name].nbytes for name in both)
    with (
        open_values(a) as in_a,
        open_values(b) as in_b,
        progress_of_tool("comparing", total) as progress,
    ):
        for name in both:
            x, y = a.tensors[name], b.tensors[name]
            progress.add(x.nbytes + y.nbytes)
            if x.shape != y.shape:
                shapes[name] = (x.shape, y.shape)
                continue
            if a.kind_of(x) != b.kind_of(y):
                dtypes[name] = (a.kind_of(x), b.kind_of(y))
            difference = _compare(x, y, in_a, in_b)
            if difference is not None:
                values[name] = difference
            elif name not in dtypes:
                equal += 1
    return DiffReport(
        name_a,
        name_b,
        equal,
        only_a,
        only_b,
        shapes,
        dtypes,
        dict(sorted(values.items(), key=lambda item: -_size(item[1].largest))),
        unreadable=unread,
        tied=tied,
    )


def _second_names(listing: Listing, other: Listing) -> dict[str, str]:
    """Return names that only this source has -> the name of the same bytes that both have.

    One writer keeps one name of a tie, and another writer keeps both; the tensors are the same.
    """
    owners = ties_of(listing.tensors)
    common = {owners.get(name, name): name for name in listing.tensors if name in other.tensors}
    only = (name for name in listing.tensors if name not in other.tensors)
    return {n: common[owner] for n in only if (owner := owners.get(n, n)) in common}


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


def _size(largest: float) -> float:
    return math.inf if math.isnan(largest) else largest


def _compare(a: StoredTensor, b: StoredTensor, in_a: Reader, in_b: Reader) -> Difference | None:
    """Compare two tensors of the same shape; return None if no value differs."""
    largest, elements = 0.0, 0
    for box in boxes_of(a):
        x, y = in_a.read(a, box), in_b.read(b, box)
        if x.dtype == y.dtype and torch.equal(_bytes(x), _bytes(y)):
            continue
        gap, number = _difference(x, y)
        elements += number
        largest = gap if math.isnan(gap) or gap > largest else largest
    return Difference(largest, elements, a.numel) if elements else None


def _difference(x: torch.Tensor, y: torch.Tensor) -> tuple[float, int]:
    """Return the largest absolute difference and the number of elements that differ.

    Equal bits are equal.
    """
    same = x.dtype == y.dtype
    x, y = as_numbers(x).reshape(-1), as_numbers(y).reshape(-1)
    whole = not (x.is_floating_point() or x.is_complex() or y.is_floating_point() or y.is_complex())
    if whole:  # as ints of Python, which do not overflow
        differ = (x.to(torch.int64) if x.dtype != y.dtype else x) != (
            y.to(torch.int64) if x.dtype != y.dtype else y
        )
        pairs = zip(x[differ].tolist(), y[differ].tolist(), strict=True)
        return max((float(abs(int(p) - int(q))) for p, q in pairs), default=0.0), int(differ.sum())
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    p, q = x.to(wide), y.to(wide)
    differ = ~((p == q) | (p.isnan() & q.isnan()))
    if same and x.dtype.itemsize in (2, 4, 8) and not x.is_complex():  # -0.0 is not 0.0
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
        differ |= (p == 0) & (q == 0) & (x.view(bits) != y.view(bits))
    if not differ.any():
        return 0.0, 0
    gaps = (p[differ] - q[differ]).abs()
    return (math.nan if gaps.isnan().any() else float(gaps.max())), int(differ.sum())
