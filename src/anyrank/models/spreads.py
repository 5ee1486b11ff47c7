"""How tensors are laid out on all ranks, for plans of the work of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from anyrank.tensors.layout import GIVEN_BOXES
from anyrank.tensors.sharded_tensor import Coordinates, Members, ShardedTensor
from anyrank.tensors.spread import Spread
from anyrank.world.ranks import Ranks


def spreads_of(
    tensors: Sequence[ShardedTensor], coordinates: Mapping[int, Coordinates], ranks: Ranks
) -> list[Spread]:
    """Return the spread of each tensor; tensors with the same spread share one object.

    Args:
        tensors: the tensors of any rank.
        coordinates: coordinates of every rank, by global rank.
        ranks: the ranks, in whose order a spread counts them.
    """
    by_rank = [coordinates[rank] for rank in ranks.ranks]
    which = by_rank[0].which
    are_numbered_alike = all(known.which is which or known.which == which for known in by_rank)
    spreads: list[Spread] = []
    known: dict[object, Spread] = {}
    for index, tensor in enumerate(tensors):
        key: object = tensor.layout
        if tensor.layout is not None:
            # A rank that knows only its own coordinate may number the meshes differently.
            key = tensor.layout, which[index] if are_numbered_alike else -1 - index
        if tensor.layout == GIVEN_BOXES or key not in known:
            known[key] = _spread(index, tensor, by_rank)
        spreads.append(known[key])
    return spreads


def _spread(index: int, tensor: ShardedTensor, by_rank: Sequence[Coordinates]) -> Spread:
    if tensor.layout is None:
        return Spread(None, [()] * len(by_rank))
    coordinates = [known.coordinate(index) for known in by_rank]
    if tensor.layout == GIVEN_BOXES:
        # Without the shape of the local tensor, because ranks may hold a box in tensors of
        # different shapes.
        ndim = len(tensor.shape)
        coordinates = [c if c is None else (0,) * ndim + c[ndim:] for c in coordinates]
    return Spread(tensor.layout, coordinates)


def replicas_here(
    tensors: Sequence[ShardedTensor], spreads: Sequence[Spread], ranks: Ranks
) -> Iterator[tuple[ShardedTensor, Members]]:
    """Yield each tensor of which other ranks hold the same part as this rank, with all of them."""
    members: dict[int, Members] = {}
    for tensor, spread in zip(tensors, spreads, strict=True):
        if id(spread) not in members:
            spot = spread.spot(ranks.index)
            indices = () if spot is None else spread.members[spot]
            members[id(spread)] = tuple(ranks.ranks[index] for index in indices)
        if len(members[id(spread)]) > 1 and tensor.pieces:
            yield tensor, members[id(spread)]
