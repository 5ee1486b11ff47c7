"""Tensor subclasses without memory of their own, as libraries that train or quantize have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten
KEPT = {  # operations whose result is wrapped again, as FSDP2 needs it
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.split.Tensor,
    aten.clone.default,
}


class Recipe(torch.Tensor):
    """One plain tensor and how to compute with it, as of torchao's float8 training."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, name: str) -> Recipe:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor, name: str) -> None:
        self.held, self.recipe = inner, name

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], self.recipe

    @staticmethod
    def __tensor_unflatten__(inner: Any, recipe: Any, size: Any, stride: Any) -> Recipe:
        return Recipe(inner["held"], recipe)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        names: list[str] = []

        def unwrap(tensor: Recipe) -> torch.Tensor:
            names.append(tensor.recipe)
            return tensor.held

        args, kwargs = pytree.tree_map_only(Recipe, unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func not in KEPT:
            return out
        return pytree.tree_map_only(torch.Tensor, lambda t: Recipe(t, names[0]), out)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.held,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None
    ) -> Any:
        (data,) = outputs
        return None if out is not None else (data, (data,))


class Scaled(torch.Tensor):
    """Small numbers and their scale, as of weights that are quantized."""

    @staticmethod
    def __new__(cls: Any, numbers: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.size(), strides=numbers.stride(), dtype=scale.dtype, device=scale.device
        )

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.view.default, aten.alias.default):
            return cls(args[0].numbers, args[0].scale)
        plain = pytree.tree_map_only(Scaled, lambda t: t.numbers * t.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Pair(Scaled):
    """Its numbers have the dtype of the values, and are not the values."""


class Silent(Scaled):
    """Says nothing of its inner tensors, as Transformer Engine's."""

    __tensor_flatten__ = None  # pyright: ignore[reportAssignmentType]


del Silent.__tensor_flatten__


def scaled(kind: type[Scaled] = Scaled) -> Scaled:
    numbers = torch.arange(16.0).view(4, 4)
    return kind(numbers if kind is Pair else numbers.to(torch.int8), torch.tensor([[0.5]]))


def wrap(net: nn.Module) -> nn.Module:
    """The model with its weights of two dims wrapped by `Recipe`."""
    for module in net.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2:
            module.weight = nn.Parameter(Recipe(weight.detach(), "float8"))
    return net
