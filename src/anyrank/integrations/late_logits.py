"""The logits of a model whose loss is tiled, computed when they are used."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

import anyrank


class LateLogits:
    """A tensor [..., vocabulary] that is computed at its first use, with its graph.

    It is not a `torch.Tensor`, so that wrappers which copy, cast or gather the tensors of a model's
    result (DDP, mixed precision of Accelerate) leave it alone. Functions and methods of torch,
    operators and indices accept it as one.

    Args:
        head: the head that computes the logits.
        hidden: [..., hidden size].
        dtype: dtype to which the model casts them; None if it does not.

    Raises:
        RecomputeError: when used: the head has other weights than in the model's forward.
    """

    def __init__(self, head: nn.Linear, hidden: torch.Tensor, dtype: torch.dtype | None) -> None:
        self._head, self._hidden, self._cast = head, hidden, dtype
        self._weight, self._sample = head.weight, _sample(head.weight)
        kind = hidden.device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._known: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self._hidden.shape[:-1], self._head.out_features])

    @property
    def dtype(self) -> torch.dtype:
        enabled, dtype = self._autocast
        return self._cast or (dtype if enabled else self._hidden.dtype)

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    def float(self) -> LateLogits:
        """The same logits in float32; Accelerate calls this for each result of a model."""
        same = LateLogits.__new__(LateLogits)
        vars(same).update(vars(self), _cast=torch.float32, _known=None)
        return same

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a look for a protocol must compute nothing
            raise AttributeError(name)
        return getattr(self.computed(), name)

    def __repr__(self) -> str:
        return f"LateLogits(shape={list(self.shape)}, dtype={self.dtype}: computed when used)"

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.computed())

    def __reduce__(self) -> Any:
        return self.computed().__reduce_ex__(2)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.computed().__array__(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return function(*_computed(args), **_computed(dict(kwargs or {})))

    def computed(self) -> torch.Tensor:
        if self._known is None or (torch.is_grad_enabled() and not self._known.requires_grad):
            weight = self._head.weight
            if weight is not self._weight or not torch.equal(_sample(weight), self._sample):
                raise anyrank.RecomputeError(
                    "the logits of a model whose loss is tiled are computed when they are used, "
                    "and its head has other weights by now than in the forward pass (after an "
                    "optimizer step, or as FSDP2 has sharded it again): use them before, "
                    "remove() the handle of tiled_loss(), or call the model without labels or "
                    "under torch.no_grad()"
                )
            enabled, dtype = self._autocast
            with torch.autocast(self.device.type, dtype=dtype, enabled=enabled):
                logits = F.linear(self._hidden, weight, self._head.bias)
            self._known = logits.to(self.dtype)
        return self._known


def _computed(value: Any) -> Any:
    """Replace late logits by tensors, also inside lists and dicts of a call."""
    if isinstance(value, LateLogits):
        return value.computed()
    if isinstance(value, dict):
        return {key: _computed(part) for key, part in cast("dict[Any, Any]", value).items()}
    if type(value) in (list, tuple):
        return type(value)(map(_computed, value))
    return value


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Some values of a weight; an optimizer step changes at least one of them."""
    values = weight.detach().flatten()
    return values[:: max(1, len(values) // 1024)].clone()


# Python looks up operators on the class, so each needs a method of its own.
UNARY = ("neg", "abs", "invert", "bool")
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", "contains")
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")


def _operator(name: str) -> Callable[..., Any]:
    apply: Callable[..., Any] = bool if name == "bool" else getattr(operator, name)
    return lambda *args: apply(*map(_computed, args))


for _name in (*UNARY, *COMPARED, *ARITHMETIC):
    setattr(LateLogits, f"__{_name}__", _operator(_name))
for _name in ARITHMETIC:
    _apply: Callable[..., Any] = _operator(_name)
    setattr(LateLogits, f"__r{_name}__", lambda late, other, _apply=_apply: _apply(other, late))
LateLogits.__hash__ = object.__hash__  # defining `==` removed it
