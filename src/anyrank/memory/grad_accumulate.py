"""The first gradient of each weight as a tensor of its own.

Autograd adds the tiles' gradients of a weight in place once it owns the sum. What a linear layer
contributes first is a view (of a transposed product), which it does not own: the second tile's
would be added into a third tensor of the weight's size. A copy of the first one, at a time when
nothing else is alive, avoids that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from anyrank.memory.uncompiled import uncompiled

MAX_NODES = 2000  # of a graph that is searched; one tile has some tens


@uncompiled
def own_first_sums(results: Iterable[Any], inputs: Iterable[Any]) -> None:
    """In the graph of the tile that backward visits first, make leaves' gradients plain tensors.

    Args:
        results: what the tile returned, flat.
        inputs: what it was given, flat: the graph before them is not searched.
    """
    border = {node_of(each) for each in inputs}
    waiting = [node for each in results if (node := node_of(each)) is not None]
    seen: set[Any] = set()
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if node in seen or node in border:
            continue
        seen.add(node)
        leaves = [n for n, (after, _) in enumerate(node.next_functions) if is_leaf(after)]
        if leaves:
            node.register_hook(Own(leaves))
        waiting += [after for after, _ in node.next_functions if after and not is_leaf(after)]


class Own:
    """Hook behind a node: copies those of its results that go to leaves and are views."""

    def __init__(self, leaves: list[int]) -> None:
        self.leaves = leaves

    def __call__(self, results: tuple[Any, ...], grads: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            each.clone() if n in self.leaves and each is not None and each._is_view() else each
            for n, each in enumerate(results)
        )


def node_of(value: Any) -> Any:
    return value.grad_fn if isinstance(value, torch.Tensor) else None


def is_leaf(node: Any) -> bool:
    """Whether a node is the end of the graph, which accumulates into a leaf."""
    return node is not None and hasattr(node, "variable")
