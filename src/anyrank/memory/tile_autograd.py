"""The nodes between tiles: two small functions through which one tensor runs from tile to tile.

Cutting with `split` and joining with `cat` would each hold a second tensor of full size. Here the
input runs up a chain, each link of which hands out one tile, and the output down another, each link
of which takes one in. Backward walks them in reverse with one buffer for each, so that besides it
one tile's tensors are alive at a time.
"""

from __future__ import annotations

from typing import Any

import torch

Maybe = torch.Tensor | None


class Take(torch.autograd.Function):
    """(x) -> (tile of x, x)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, start: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.cut = (dim, start, length)
        ctx.like = (x.shape, x.dtype, x.device)
        return rows_of(x, dim, start, length), x

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        tile, rest = grads
        dim, start, length = ctx.cut
        if tile is None and rest is None:
            return None, None, None, None
        shape, dtype, device = ctx.like
        if rest is None:  # the last tile that has a gradient: those behind it have none
            rest = torch.empty(shape, dtype=dtype, device=device)
            end = start + length
            rest.narrow(dim, end, shape[dim] - end).zero_()
        # `rest` came from the next link and goes nowhere else: it is the one buffer of the chain.
        mine = rest.narrow(dim, start, length)
        mine.zero_() if tile is None else mine.copy_(tile)
        return rest, None, None, None


class Place(torch.autograd.Function):
    """(y, tile) -> y, with the tile written into it."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, tile: torch.Tensor, dim: int, start: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cut = (dim, start, tile.shape[dim])
        ctx.mark_dirty(y)
        y.narrow(*ctx.cut).copy_(tile)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        (grad,) = grads
        # RejectedSteps on whole: what lies before reads its own rows only.
        return grad, None if grad is None else rows_of(grad, *ctx.cut), None, None


def rows_of(tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    """A tile of a tensor, contiguous if the tensor is: a function may ask for a `view` of it."""
    rows = tensor.narrow(dim, start, length)
    return rows.contiguous() if tensor.is_contiguous() else rows
