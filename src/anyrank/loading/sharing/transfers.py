"""Plan who sends which box of a tensor to whom, from one layout to another. Pure functions.

Every rank computes only its own sends and receives. The ranks need not compare them, because both
ends of a transfer follow the same rule. All transfers have one order, by receiver, piece and box.
Ranks that work through their own parts in that order never deadlock, because both ends of the first
unfinished transfer have reached it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from anyrank.errors import LoadError
from anyrank.tensors.box import Box, BoxIndex, row_major
from anyrank.tensors.layout import Layout, Piece, local_pieces
from anyrank.tensors.spec import StoredTensor

MIN_SPLIT = 16 << 10  # elements: a smaller box comes from one holder, even if several have it
MAX_STRIPS = 1 << 16  # per tensor


@dataclass(frozen=True, slots=True)
class Strip:
    """A box of a wanted tensor, and the place of its elements in a source tensor.

    Attributes:
        box: box in the wanted tensor.
        source: number of the source tensor.
        start: position of the box's first element in the source tensor.
        dims: for each dim of the box the source's dim, or -1 for a dim of size 1 that it lacks.
    """

    box: Box
    source: int
    start: tuple[int, ...]
    dims: tuple[int, ...]

    @staticmethod
    def whole(source: int, shape: tuple[int, ...]) -> Strip:
        """Return all of a source tensor, which is the wanted tensor unchanged."""
        return Strip(Box.whole(shape), source, (0,) * len(shape), tuple(range(len(shape))))

    def transposed(self) -> Strip:
        """Return these elements if the wanted tensor has the dims in reverse order."""
        return Strip(self.box.reversed(), self.source, self.start, self.dims[::-1])

    def to_source(self, box: Box) -> Box:
        """Map a box inside the strip to the source tensor."""
        offsets, sizes = list(self.start), [1] * len(self.start)
        for d, dim in enumerate(self.dims):
            if dim >= 0:
                offsets[dim] += box.offsets[d] - self.box.offsets[d]
                sizes[dim] = box.sizes[d]
        return Box(tuple(offsets), tuple(sizes))

    def to_wanted(self, box: Box) -> Box:
        """Map a box of the source tensor, inside the strip, to the wanted tensor."""
        offsets, sizes = list(self.box.offsets), [1] * len(self.dims)
        for d, dim in enumerate(self.dims):
            if dim >= 0:
                offsets[d] += box.offsets[dim] - self.start[dim]
                sizes[d] = box.sizes[dim]
        return Box(tuple(offsets), tuple(sizes))


def strips_of(stored: StoredTensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Strip, ...]:
    """Cut a wanted tensor into boxes of source tensors.

    Args:
        stored: its chunks lie in source tensors, which are numbered like files and row-major.
        shapes: shapes of the source tensors, by number.

    Raises:
        LoadError: the elements of a chunk do not follow the source's dims.
    """
    strips: list[Strip] = []
    for chunk in stored.chunks:
        shape = shapes[chunk.file]
        first = chunk.offset // stored.dtype.itemsize
        if first == 0 and chunk.box == Box.whole(shape) and chunk.strides == row_major(shape):
            strips.append(Strip.whole(chunk.file, shape))
        elif chunk.box.numel:
            strips += _decoded(stored.name, chunk.box, chunk.file, first, chunk.strides, shape)
        if len(strips) > MAX_STRIPS:
            raise LoadError(f"{stored.name}: a conversion splits it into too many pieces to send")
    return tuple(strips)


def _decoded(
    name: str,
    box: Box,
    source: int,
    first: int,
    strides: Sequence[int],
    shape: Sequence[int],
) -> Iterator[Strip]:
    """Yield strips of a box whose elements lie at `first + sum(i * strides)` in the source."""
    steps = row_major(shape)
    start = tuple((first // step) % size for step, size in zip(steps, shape, strict=True))
    dims: list[int] = []
    for d, (size, stride) in enumerate(zip(box.sizes, strides, strict=True)):
        if size == 1:
            dims.append(-1)
            continue
        fits = (e for e, n in enumerate(shape) if n > 1 and steps[e] == stride and e not in dims)
        dim = next(fits, None)
        if dim is None:
            raise LoadError(
                f"{name}: a conversion moves its elements across the dims of the source's tensor "
                f"of shape {list(shape)}, which cannot be sent piece by piece"
            )
        room = shape[dim] - start[dim]
        if size > room:  # continues in the next row of the previous dim
            for part in box.split(d, room):
                jump = (part.offsets[d] - box.offsets[d]) * stride
                yield from _decoded(name, part, source, first + jump, strides, shape)
            return
        dims.append(dim)
    yield Strip(box, source, start, tuple(dims))


@dataclass(frozen=True)
class HeldBox:
    """A box of a source tensor and the ranks that hold it.

    Attributes:
        box: in the source tensor.
        holders: global rank -> start of the box in the rank's local tensor.
        nodes: machine of each global rank.
    """

    box: Box
    holders: Mapping[int, tuple[int, ...]]
    nodes: Mapping[int, int]

    @cached_property
    def _by_node(self) -> dict[int, tuple[int, ...]]:
        ranks_by_node: dict[int, list[int]] = {}
        for rank in self.holders:
            ranks_by_node.setdefault(self.nodes[rank], []).append(rank)
        return {node: tuple(ranks) for node, ranks in ranks_by_node.items()}

    @cached_property
    def _all(self) -> tuple[int, ...]:
        return tuple(self.holders)

    def near(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that may send to a rank: itself, else those on its machine, else all."""
        if rank in self.holders:
            return (rank,)
        return self._by_node.get(self.nodes[rank], self._all)


Coordinate = tuple[int, ...] | None


def places_of(
    shape: Sequence[int],
    layout: Layout | None,
    coordinates: Mapping[int, Coordinate],
    nodes: Mapping[int, int],
) -> tuple[HeldBox, ...]:
    """Return the boxes of a tensor, each with the ranks that hold it.

    Args:
        shape: global shape.
        layout: layout on the ranks of `coordinates`; None: each of them holds the whole tensor.
        coordinates: global rank -> its coordinate in the layout's mesh.
        nodes: global rank -> its machine.
    """
    by_coordinate: dict[Coordinate, list[int]] = {}
    for rank, coordinate in coordinates.items():
        by_coordinate.setdefault(coordinate, []).append(rank)
    holders: dict[Box, dict[int, tuple[int, ...]]] = {}
    for coordinate, ranks in by_coordinate.items():
        for piece in local_pieces(shape, layout, coordinate):
            holders.setdefault(piece.box, {}).update(dict.fromkeys(ranks, piece.local))
    return tuple(
        HeldBox(box, dict(sorted(ranks.items())), nodes)
        for box, ranks in sorted(holders.items(), key=lambda item: item[0].offsets)
    )


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box that a rank sends to another rank, or copies to itself.

    Attributes:
        sender, receiver: global ranks.
        strip: number of the strip of the wanted tensor that the box is in.
        box_number: number of the held box that contains it.
        box: box in the wanted tensor.
        source: its start in the sender's local tensor, in the source's dims.
        target: its start in the receiver's local tensor.
    """

    sender: int
    receiver: int
    strip: int
    box_number: int
    box: Box
    source: tuple[int, ...]
    target: tuple[int, ...]


def transfers_of(
    rank: int,
    strips: Sequence[Strip],
    places: Sequence[Sequence[HeldBox]],
    wanted: Mapping[int, Sequence[Piece]],
) -> list[Transfer]:
    """Return a rank's sends and receives for one wanted tensor, in the order of all ranks.

    A box that several ranks hold is cut into one part per holder. Each receiver starts with a
    different holder, so that all holders send about the same amount.

    Args:
        rank: global rank.
        strips: strips of the wanted tensor.
        places: for each strip, the holders of its source tensor.
        wanted: global rank -> the pieces of the wanted tensor that it receives.

    Raises:
        LoadError: no rank holds an element that `rank` receives.
    """
    all_boxes = [_Numbered([*enumerate(boxes)]) for boxes in places]
    own_boxes = [
        _Numbered([(n, box) for n, box in enumerate(boxes) if rank in box.holders])
        for boxes in places
    ]
    transfers: list[Transfer] = []
    for position, (receiver, pieces) in enumerate(wanted.items()):
        known = all_boxes if receiver == rank else own_boxes
        for piece in pieces:
            filled = 0
            for number, strip in enumerate(strips):
                common = piece.box.intersect(strip.box)
                if common is None:
                    continue
                inside = strip.to_source(common)
                for n, held_box, overlap in known[number].common(inside):
                    filled += overlap.numel
                    senders = held_box.near(receiver)
                    box = strip.to_wanted(overlap)
                    for sender, part in _shared(box, senders, position + n):
                        if rank in (sender, receiver):
                            inner = strip.to_source(part).relative_to(held_box.box.offsets)
                            source = inner.shifted(held_box.holders[sender]).offsets
                            target = piece.part(part).local
                            transfers.append(
                                Transfer(sender, receiver, number, n, part, source, target)
                            )
            if receiver == rank and filled != piece.box.numel:
                raise LoadError(
                    f"the source's ranks hold only {filled} of the {piece.box.numel} elements that "
                    f"rank {rank} needs at {list(piece.box.offsets)}. Pass src on every rank of "
                    "its mesh"
                )
    return transfers


class _Numbered:
    """Some of the held boxes of a tensor, with their numbers."""

    def __init__(self, boxes: Sequence[tuple[int, HeldBox]]) -> None:
        self.boxes = boxes
        self.index = BoxIndex([held_box.box for _, held_box in boxes])

    def common(self, box: Box) -> Iterator[tuple[int, HeldBox, Box]]:
        """Yield the held boxes that overlap a box, with their numbers and the overlap."""
        for n, overlap in sorted(self.index.common(box), key=lambda pair: pair[0]):
            yield *self.boxes[n], overlap


def _shared(box: Box, senders: Sequence[int], start: int) -> Iterator[tuple[int, Box]]:
    """Cut a box into parts, one for each sender if it is large enough."""
    count = len(senders)
    if count == 1 or box.numel < MIN_SPLIT:
        yield senders[start % count], box
        return
    for number, part in enumerate(box.cut(math.ceil(box.numel / count))):
        yield senders[(start + number) % count], part
