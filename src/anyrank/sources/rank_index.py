"""`__R_0.json`: positions in the data file of a rank, and other state that only that rank saved.

Its checksum is in the manifest. Tensors are numbered as in `tensors.json` (`step_index`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from anyrank.files.json_codec import reading_record
from anyrank.files.manifest import RankFiles, index_name, read_small
from anyrank.files.storage import Storage, join_path
from anyrank.files.threads import spread
from anyrank.sources.step_index import StepIndex, whole_numbers
from anyrank.tensors.box import Box
from anyrank.tensors.spec import dtype_name

REQUESTS = 16  # in parallel


class Placed(NamedTuple):
    """A box of a tensor, and the offset of its first element in the rank's data file."""

    box: Box
    offset: int


class OwnTensor(NamedTuple):
    """A tensor that only one rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placed: Sequence[Placed]


@dataclass(frozen=True)
class RankIndex:
    """The index of the data that one rank saved.

    Attributes:
        placed: number of a tensor -> its boxes in the file of the rank.
        own_tensors: name -> a tensor that only this rank has.
        parts: part of the state -> this rank's record of it, if the ranks' records differ.
        generators: random generator -> its state, if the ranks' states differ.
    """

    placed: Mapping[int, Sequence[Placed]]
    own_tensors: Mapping[str, OwnTensor]
    parts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    generators: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        boxes = [
            (number, box.offsets, box.sizes, offset)
            for number, placed in self.placed.items()
            for box, offset in placed
        ]
        own_tensors = {
            name: {
                "dtype": dtype_name(tensor.dtype),
                "shape": tensor.shape,
                "boxes": [(box.offsets, box.sizes, offset) for box, offset in tensor.placed],
            }
            for name, tensor in self.own_tensors.items()
        }
        index = {
            "boxes": boxes,
            "own": own_tensors,
            "parts": self.parts,
            "generators": self.generators,
        }
        return (json.dumps(index, separators=(",", ":")) + "\n").encode()


def parse(data: bytes, where: str, step: StepIndex, size: int) -> RankIndex:
    """Read a rank's index.

    Args:
        data: bytes of the file.
        where: path of the file.
        step: index of the step.
        size: bytes of the rank's data file.

    Raises:
        CorruptCheckpoint: a save does not write such an index: for example, a box is outside its
            tensor or the file.
    """
    with reading_record(where):
        index = json.loads(data)
        placed: dict[int, list[Placed]] = {}
        for number, offsets, sizes, offset in index["boxes"]:
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r:.40} is not the number of a tensor")
            tensor = step.tensors[number]
            entry = _placed(tensor.name, (offsets, sizes, offset), tensor.shape, tensor.dtype, size)
            placed.setdefault(number, []).append(entry)
        own_tensors: dict[str, OwnTensor] = {}
        for name, entry in index["own"].items():
            shape, dtype = whole_numbers(name, entry["shape"]), getattr(torch, entry["dtype"])
            boxes = [_placed(name, box, shape, dtype, size) for box in entry["boxes"]]
            if sum(box.numel for box, _ in boxes) != math.prod(shape):
                raise ValueError(f"{name}: its pieces do not fill its shape {list(shape)}")
            own_tensors[name] = OwnTensor(shape, dtype, boxes)
        return RankIndex(placed, own_tensors, dict(index["parts"]), dict(index["generators"]))


def _placed(
    name: str,
    entry: Sequence[Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    size: int,
) -> Placed:
    offsets, sizes, offset = entry
    whole_numbers(name, (*offsets, *sizes, offset))
    if not len(offsets) == len(sizes) == len(shape):
        raise ValueError(f"{name}: a piece has a different number of dims than its tensor")
    if any(low + n > most for low, n, most in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"{name}: a piece is outside its shape {list(shape)}")
    if offset + math.prod(sizes) * dtype.itemsize > size:
        raise ValueError(f"{name}: a piece extends beyond the end of its file")
    return Placed(Box(tuple(offsets), tuple(sizes)), offset)


def read_indexes(
    storage: Storage,
    folder: str,
    files: Sequence[RankFiles],
    step: StepIndex,
    ranks: Iterable[int],
    threads: int = REQUESTS,
) -> dict[int, RankIndex]:
    """Read the indexes of some ranks, and return them by rank.

    Args:
        storage: where the folder is.
        folder: folder of the step.
        files: files of the ranks that saved it.
        step: index of the step.
        ranks: ranks to read, by their indices among those that saved.
        threads: maximum number of threads that read.

    Raises:
        CorruptCheckpoint: an index is missing, or has changed since it was written.
        CheckpointError: an index cannot be read; chained to the storage's error.
    """
    wanted = sorted(ranks)
    indexes: dict[int, RankIndex] = {}

    def read(rank: int) -> None:
        data = read_small(storage, folder, index_name(rank), files[rank].index)
        indexes[rank] = parse(data, join_path(folder, index_name(rank)), step, files[rank].size)

    run_each(read, wanted, threads)
    return {rank: indexes[rank] for rank in wanted}


def run_each(work: Callable[[int], object], items: Sequence[int], threads: int) -> None:
    """Call `work` for each item, in several threads if there are several items."""
    if len(items) > 1:
        spread(items, [work] * min(len(items), threads))
        return
    for item in items:
        work(item)
