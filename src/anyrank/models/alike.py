"""Checks that ranks have the same tensors, and equal values where several hold the same part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from anyrank.errors import AnyrankError
from anyrank.tensors.sharded_tensor import (
    Coordinates,
    Members,
    ShardedTensor,
    coordinates_of,
    describe,
)
from anyrank.world.alike import Values, differing, digest_of
from anyrank.world.failures import ranks_by_value
from anyrank.world.ranks import Ranks


class Inventory(NamedTuple):
    """A rank's summary of its tensors for the other ranks; all of them list tensors in one order.

    Attributes:
        digest: equal on ranks that have the same tensors.
        coordinates: this rank's position in the mesh of each tensor.
    """

    digest: str
    coordinates: Coordinates


def inventory_of(tensors: Sequence[ShardedTensor], ranks: Ranks) -> Inventory:
    """Make an inventory; a process alone gets no digest, because nobody would compare it."""
    digest = digest_of(describe(tensors)) if ranks.size > 1 else ""
    return Inventory(digest, coordinates_of(tensors))


def check_alike(
    title: str,
    tensors: Sequence[ShardedTensor],
    inventories: Sequence[Inventory],
    ranks: Ranks,
    error: type[AnyrankError],
) -> dict[int, Coordinates]:
    """Refuse ranks that have other tensors, or have them in another order. All ranks.

    Args:
        title: beginning of the error: "the ranks' models differ".
        tensors: this rank's tensors.
        inventories: inventory of each rank.
        ranks: the ranks that compare.
        error: the error's class.

    Returns:
        The coordinates of every rank, by global rank.

    Raises:
        AnyrankError: of class `error`: the first difference.
    """
    by_rank = dict(zip(ranks.ranks, inventories, strict=True))
    if len({inventory.digest for inventory in inventories}) == 1:
        return {rank: inventory.coordinates for rank, inventory in by_rank.items()}
    lines = {"tensors": {f"{n}": row for n, row in enumerate(describe(tensors))}}
    digests = [{"tensors": inventory.digest} for inventory in inventories]
    values = next(iter(differing(lines, digests, ranks, limit=1)["tensors"].values()))
    texts = {rank: row or "no further tensor" for rank, row in values.items()}
    (first, *_), (other, *_), *_ = ranks_by_value(texts).values()
    raise error(
        f"{title}: rank {first} has {texts[first]}, rank {other} has {texts[other]}: build them "
        "alike on all ranks"
    )


def differing_replicas(
    shared: Iterable[tuple[ShardedTensor, Members]],
    ranks: Ranks,
    digest_all: Callable[[Iterable[ShardedTensor]], Iterable[str]],
) -> dict[str, Values]:
    """Compare the parts that several ranks hold copies of. All ranks.

    Args:
        shared: tensors with the ranks that hold the same part; those of other ranks are left out.
        ranks: the ranks that compare.
        digest_all: gives a text for this rank's part of each, the same on all ranks.

    Returns:
        Name of each tensor that differs -> the digest of each rank that holds it.
    """

    def digest_own() -> tuple[dict[Members, dict[str, str]], dict[Members, str]]:
        own_pairs = [(tensor, members) for tensor, members in shared if ranks.rank in members]
        # Of all ranks, because some may lack tensors that others hold.
        lines: dict[Members, dict[str, str]] = {ranks.ranks: {}}
        digests = digest_all(tensor for tensor, _ in own_pairs)
        for (tensor, members), text in zip(own_pairs, digests, strict=True):
            own_lines = lines.setdefault(members, {})
            # Two keys of an optimizer's state may give one name.
            own_lines[tensor.name] = own_lines.get(tensor.name, "") + text
        return lines, {members: digest_of(texts.items()) for members, texts in lines.items()}

    lines, digests = ranks.run_and_gather("comparing the replicas", digest_own)
    # One digest covers all that the same ranks hold: names are sent only where one differs.
    wrong: dict[str, Values] = {}
    for by_name in differing(lines, digests, ranks).values():
        for name, values in by_name.items():  # one line for all parts of a tensor
            wrong.setdefault(name, {}).update(values)
    return wrong
