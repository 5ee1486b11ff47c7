"""Weight gradients of many tiles, summed in a wider dtype than the weights have.

Autograd sums what the tiles contribute in the dtype in which it arrives: 32 tiles in bfloat16 are
32 roundings. Here each tile gets a stand-in for each parameter, and the stand-ins form a chain: in
backward each link adds its tile's gradient to one wide sum, and the first link, which runs last,
hands the sum to the parameter. Nothing runs twice, and hooks of the parameter see the total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from anyrank.memory.uncompiled import uncompiled

Maybe = torch.Tensor | None


class WideSum:
    """The sum of one parameter, while a backward pass walks its chain."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.total: Maybe = None

    def add(self, grad: torch.Tensor) -> None:
        if self.total is None:
            self.total = grad.to(self.dtype, copy=True)
        elif torch.is_grad_enabled():  # this pass is differentiated: nothing may change in place
            self.total = self.total + grad
        else:
            self.total += grad


class Share(torch.autograd.Function):
    """(weight) -> (weight for this tile, weight for the next)."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, wide: WideSum, first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.wide, ctx.first, ctx.dtype = wide, first, weight.dtype
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Maybe) -> Any:
        mine, later = grads
        wide: WideSum = ctx.wide
        if later is None:  # no link behind ran in this pass; a pass that failed may have left some
            wide.total = None
        if mine is not None:
            wide.add(mine)
        if wide.total is None:
            return None, None, None
        if ctx.first:
            total, wide.total = wide.total, None
            return total, None, None  # autograd casts it to what the parameter wants
        # Says that the sum goes on, in the one shape and dtype that may travel here.
        token = torch.zeros((), dtype=ctx.dtype, device=wide.total.device)
        return token.expand(wide.total.shape), None, None


class Weights:
    """The stand-ins of some modules' trainable parameters, tile by tile.

    Args:
        modules: whose parameters.
        forward: what runs them: a module's own forward, which `tile_` may have wrapped, or a
            function.
        dtype: of the sums.
    """

    def __init__(
        self, modules: Iterable[nn.Module], forward: Callable[..., Any], dtype: torch.dtype
    ) -> None:
        self.body = Body(modules, forward)
        self.current = {
            name: parameter
            for name, parameter in self.body.named_parameters()
            if parameter.requires_grad
            and parameter.is_floating_point()
            and parameter.dtype.itemsize <= dtype.itemsize
        }
        self.sums = {name: WideSum(dtype) for name in self.current}

    def call(self, first: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on the next tile, with stand-ins in place of its parameters."""
        return functional_call(self.body, self.next(first), args, kwargs)

    @uncompiled
    def next(self, first: bool) -> dict[str, torch.Tensor]:
        """Stand-ins for one tile; the chains move on by one link."""
        mine: dict[str, torch.Tensor] = {}
        rest: dict[str, torch.Tensor] = {}
        for name, weight in self.current.items():
            share: Any = Share.apply(weight, self.sums[name], first)
            mine[name], rest[name] = share
        self.current = rest
        return mine


class Body(nn.Module):
    """Modules, and the function that runs them."""

    def __init__(self, modules: Iterable[nn.Module], forward: Callable[..., Any]) -> None:
        super().__init__()
        self.modules_of = nn.ModuleList(modules)
        self.body = (forward,)  # in a tuple: as a module it would be a second child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body[0](*args, **kwargs)
