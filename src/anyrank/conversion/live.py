"""A live model into files: every rank writes what it holds to where it belongs, all at once."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import nn

from anyrank.conversion.content import cast_into
from anyrank.conversion.destination import Destination, destination
from anyrank.conversion.file_names import configuration, file_named
from anyrank.conversion.options import ConvertOptions
from anyrank.conversion.planning import check_headers, plan_output
from anyrank.conversion.report import ConvertReport
from anyrank.conversion.writing import finishing
from anyrank.errors import CheckpointError, LoadError
from anyrank.files import placed_file
from anyrank.files.content_hash import content_hash
from anyrank.files.output import Output, OutputTensor, Span
from anyrank.files.placed_file import PlacedFile
from anyrank.files.segments import memory_of
from anyrank.files.storage import join_path, read_exactly
from anyrank.files.store import storing, write_file
from anyrank.model.given_layouts import apply_layouts
from anyrank.model.tensors import ModelTensor, find_tensors, in_state_dict
from anyrank.model.verify import check_alike, compare_replicas
from anyrank.tensors.box import Box, row_major
from anyrank.tensors.layout import Piece
from anyrank.tensors.names import renamer
from anyrank.tensors.sharded_tensor import Coordinates, Described, coordinates_of, lazy_view
from anyrank.tensors.spec import StoredTensor, dtype_name
from anyrank.tensors.writes import Write, plan_writes
from anyrank.world.group import Group
from anyrank.world.ranks import Ranks, open_ranks

WINDOW_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of a tensor that this rank writes: rows of a span, which may lie apart in the file."""

    held: ModelTensor
    piece: Piece
    span: Span


@dataclass(frozen=True, slots=True)
class _Summary:
    described: list[Described]
    tied: dict[str, str]
    coordinates: Coordinates
    buffers: dict[str, str]


def convert_live(
    src: object,
    dst: str | os.PathLike[str],
    checked: Callable[[], ConvertOptions],
    process_group: Group,
) -> ConvertReport:
    """As `convert`, of a model. All ranks.

    Args:
        src: the model; `checked` refuses anything else.
        dst: as for `convert`.
        checked: the options; raises for arguments that are wrong in themselves.
        process_group: as for `convert`.
    """
    start = time.perf_counter()
    with torch.inference_mode(False), open_ranks(process_group, "convert()", into(dst)) as ranks:
        options, place, is_file = _agreed(dst, checked, ranks)
        assert isinstance(src, nn.Module)
        model = src
        place = replace(place, folder=ranks.from_one("naming the folder", lambda: place.folder))
        found = _tensors(model, options, ranks)
        targets, summaries = ranks.own_and_all(
            "naming the tensors", lambda: _look(model, found, renamer(options.rename))
        )
        _check_alike(summaries, ranks)
        alike = [held for held in targets if held.kind == "parameter" or held.layout is not None]
        compare_replicas(alike, ranks)
        tensors = [
            OutputTensor(held.name, held.shape, _cast(held.dtype, options)) for held in targets
        ]
        tied = summaries[0].tied
        small: dict[str, bytes] = {}
        if not is_file and options.to == "safetensors":
            small = configuration(model, options.dtype)
        output = plan_output(place, tensors, tied, options, metadata={})
        output = replace(output, small={**small, **output.small})
        places_of = {r: s.coordinates for r, s in zip(ranks.ranks, summaries, strict=True)}
        unsynced = {held.name for held in targets} - {held.name for held in alike}
        writes = plan_writes(targets, places_of, by_first=unsynced)
        _write(place, output, _parts(targets, writes, output, ranks.rank), ranks)
    differ = [n for n in unsynced if len({summary.buffers.get(n) for summary in summaries}) > 1]
    return ConvertReport(
        source=type(model).__name__,
        path=place.path,
        format=options.to,
        files=[*(file.name for file in output.files), *output.small],
        tensors=len(tensors),
        nbytes=output.nbytes,
        tied=tied,
        cast={
            held.name: f"{dtype_name(held.dtype)} -> {dtype_name(tensor.dtype)}"
            for held, tensor in zip(targets, tensors, strict=True)
            if held.dtype != tensor.dtype
        },
        renamed={},
        merged=[],
        copied=[],
        skipped=[f"{n}: differs between ranks; the first rank's was written" for n in differ],
        verified=f"xxh3-64 of {len(output.files)} files, and their headers",
        seconds=time.perf_counter() - start,
    )


def into(dst: object) -> str:
    """A conversion by its destination, which no two conversions of a program share."""
    return f"convert() into {os.path.abspath(str(dst))}"


def _agreed(
    dst: str | os.PathLike[str], checked: Callable[[], ConvertOptions], ranks: Ranks
) -> tuple[ConvertOptions, Destination, bool]:
    """The options, where to write, and whether that is a file: alike on all ranks. All ranks.

    Raises:
        ValueError, TypeError, LoadError: on all ranks, where one rank's arguments are wrong or
            differ.
    """
    found: list[tuple[ConvertOptions, Destination, bool]] = []
    given: dict[str, object] = {}  # filled by `check`, which runs before they are compared

    def check() -> None:
        options = checked()
        is_file = options.is_file(dst)
        place = destination(dst, [], is_file, options.overwrite)
        if not place.store.renames:
            raise ValueError(f"{place.path}: a model is written to local paths: copy it then")
        given["dst"] = os.fspath(dst)
        given.update((name, getattr(options, name)) for name in options.__dataclass_fields__)
        given["layout"] = options.layout is not None  # ranks may give different ones
        found.append((options, place, is_file))

    ranks.same_arguments("convert", given, LoadError, check)
    return found[0]


def _tensors(model: nn.Module, options: ConvertOptions, ranks: Ranks) -> list[ModelTensor]:
    """This rank's tensors, with what plain ones are parts of. All ranks."""
    found = ranks.own("looking at the model", lambda: in_state_dict(find_tensors(model)))
    if options.layout is not None:
        apply_layouts(found, options.layout, ranks, strict=True)
    return found


def _look(
    model: nn.Module, found: Sequence[ModelTensor], rename: Callable[[str], str]
) -> tuple[list[ModelTensor], _Summary]:
    """This rank's tensors under the names that they get, and what the others are to know."""
    adapters = [held.name for held in found if held.adapter]
    on_meta = [held.name for held in found if held.is_meta]
    views = [problem for held in found if (problem := lazy_view(held))]
    if adapters:
        raise LoadError(
            f"{adapters[0]}: belongs to an adapter: merge it into the model first "
            "(merge_and_unload), or save the adapter with PEFT and convert [base, adapter]"
        )
    if on_meta:
        raise LoadError(f"{on_meta[0]}: is on meta, so there is nothing to write: load first")
    if views:
        raise LoadError(views[0])
    if not found:
        raise LoadError("the model has no parameters and no buffers")
    files = _file_names(model, found)
    targets = [replace(held, name=rename(files[held.name])) for held in found]
    tied = {
        rename(place.name): target.name
        for held, target in zip(found, targets, strict=True)
        for place in held.registrations
        if place.name != held.name
    }
    names = [*(held.name for held in targets), *tied]
    twice = [name for name, number in Counter(names).items() if number > 1 or not name]
    if twice:
        raise LoadError(f"{twice[0]!r} is the name of two tensors of the model, or empty: rename")
    buffers = {
        held.name: content_hash(held.local())
        for held in targets
        if held.kind == "buffer" and held.layout is None
    }
    described = [held.describe() for held in targets]
    return targets, _Summary(described, tied, coordinates_of(targets), buffers)


def _file_names(model: nn.Module, found: Sequence[ModelTensor]) -> dict[str, str]:
    """Name -> the name that transformers saves a tensor under.

    Raises:
        LoadError: it does not save it as it is.
    """
    stored = {
        held.name: StoredTensor.contiguous(held.name, held.shape, held.dtype, number, 0)
        for number, held in enumerate(found)
    }
    named = {t.chunks: name for name, t in file_named(model, stored).items()}
    changed = [name for name, t in stored.items() if t.nbytes and t.chunks not in named]
    if changed:
        raise LoadError(
            f"{changed[0]}: transformers saves it in parts or transposed, as it does "
            f"{len(changed)} tensors of this model: save a run, and convert that with model="
        )
    return {name: named.get(t.chunks, name) for name, t in stored.items()}


def _check_alike(summaries: Sequence[_Summary], ranks: Ranks) -> None:
    """Raises LoadError on all ranks: their models differ."""
    check_alike([summary.described for summary in summaries], ranks)
    first, ours = ranks.ranks[0], summaries[0].tied
    for rank, summary in zip(ranks.ranks, summaries, strict=True):
        if summary.tied != ours:
            raise LoadError(
                f"the ranks' models differ: rank {first} ties {ours}, rank {rank} {summary.tied}"
            )


def _cast(dtype: torch.dtype, options: ConvertOptions) -> torch.dtype:
    return options.dtype if options.dtype is not None and dtype.is_floating_point else dtype


def _parts(
    targets: Sequence[ModelTensor], writes: Sequence[Write], output: Output, rank: int
) -> dict[str, list[_Part]]:
    """File -> what this rank writes into it."""
    at: dict[str, list[tuple[str, Span]]] = {}
    for file in output.files:
        for span in file.spans:
            at.setdefault(span.tensor.name, []).append((file.name, span))
    parts: dict[str, list[_Part]] = {}
    for write in writes:
        if write.writer != rank or not write.piece.box.numel:
            continue
        held = targets[write.index]
        for file, span in at[held.name]:
            common = write.piece.box.intersect(span.box)
            if common is not None:
                part = _Part(held, write.piece.part(common), span)
                parts.setdefault(file, []).append(part)
    return parts


def _write(place: Destination, output: Output, parts: dict[str, list[_Part]], ranks: Ranks) -> None:
    """Write, verify and commit; nothing is left where that fails. All ranks.

    Raises:
        CheckpointError: the destination cannot be written, or does not hold what was written.
    """

    def make() -> None:
        place.prepare(output.nbytes)
        for file in output.files:
            file.check_cover()
            path = join_path(place.folder, file.name)
            with storing(path):
                made = placed_file.create(place.store, path, file.size)
                for offset, data in file.fixed:
                    made.write(offset, memoryview(data))
                made.finish()

    def fill() -> None:
        for name, mine in parts.items():
            _write_parts(place, join_path(place.folder, name), mine, ranks.check)

    def commit() -> None:
        for name, data in output.small.items():
            write_file(place.store, join_path(place.folder, name), data)
        check_headers(place, output)
        place.commit()

    try:
        ranks.from_one("making the files", make)
        ranks.together("writing the weights", fill)
        ranks.from_one("committing", commit)
    except BaseException:
        if ranks.index == 0:
            place.abandon()
        raise


def _windows(part: _Part) -> Iterator[Box]:
    yield from part.piece.box.cut(WINDOW_BYTES // part.span.tensor.dtype.itemsize)


def _runs(span: Span, box: Box) -> Iterator[tuple[int, int]]:
    """File offset and bytes of each run of adjacent elements of a box inside a span, in order."""
    itemsize, strides = span.tensor.dtype.itemsize, row_major(span.box.sizes)
    whole = len(box.sizes)  # dims from here on are whole, so that a run reaches over them
    while whole and box.sizes[whole - 1] == span.box.sizes[whole - 1]:
        whole -= 1
    outer = max(whole - 1, 0)
    nbytes = math.prod(box.sizes[outer:]) * itemsize
    inside = box.relative_to(span.box.offsets).offsets
    base = sum(a * s for a, s in zip(inside, strides, strict=True))
    for index in itertools.product(*(range(size) for size in box.sizes[:outer])):
        elements = base + sum(i * s for i, s in zip(index, strides, strict=False))
        yield span.start + elements * itemsize, nbytes


def _write_parts(
    place: Destination, path: str, parts: Sequence[_Part], check: Callable[[], None]
) -> None:
    """Write parts into a file that is there, durably, and compare it with them."""
    with storing(path):
        placed = placed_file.reopen(path)
    try:
        digests = _fill(placed, path, parts, check)
    except BaseException:
        placed.abandon()
        raise
    with finishing(placed, path):
        _compare(place, path, parts, digests, check)


def _fill(
    placed: PlacedFile, path: str, parts: Sequence[_Part], check: Callable[[], None]
) -> list[bytes]:
    """Write parts into an open file; the digest of each window."""
    import xxhash  # only files that are written or verified need it

    digests: list[bytes] = []
    for part in parts:
        local = part.held.local()
        for box in _windows(part):
            check()
            given = local[part.piece.part(box).local_slices()].cpu()
            memory = torch.empty(box.sizes, dtype=part.span.tensor.dtype, device="cpu")
            if given.dtype == memory.dtype:
                memory.copy_(given)
            else:
                cast_into(memory, given, part.held.name)
            data, position = memory_of(memory), 0
            digests.append(xxhash.xxh3_64_digest(data))
            with storing(path):
                for offset, nbytes in _runs(part.span, box):
                    placed.write(offset, data[position : position + nbytes])
                    position += nbytes
    return digests


def _compare(
    place: Destination,
    path: str,
    parts: Sequence[_Part],
    digests: Sequence[bytes],
    check: Callable[[], None],
) -> None:
    """Raises CheckpointError: the file does not hold what this rank wrote."""
    import xxhash  # only files that are written or verified need it

    memory = memoryview(bytearray(WINDOW_BYTES))
    windows = ((part, box) for part in parts for box in _windows(part))
    with closing(place.store.open(path)) as file:
        for (part, box), digest in zip(windows, digests, strict=True):
            check()
            position = 0
            for offset, nbytes in _runs(part.span, box):
                read_exactly(file, path, [memory[position : position + nbytes]], offset)
                position += nbytes
            if xxhash.xxh3_64_digest(memory[:position]) != digest:
                raise CheckpointError(
                    f"{path}: {part.held.name} is not what was written: the disk or the memory of "
                    "this machine is damaged, or ranks do not see the same folder"
                )
