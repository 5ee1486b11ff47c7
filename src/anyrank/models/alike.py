"""Checks that ranks have the same tensors, and that replicas have the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from anyrank.errors import AnyrankError
from anyrank.models.mesh_coordinates import UNKNOWN, coordinates_of_all, digest_meshes
from anyrank.tensors.sharded_tensor import Coordinates, Members, ShardedTensor, describe
from anyrank.world.alike import (
    Compared,
    RanksByText,
    differing,
    digest_of,
    digests_of_lines,
    join_digests,
)
from anyrank.world.ranks import Ranks

Inventory: TypeAlias = "dict[str, Compared]"
"""Digests of a rank's tensors, which every rank has in the same order, and of their meshes."""

TENSORS, MESHES = "tensors", "meshes"
MODULUS = 1 << 128  # for sums of digests


def inventory_of(tensors: Sequence[ShardedTensor], ranks: Ranks) -> Inventory:
    """Return an inventory, for `join_digests` to merge; empty for a process alone."""
    if ranks.size == 1:
        return {}
    return {
        TENSORS: Compared(digest_of(describe(tensors)), ranks.rank),
        MESHES: Compared(digest_meshes(tensors, ranks), ranks.rank),
    }


def check_alike(
    title: str,
    tensors: Sequence[ShardedTensor],
    inventory: Inventory,
    ranks: Ranks,
    error: type[AnyrankError],
) -> None:
    """Check that the ranks have the same tensors in the same order. Collective.

    Args:
        title: title of the error: "the ranks' models differ".
        tensors: tensors of this rank.
        inventory: inventory of all ranks, merged by `join_digests`.
        ranks: ranks that compare.
        error: class of the error.

    Raises:
        AnyrankError: of class `error`; it names the first difference.
    """
    if ranks.size == 1 or inventory[TENSORS].digest:
        return
    lines = {TENSORS: {f"{n}": row for n, row in enumerate(describe(tensors))}}
    wrong = differing(lines, {TENSORS: inventory[TENSORS]}, ranks, limit=1)
    by_text = next(iter(wrong[TENSORS].values()))
    (text, first), (other_text, other), *_ = by_text.items()
    lacks = "no other tensor"
    raise error(
        f"{title}: rank {first.ranks[0]} has {text or lacks}, but rank {other.ranks[0]} has "
        f"{other_text or lacks}. Build the same model on every rank."
    )


def find_coordinates(
    tensors: Sequence[ShardedTensor], inventory: Inventory, ranks: Ranks
) -> Mapping[int, Coordinates]:
    """Return the coordinates of every rank in the tensors' meshes, by global rank. Collective.

    Args:
        tensors: tensors of this rank, for which `check_alike` has passed.
        inventory: inventory of all ranks, merged.
        ranks: ranks of the call.
    """
    are_alike = ranks.size > 1 and inventory[MESHES].digest not in ("", UNKNOWN)
    return coordinates_of_all(tensors, ranks, are_alike=are_alike)


def differing_replicas(
    shared: Iterable[tuple[ShardedTensor, Members]],
    ranks: Ranks,
    digest_all: Callable[[Iterable[ShardedTensor]], Iterable[str]],
) -> dict[str, RanksByText]:
    """Compare the values of which several ranks hold the same part. Collective.

    Args:
        shared: tensors with the ranks that hold the same part; those that this rank does not hold
            may be missing.
        ranks: the ranks that compare.
        digest_all: returns a text for this rank's part of each; the same values give the same text.

    Returns:
        Name of each tensor that differs -> the digests, and the ranks that hold each.
    """

    def digest_own() -> tuple[dict[str, dict[str, str]], int]:
        own_pairs = [(tensor, members) for tensor, members in shared if ranks.rank in members]
        # For all ranks, because some may lack tensors that others hold.
        by_members: dict[Members, dict[str, str]] = {ranks.ranks: {}}
        digests = digest_all(tensor for tensor, _ in own_pairs)
        for (tensor, members), text in zip(own_pairs, digests, strict=True):
            own_lines = by_members.setdefault(members, {})
            # Two keys of an optimizer's state may have the same name.
            own_lines[tensor.name] = own_lines.get(tensor.name, "") + text
        balance, lines = 0, dict[str, dict[str, str]]()
        for members, texts in by_members.items():
            lines[digest_of(members)] = texts
            number = int(digest_of([members, *texts.items()]), 16)
            balance += number * ((len(members) - 1) if ranks.rank == members[0] else -1)
        return lines, balance % MODULUS

    # One number for any number of groups of ranks: it is 0 if in each group all ranks have the
    # digest of the first.
    lines, balance = ranks.run_and_reduce(
        "comparing the replicas", digest_own, lambda some, others: (some + others) % MODULUS
    )
    if not balance:
        return {}
    compared = ranks.reduce(
        "comparing the replicas", digests_of_lines(lines, ranks.rank), join_digests
    )
    wrong: dict[str, RanksByText] = {}
    for by_name in differing(lines, compared, ranks).values():
        for name, by_text in by_name.items():  # several parts of one tensor
            wrong.setdefault(name, {}).update(by_text)
    return wrong
