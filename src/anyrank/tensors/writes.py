"""Assigns the parts of tensors to the ranks that write them: each element once, balanced by bytes.

Each rank computes its writes itself, from what every rank knows: shapes, layouts and meshes of the
tensors. A part that only one rank holds is written by that rank. Parts that several ranks hold are
dealt to them in lots, the largest first, each to the holder that has the fewest bytes so far. Parts
that few ranks hold are dealt before those that many hold, so that no rank writes more than the
optimum plus one lot.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from anyrank.tensors.box import Box
from anyrank.tensors.layout import Piece
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.spread import Coordinate, Spread

PIECE_BYTES = 32 << 20  # largest piece on disk: the unit of balance and of staging
LOTS = 16  # per rank that shares them, unless that makes them too large or too small
MIN_LOT_BYTES = 1 << 20  # small tensors stay together: a reader opens one file, not hundreds


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to write, as all ranks know it.

    Attributes:
        shape: global shape.
        itemsize: bytes of an element.
        spread: its layout on the ranks.
        may_differ: whether the holders of a part may have different values; then the first one
            writes it.
    """

    shape: tuple[int, ...]
    itemsize: int
    spread: Spread
    may_differ: bool = False


class Write(NamedTuple):
    """One piece of a tensor, by the tensor's position in every rank's list."""

    number: int
    piece: Piece


Kind = tuple[tuple[int, ...], int]  # shape and itemsize: they determine the pieces at a spot
Dealt = Mapping[int, Sequence[int]]  # index of a tensor -> for each piece, which of the holders


class WritePlan:
    """The writes of each rank for some tensors. Ranks with the same arguments have the same plan.

    Args:
        tensors: tensors, in the same order on every rank.
        size: number of ranks.
    """

    def __init__(self, tensors: Sequence[PlannedTensor], size: int) -> None:
        self.tensors = tensors
        self.size = size
        self._load = [0] * size
        self._dealt: dict[int, dict[Coordinate, Dealt]] = {}  # by identity of a spread
        self._count_alone()
        shared: dict[int, list[int]] = {}
        for index, tensor in enumerate(tensors):
            most = max(map(len, tensor.spread.members.values()), default=0)
            if most > 1 and not tensor.may_differ:
                shared.setdefault(id(tensor.spread), []).append(index)
        for indices in sorted(shared.values(), key=self._most_holders):
            self._deal(indices)

    def _most_holders(self, indices: Sequence[int]) -> int:
        return max(map(len, self.tensors[indices[0]].spread.members.values()))

    def _count_alone(self) -> None:
        """Count the bytes of parts that only one rank can write."""
        counts: dict[tuple[int, Kind, bool], list[PlannedTensor]] = {}
        for tensor in self.tensors:
            key = id(tensor.spread), (tensor.shape, tensor.itemsize), tensor.may_differ
            counts.setdefault(key, []).append(tensor)
        for alike in counts.values():
            spread, nbytes = alike[0].spread, alike[0].itemsize * len(alike)
            if (
                all(len(members) > 1 for members in spread.members.values())
                and not alike[0].may_differ
            ):
                continue
            for spot, numel in spread.numels(alike[0].shape):
                first, *others = spread.members[spot]
                if alike[0].may_differ or not others:
                    self._load[first] += numel * nbytes

    def _deal(self, indices: Sequence[int]) -> None:
        """Deal the tensors of one spread, spot by spot."""
        spread = self.tensors[indices[0]].spread
        kinds = [(self.tensors[index].shape, self.tensors[index].itemsize) for index in indices]
        dealt = self._dealt.setdefault(id(spread), {})
        known: dict[object, tuple[Dealt, list[int]]] = {}  # most spots are like the previous one
        for spot, members in spread.members.items():
            if len(members) == 1:
                continue
            sizes = {kind: _sizes(kind, spread, spot) for kind in dict.fromkeys(kinds)}
            lowest = min(self._load[member] for member in members)
            ahead = tuple(self._load[member] - lowest for member in members)
            key = ahead, tuple(sizes.values())
            if key not in known:
                rows = zip(indices, (sizes[kind] for kind in kinds), strict=True)
                known[key] = _deal_lots([*rows], ahead)
            dealt[spot], added = known[key]
            for member, nbytes in zip(members, added, strict=True):
                self._load[member] += nbytes

    def writes_of(self, rank: int) -> Iterator[Write]:
        """Yield the writes of a rank, by its index, in the order of the tensors."""
        for index, tensor in enumerate(self.tensors):
            if 0 in tensor.shape:
                if rank == 0:  # as one empty box, so that its dtype and shape are kept
                    whole = Box.whole(tensor.shape)
                    yield Write(index, Piece(whole, whole.offsets))
                continue
            spread = tensor.spread
            spot = spread.spot(rank)
            if spot is None:
                continue
            pieces = cut_pieces(tensor.shape, tensor.itemsize, spread, spot)
            members = spread.members[spot]
            if tensor.may_differ or len(members) == 1:
                if members[0] == rank:
                    for piece in pieces:
                        yield Write(index, piece)
                continue
            for piece, holder in zip(pieces, self._dealt[id(spread)][spot][index], strict=True):
                if members[holder] == rank:
                    yield Write(index, piece)

    def writers(self, index: int) -> list[int]:
        """Return the indices of the ranks that write parts of a tensor, ascending."""
        tensor = self.tensors[index]
        if 0 in tensor.shape:
            return [0]
        writers: set[int] = set()
        for spot, members in tensor.spread.members.items():
            if tensor.may_differ or len(members) == 1:
                writers |= {members[0]} if tensor.spread.pieces(tensor.shape, spot) else set()
            else:
                holders = self._dealt[id(tensor.spread)][spot][index]
                writers |= {members[holder] for holder in holders}
        return sorted(writers)


def plan_writes(
    tensors: Sequence[ShardedTensor], spreads: Sequence[Spread], size: int
) -> WritePlan:
    """Plan who writes what of the tensors that ranks hold together.

    Args:
        tensors: tensors as this rank holds them, for which `check_alike` has passed.
        spreads: layout of each on the ranks.
        size: number of ranks.
    """
    planned = [
        PlannedTensor(tensor.shape, tensor.dtype.itemsize, spread, tensor.may_differ)
        for tensor, spread in zip(tensors, spreads, strict=True)
    ]
    return WritePlan(planned, size)


def cut_pieces(
    shape: tuple[int, ...], itemsize: int, spread: Spread, spot: Coordinate
) -> tuple[Piece, ...]:
    """Cut a tensor's part at a spot into pieces of at most PIECE_BYTES."""
    return _cut(spread.pieces(shape, spot), PIECE_BYTES // itemsize)


@lru_cache(maxsize=4096)
def _cut(pieces: tuple[Piece, ...], most: int) -> tuple[Piece, ...]:
    return tuple(piece.part(box) for piece in pieces for box in piece.box.cut(most))


def _sizes(kind: Kind, spread: Spread, spot: Coordinate) -> tuple[int, ...]:
    """Return the number of bytes of each piece of a tensor at a spot."""
    shape, itemsize = kind
    pieces = cut_pieces(shape, itemsize, spread, spot)
    return tuple(piece.box.numel * itemsize for piece in pieces)


def _deal_lots(
    rows: Sequence[tuple[int, tuple[int, ...]]], ahead: Sequence[int]
) -> tuple[Dealt, list[int]]:
    """Deal pieces to holders.

    Args:
        rows: index of each tensor, and the bytes of each of its pieces.
        ahead: bytes that each holder has already.

    Returns:
        Which holder writes each piece, and the number of bytes that each holder got.
    """
    total = sum(map(sum, (sizes for _, sizes in rows)))
    limit = min(PIECE_BYTES, max(MIN_LOT_BYTES, total // (LOTS * len(ahead))))
    lots: list[int] = [0]  # bytes of each
    lot_of: dict[int, list[int]] = {}
    for index, sizes in rows:
        numbers = lot_of[index] = []
        for nbytes in sizes:
            if lots[-1] and lots[-1] + nbytes > limit:
                lots.append(0)
            lots[-1] += nbytes
            numbers.append(len(lots) - 1)
    fewest = [(nbytes, holder) for holder, nbytes in enumerate(ahead)]
    heapq.heapify(fewest)
    holder_of = [0] * len(lots)
    added = [0] * len(ahead)
    for number in sorted(range(len(lots)), key=lambda n: -lots[n]):
        nbytes, holder = fewest[0]
        heapq.heapreplace(fewest, (nbytes + lots[number], holder))
        holder_of[number] = holder
        added[holder] += lots[number]
    return {i: [holder_of[n] for n in numbers] for i, numbers in lot_of.items()}, added
