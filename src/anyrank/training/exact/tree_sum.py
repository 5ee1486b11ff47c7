"""Sums whose order depends only on the number of terms: a balanced binary tree over their index.

The terms 0 to K - 1 are the leaves. Each inner node is the sum of its left and its right half, the
left one larger by a term if their number is odd. Floating-point addition is commutative but not
associative, so a node has the same bits wherever it is computed. Whoever holds a run of
neighboring leaves can add them up as far as the tree allows and send the few nodes that remain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """The node over the leaves [start, stop)."""

    start: int
    stop: int


@lru_cache(maxsize=64)
def _inner_nodes(count: int) -> frozenset[tuple[int, int, int]]:
    """Return the inner nodes of the tree over `count` leaves, as (start, middle, stop)."""
    nodes: set[tuple[int, int, int]] = set()
    todo = [(0, count)]
    while todo:
        start, stop = todo.pop()
        if stop - start > 1:
            middle = start + (stop - start + 1) // 2
            nodes.add((start, middle, stop))
            todo += [(start, middle), (middle, stop)]
    return frozenset(nodes)


class TreeSum:
    """The known nodes of one sum, from left to right, merged as far as possible.

    Args:
        count: K, the number of leaves of the whole sum.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.nodes: list[tuple[Span, torch.Tensor | None]] = []

    def add(self, span: Span, value: torch.Tensor | None) -> None:
        """Append a node to the right of the known ones.

        Args:
            span: the leaves that it covers.
            value: their sum, whose memory this sum may write to; None for no term at all.
        """
        assert not self.nodes or self.nodes[-1][0].stop <= span.start
        inner = _inner_nodes(self.count)
        while self.nodes:
            left, other = self.nodes[-1]
            # `left` and `span` are siblings if they meet in the middle of an inner node.
            if left.stop != span.start or (left.start, span.start, span.stop) not in inner:
                break
            self.nodes.pop()
            span, value = Span(left.start, span.stop), added(other, value)
        self.nodes.append((span, value))

    def extend(self, nodes: Iterable[tuple[Span, torch.Tensor | None]]) -> None:
        """Append nodes, in order, to the right of the known ones."""
        for span, value in nodes:
            self.add(span, value)

    def skip_to(self, leaf: int) -> None:
        """Append the missing leaves up to `leaf`, without terms."""
        start = self.nodes[-1][0].stop if self.nodes else 0
        for skipped in range(start, leaf):
            self.add(Span(skipped, skipped + 1), None)

    def release(self) -> None:
        """Copy nodes that are parts of larger tensors, which would otherwise stay in memory."""
        for number, (span, value) in enumerate(self.nodes):
            if value is not None and value.untyped_storage().nbytes() > value.nbytes:
                self.nodes[number] = (span, value.clone())

    def spans(self) -> list[Span]:
        """Return the leaves under each node."""
        return [span for span, _ in self.nodes]

    def total(self) -> torch.Tensor | None:
        """Return the whole sum, without negative zeros; None if there was no term.

        A missing term and a zero then give the same bits: x + 0 is x, but for x = -0.
        """
        (span, value) = self.nodes[0]
        assert len(self.nodes) == 1
        assert span == (0, self.count)
        return None if value is None else value.add_(0.0)


def added(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return left + right, in the memory of one of them."""
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)


def merged(count: int, spans: Iterable[Span]) -> list[Span]:
    """Return the nodes that remain, in order, once some are added as far as possible."""
    tree = TreeSum(count)
    for span in spans:
        tree.add(span, None)
    return tree.spans()


def ordered(parts: Sequence[TreeSum], count: int) -> TreeSum:
    """Return the nodes of several sums as one sum."""
    tree = TreeSum(count)
    tree.extend(sorted((node for part in parts for node in part.nodes), key=_first_leaf))
    return tree


def _first_leaf(node: tuple[Span, torch.Tensor | None]) -> int:
    """Return the position of a node in the order."""
    return node[0].start
