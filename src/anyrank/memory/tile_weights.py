"""Weight gradients of many tiles, summed in a wider dtype.

Autograd sums the gradients of the tiles in the dtype in which they arrive: 32 tiles in bfloat16 are
32 roundings. With `grad_dtype`, each tile gets a stand-in for each parameter, and the stand-ins
form a chain: in backward each link adds its tile's gradient to one wide sum, and the first link,
which runs last, returns the sum to the parameter. Nothing runs twice, and hooks of the parameter
see the total.

Without `grad_dtype`, autograd adds gradients in place once it owns their sum. The first gradient of
a linear layer's weight is a view (of a transposed product), which autograd does not own, so the
second would be added into a third tensor of the weight's size. `with_own_gradients` copies the
gradients of the tile that backward visits first, when nothing else is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call


def check_grad_dtype(dtype: Any) -> None:
    """Raise TypeError if this is not a dtype for gradients."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"grad_dtype={dtype!r}: expected a floating-point torch.dtype, such as torch.float32"
        )


class _WideSum:
    """The sum of one parameter's gradients during one backward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.total: torch.Tensor | None = None

    def add(self, grad: torch.Tensor) -> None:
        if self.total is None:
            self.total = grad.to(self.dtype, copy=True)
        elif (
            torch.is_grad_enabled()
        ):  # this pass is itself differentiated, so nothing may change in place
            self.total = self.total + grad
        else:
            self.total += grad


class _StandIn(torch.autograd.Function):
    """(weight) -> (weight for this tile, weight for the next)."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, wide: _WideSum, first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.wide, ctx.first, ctx.dtype = wide, first, weight.dtype
        return weight.view_as(weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        grad, later = grads
        wide: _WideSum = ctx.wide
        if later is None:  # no later link ran in this pass; a failed pass may have left a sum
            wide.total = None
        if grad is not None:
            wide.add(grad)
        if wide.total is None:
            return None, None, None
        if ctx.first:
            total, wide.total = wide.total, None
            return total, None, None  # autograd casts it to the parameter's dtype
        # A gradient of the required shape and dtype, so that the next link runs.
        token = torch.zeros((), dtype=ctx.dtype, device=wide.total.device)
        return token.expand(wide.total.shape), None, None


class WideWeights:
    """The stand-ins of some modules' trainable parameters, tile by tile.

    Args:
        modules: the modules whose parameters get stand-ins.
        forward: the function that runs them: a module's own forward, which `tile_` may have
            wrapped, or any other function.
        dtype: the dtype of the sums.
    """

    def __init__(
        self, modules: Iterable[nn.Module], forward: Callable[..., Any], dtype: torch.dtype
    ) -> None:
        self.body = _Body(modules, forward)
        self.current = {
            name: parameter
            for name, parameter in self.body.named_parameters()
            if parameter.requires_grad
            and parameter.is_floating_point()
            and parameter.dtype.itemsize <= dtype.itemsize
        }
        self.sums = {name: _WideSum(dtype) for name in self.current}

    def call(self, first: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on the next tile, with stand-ins in place of its parameters."""
        return functional_call(self.body, self.next(first), args, kwargs)

    def next(self, first: bool) -> dict[str, torch.Tensor]:
        """Return the stand-ins for the next tile."""
        stand_ins: dict[str, torch.Tensor] = {}
        next_weights: dict[str, torch.Tensor] = {}
        for name, weight in self.current.items():
            share: Any = _StandIn.apply(weight, self.sums[name], first)
            stand_ins[name], next_weights[name] = share
        self.current = next_weights
        return stand_ins


class _Body(nn.Module):
    """Modules, and the function that runs them; called without hooks."""

    def __init__(self, modules: Iterable[nn.Module], forward: Callable[..., Any]) -> None:
        super().__init__()
        self.modules_of = nn.ModuleList(modules)
        self.body = (forward,)  # in a tuple: a module would be registered as a child again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body[0](*args, **kwargs)


class _OwnGradient(torch.autograd.Function):
    """(weight) -> weight. Its gradient is a tensor that nothing else references."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (grad,) = grads
        return None if grad is None else grad.clone()


def with_own_gradients(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a function of one module so that autograd can add to its weights' gradients in place."""
    body = _Body([module], forward)
    weights = {
        name: _OwnGradient.apply(parameter)
        for name, parameter in body.named_parameters()
        if parameter.requires_grad and type(parameter) is nn.Parameter
    }
    return functional_call(body, weights, args, kwargs, tie_weights=False)
