"""Plans who writes which box of which tensor: each element once, bytes balanced over the ranks."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from anyrank.tensors.box import Box
from anyrank.tensors.layout import Piece
from anyrank.tensors.sharded_tensor import Coordinates, ShardedTensor, replicas

PIECE_BYTES = 32 << 20  # largest piece on disk: the unit of balance and of staging


@dataclass(frozen=True, slots=True)
class Write:
    """One box of a tensor and the rank that writes it.

    Attributes:
        index: position of the tensor in every rank's list.
        piece: the box, and where it starts in the writer's local tensor.
        writer: global rank.
        nbytes: size of the box in bytes.
    """

    index: int
    piece: Piece
    writer: int
    nbytes: int


def plan_writes(
    tensors: Sequence[ShardedTensor],
    coordinates: Mapping[int, Coordinates],
    by_first: Container[str] = (),
) -> list[Write]:
    """Every element of every tensor, once. The same list on all ranks that hold the same tensors.

    A rank writes the parts that it alone holds. Parts that several hold are assigned piece by
    piece, the largest first, to the holder with the fewest bytes so far.

    Args:
        tensors: as this rank holds them, in the same order on all ranks.
        coordinates: of every rank, by global rank.
        by_first: names of tensors that the first holder writes whole, because ranks may differ.
    """
    load = dict.fromkeys(coordinates, 0)
    writes: list[Write] = []
    shared: list[tuple[int, int, Piece, tuple[int, ...]]] = []
    for index, tensor in enumerate(tensors):
        itemsize = tensor.dtype.itemsize
        groups = replicas(index, tensor, coordinates)
        for pieces, members in (groups or _empty(tensor, coordinates)).items():
            for whole in pieces:
                for box in whole.box.cut(PIECE_BYTES // itemsize):
                    piece = whole.part(box)
                    nbytes = piece.box.numel * itemsize
                    first, *others = members
                    if others and tensor.name not in by_first:
                        shared.append((nbytes, index, piece, members))
                        continue
                    load[first] += nbytes
                    writes.append(Write(index, piece, first, nbytes))
    for nbytes, index, piece, members in sorted(shared, key=lambda entry: -entry[0]):
        writer = min(members, key=load.__getitem__)
        load[writer] += nbytes
        writes.append(Write(index, piece, writer, nbytes))
    return writes


def _empty(
    tensor: ShardedTensor, coordinates: Mapping[int, Coordinates]
) -> dict[tuple[Piece, ...], tuple[int, ...]]:
    """Plan a tensor without elements as one empty box, so that its dtype and shape are kept.

    Its local offset does not matter.
    """
    whole = Box.whole(tensor.shape)
    return {(Piece(whole, whole.offsets),): (next(iter(coordinates)),)}
