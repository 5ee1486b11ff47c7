"""The tree through which ranks communicate: a machine's ranks are children of its first rank, and
the machines' first ranks form a tree, so that one message per machine crosses the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEGREE = 16


@dataclass(frozen=True)
class Neighbors:
    """The ranks with which one rank communicates, as positions in the group.

    Attributes:
        parent: position that it sends to; None for the root, which is the first rank.
        children: positions that send to it.
    """

    parent: int | None
    children: tuple[int, ...]


def find_neighbors(nodes: Sequence[int], index: int) -> Neighbors:
    """Find the neighbors of a rank in the tree.

    Args:
        nodes: for each rank, the number of its machine; machines are numbered in order of
            appearance.
        index: position of the rank.
    """
    by_node: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        by_node.setdefault(node, []).append(position)
    local, firsts = by_node[nodes[index]], [positions[0] for positions in by_node.values()]
    parent, children = _within(local, index)
    if index == local[0]:
        parent, remote = _within(firsts, index)
        children = [*remote, *children]
    return Neighbors(parent, tuple(children))


def _within(members: Sequence[int], index: int) -> tuple[int | None, list[int]]:
    """Find the parent and the children of one member, in a tree of only the members."""
    number = members.index(index)
    parent = members[(number - 1) // DEGREE] if number else None
    return parent, [*members[number * DEGREE + 1 : (number + 1) * DEGREE + 1]]
