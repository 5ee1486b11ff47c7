"""The tensors that a recomputed region starts from, packed before it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from anyrank.errors import RecomputeError
from anyrank.memory.uncompiled import uncompiled
from anyrank.tensors.sharded_tensor import version_of


class Keep(torch.autograd.Function):
    """Saves tensors for backward and computes nothing: hooks on saved tensors that surround the
    region see them here, the first things that it saves.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> None:
        raise AssertionError("the result of Keep is never used")


class Inputs:
    """Tensors of one call, kept until the graph dies, maybe in host memory or by an outer region.

    Args:
        tensors: all tensors of the call, each object once.
        names: how the user would write them, for messages.
        label: the call, for messages.
        pack: takes the tensors away and returns the function that brings them back; None keeps
            them as saved tensors of the graph.
    """

    @uncompiled
    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        names: Callable[[int], str],
        label: str,
        *,
        pack: Callable[[Sequence[torch.Tensor]], Callable[[], list[torch.Tensor]]] | None = None,
    ) -> None:
        self.names = names
        self.label = label
        self.grads = [tensor.requires_grad for tensor in tensors]
        self.versions = [version_of(tensor) for tensor in tensors]
        self.shared: list[torch.Tensor] | None = None
        self.lock = threading.RLock()
        if pack is not None:
            self.restore = pack(tensors)
        else:
            anchor = torch.empty(0, device="cpu", requires_grad=True)
            node: Any = Keep.apply(anchor, *tensors).grad_fn
            self.restore = lambda: list(node.saved_tensors)

    @uncompiled
    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a function that has changed its arguments: it cannot run twice.

        Raises:
            RecomputeError: names the argument.
        """
        for n, (tensor, before) in enumerate(zip(tensors, self.versions, strict=True)):
            if version_of(tensor) != before:
                raise RecomputeError(
                    f"{self.label} changes {self.names(n)} in place, and would start from the "
                    "changed values when it is recomputed: clone the argument inside, or use the "
                    "operation that returns a new tensor"
                )

    def take(self, reader: int) -> list[torch.Tensor]:
        """The tensors for region number `reader`, cut off from the graph, requiring gradients as
        before. What was brought back is shared until region 0, which backward reaches last, has it.

        Raises:
            RecomputeError, RuntimeError: one was changed in place since.
        """
        with self.lock:
            tensors = self.shared
            if tensors is None:
                try:
                    tensors = self.restore()
                except RuntimeError as error:
                    error.add_note(f"while taking the inputs of {self.label} to recompute it")
                    raise
            self.shared = tensors if reader > 0 else None
        return [
            tensor.detach().requires_grad_(grad)
            for tensor, grad in zip(tensors, self.grads, strict=True)
        ]

    def forget(self) -> None:
        """Drop what was restored for regions that have not asked in this backward pass."""
        self.shared = None
