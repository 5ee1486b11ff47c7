"""Cross entropy of a linear head with its gradients computed in the forward pass.

The logits of a tile are turned into their own gradient where they stand, and multiplied into the
gradients of the hidden states and of the weight at once: three products per tile, as the plain loss
has them, and nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch

from anyrank.errors import RecomputeError

PRODUCT_ROWS = 8192  # of the vocabulary


class FusedLoss(torch.autograd.Function):
    """(hidden [T, H], weight [V, H], bias [V] or None, labels [T], ...) -> sum of losses, 0-d.

    Gradients are kept without the factor that comes from above, and scaled in place when it is
    there, so they can be handed out once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        chunk_size: int,
        ignore_index: int,
        label_smoothing: float,
        grad_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        needed = ctx.needs_input_grad
        grads = [
            torch.empty_like(hidden, memory_format=torch.contiguous_format) if needed[0] else None,
            torch.zeros_like(weight, dtype=grad_dtype) if needed[1] else None,
            torch.zeros_like(bias, dtype=grad_dtype) if bias is not None and needed[2] else None,
        ]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_size):
            rows = hidden[start : start + chunk_size]
            logits = torch.nn.functional.linear(rows, weight, bias)
            tile = labels[start : start + chunk_size]
            total += loss_into_gradient(logits, tile, wide, ignore_index, label_smoothing)
            if grads[0] is not None:
                torch.mm(logits, weight, out=grads[0][start : start + chunk_size])
            if grads[1] is not None:
                add_product(grads[1], logits.t(), rows)
            if grads[2] is not None:
                grads[2] += logits.sum(0, dtype=grad_dtype)
        ctx.grads = grads
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.grads is None or torch.is_grad_enabled():
            raise RecomputeError(
                "tiled_loss(impl='fused') hands its gradients out once and cannot be "
                'differentiated twice: use impl="recompute" for retain_graph or create_graph'
            )
        kept, ctx.grads = ctx.grads, None
        return *(None if grad is None else grad.mul_(grads[0]) for grad in kept), *[None] * 5


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where the total may be wider: then some rows at a time, as the product of
    each is a tensor of its own.
    """
    if total.dtype == b.dtype:
        total.addmm_(a, b)
        return
    for start in range(0, len(total), PRODUCT_ROWS):
        total[start : start + PRODUCT_ROWS] += a[start : start + PRODUCT_ROWS] @ b


def loss_into_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    wide: torch.dtype,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Sum of the losses of one tile; the logits become the gradient of that sum."""
    valid = (labels != ignore_index).unsqueeze(1)
    target = torch.where(valid, labels.unsqueeze(1), 0)
    scores = logits.to(wide, copy=True)
    scores -= scores.amax(1, keepdim=True)
    of_target = scores.gather(1, target)
    mean = scores.mean(1, keepdim=True) if label_smoothing else None
    total = scores.exp_().sum(1, keepdim=True)
    losses = total.log() - of_target
    if mean is not None:
        losses += label_smoothing * (of_target - mean)
    scores.div_(total)
    if label_smoothing:
        scores -= label_smoothing / scores.shape[1]
    scores.scatter_add_(1, target, torch.full_like(of_target, label_smoothing - 1))
    logits.copy_(scores.mul_(valid))
    return torch.where(valid, losses, 0).sum()
