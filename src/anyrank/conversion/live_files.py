"""The files of a live model: each rank writes what it holds to where it belongs, and compares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from anyrank.conversion.content import cast_into
from anyrank.conversion.destination import Destination
from anyrank.conversion.planning import check_headers
from anyrank.conversion.writing import finishing
from anyrank.errors import CheckpointError
from anyrank.files import placed_file
from anyrank.files.output import FileSpan, Output
from anyrank.files.placed_file import PlacedFile
from anyrank.files.segments import memory_of
from anyrank.files.storage import join_path, read_exactly
from anyrank.files.store import storing, write_file
from anyrank.model.tensors import ModelTensor
from anyrank.tensors.box import Box, row_major
from anyrank.tensors.layout import Piece
from anyrank.tensors.writes import Write
from anyrank.world.ranks import Ranks

WINDOW_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor that this rank writes: rows of a span, which may lie apart in the file."""

    held: ModelTensor
    piece: Piece
    span: FileSpan


def parts_of(
    output: Output, targets: Sequence[ModelTensor], writes: Sequence[Write], rank: int
) -> dict[str, list[Part]]:
    """File -> what one rank writes into it."""
    at: dict[str, list[tuple[str, FileSpan]]] = {}
    for file in output.files:
        for span in file.spans:
            at.setdefault(span.tensor.name, []).append((file.name, span))
    parts: dict[str, list[Part]] = {}
    for write in writes:
        if write.writer != rank or not write.piece.box.numel:
            continue
        held = targets[write.index]
        for file, span in at[held.name]:
            common = write.piece.box.intersect(span.box)
            if common is not None:
                part = Part(held, write.piece.part(common), span)
                parts.setdefault(file, []).append(part)
    return parts


def write_files(
    place: Destination, output: Output, parts: dict[str, list[Part]], ranks: Ranks
) -> None:
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
            _write_file(place, join_path(place.folder, name), mine, ranks.check)

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


def _windows(part: Part) -> Iterator[Box]:
    yield from part.piece.box.cut(WINDOW_BYTES // part.span.tensor.dtype.itemsize)


def _runs(span: FileSpan, box: Box) -> Iterator[tuple[int, int]]:
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


def _write_file(
    place: Destination, path: str, parts: Sequence[Part], check: Callable[[], None]
) -> None:
    """Write a rank's parts into a file that is there, durably, and compare it with them."""
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
    placed: PlacedFile, path: str, parts: Sequence[Part], check: Callable[[], None]
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
    parts: Sequence[Part],
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
