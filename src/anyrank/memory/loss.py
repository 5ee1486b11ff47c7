"""`anyrank.tiled_loss`: a loss over a large vocabulary, a few rows of logits at a time.

For a plain linear head the gradients are computed in the forward pass: the logits of a tile are
overwritten by their own gradient, which is multiplied into the gradients of the hidden states and
of the weight at once. That is three products per tile, as in the plain loss, and nothing is
computed twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from anyrank.checks import check_choice, check_function, check_int, check_number, check_type
from anyrank.errors import RecomputeError
from anyrank.memory.ambient import in_transform
from anyrank.memory.call import function_name, unwrap
from anyrank.memory.tile import Tiled
from anyrank.memory.tile_weights import check_grad_dtype
from anyrank.memory.tiling_dims import check_chunk_size
from anyrank.memory.used_modules import used_modules
from anyrank.tensors.torch_classes import is_dtensor


def tiled_loss(
    fn: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *rest: Any,
    chunk_size: int = 1024,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    count: float | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    grad_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the loss of hidden states with the logits of only one tile at a time in memory.

    If `fn` is a module (the head), the loss is the cross entropy of `fn(hidden)` in float32. A
    different loss is a function of a tile: `fn(hidden [t, H], labels [t], *rest)` returns the
    losses [t] of its tokens; it may call any head, soft-cap the logits or add a z-loss. The mean is
    the sum over all tiles divided once, so it does not depend on the tiles. Shift labels, not
    hidden states, which would be copied.

    No coordination between ranks is needed, inside the FSDP2 unit that owns the head's weight. A
    head that is its own unit gathers its weight for each tile; the number of tiles must then be
    the same on every rank, and is compared. Hidden states that are a DTensor (sequence parallel)
    are gathered first, and logits of a head that is sharded over the vocabulary are gathered tile
    by tile: every rank of the mesh must call, with the same labels.

    Args:
        fn: a module from [t, H] to logits [t, V], or a function from a tile to losses.
        hidden: [..., H], any floating-point dtype.
        labels: [...], class indices, integers (or what a function `fn` expects).
        rest: further arguments of a function: a tensor whose shape starts with that of `labels` is
            tiled like it; anything else (and any parameter) is passed whole. To pass such a tensor
            whole, bind it: `functools.partial(fn, prior=prior)`.
        chunk_size: tokens per tile.
        reduction: "none" gives losses in the shape of `labels`, 0 where ignored.
        ignore_index: label of tokens without a loss.
        count: divisor of "mean", instead of the number of tokens that are not ignored; 0 divides
            by 1. For a mean over the tokens of all ranks under DDP or FSDP2, which average
            gradients: the number of tokens on all ranks divided by the number of ranks. If all
            tokens are ignored, the loss is 0 and still differentiable.
        label_smoothing: as in `torch.nn.functional.cross_entropy`; for a head.
        grad_dtype: sum the gradients of the head's weights over the tiles in this dtype, and round
            once, at the end. None sums in the dtype of the weights; with many tiles in bfloat16,
            that is several times less accurate than an untiled loss. For a function, the head must
            be among its captured variables.

    Returns:
        A 0-d tensor in float32 (float64 for float64 losses), or losses in the shape of `labels`.

    Raises:
        ValueError, TypeError: shapes or options that do not match; logits for a part of the
            vocabulary.
        RankError: as for `tile`.
        RecomputeError: from backward, as for `recompute`; a second pass through a fused loss.

    Example::

        head = torch.nn.Linear(16, 1000)
        hidden = torch.randn(2, 512, 16, requires_grad=True)
        labels = torch.randint(1000, (2, 512))
        loss = anyrank.tiled_loss(head, hidden, labels, chunk_size=256)
        loss.backward()
    """
    check(fn, hidden, labels, rest, chunk_size, reduction, count, label_smoothing)
    check_int("ignore_index", ignore_index)
    check_grad_dtype(grad_dtype)
    dims = [_begins_with(arg, labels) for arg in rest]
    mesh = _mesh_for(fn, hidden)
    hidden, labels, rest = gathered(hidden), gathered(labels), tuple(map(gathered, rest))
    rows, target = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    head = fn if isinstance(fn, nn.Module) else None
    if head is not None:
        target = target.long()
    if _is_fused(fn, hidden, reduction) and isinstance(fn, nn.Linear):
        args = (rows, fn.weight, fn.bias, target, chunk_size, ignore_index, label_smoothing)
        total: Any = _FusedLoss.apply(*args, grad_dtype)
        return total if reduction == "sum" else total / divisor(target, ignore_index, count)
    used = unwrap(fn, (), {})[0]
    if head is not None:
        fn = functools.partial(_head_loss, head, ignore_index, label_smoothing)
    flat_rest = [
        arg if dim is None else arg.flatten(0, labels.ndim - 1)
        for dim, arg in zip(dims, rest, strict=True)
    ]

    def run(hidden: torch.Tensor, labels: torch.Tensor, *rest: Any) -> torch.Tensor:
        return checked(fn, mesh, hidden, labels, *rest)

    label = f"tiled_loss({function_name(used)})"
    options = (chunk_size, (0, 0, *dims), 0, grad_dtype)
    tiled = Tiled(run, label, *options, uses=used)
    losses = tiled(rows, target, *flat_rest)
    losses = torch.where(target != ignore_index, losses, 0)
    if reduction == "none":
        return losses.reshape(labels.shape)
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    return total if reduction == "sum" else total / divisor(target, ignore_index, count)


def divisor(
    labels: torch.Tensor, ignore_index: int, count: float | torch.Tensor | None
) -> float | torch.Tensor:
    """Return the divisor of the mean; 1 instead of 0, because the sum is 0 then."""
    if count is None:
        return (labels != ignore_index).sum().clamp(min=1)
    if isinstance(count, torch.Tensor):
        count = count.reshape(())
        return torch.where(count == 0, 1, count)
    return count or 1


def _head_loss(
    head: nn.Module,
    ignore_index: int,
    label_smoothing: float,
    hidden: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Return the cross entropy of a head's logits for each token."""
    logits: torch.Tensor = gathered(head(hidden))
    if isinstance(head, nn.Linear) and logits.shape[-1] != head.out_features:
        raise ValueError(
            f"{function_name(head)} returns {logits.shape[-1]} of {head.out_features} logits. It "
            "is sharded over the vocabulary and returns only this rank's part. Return a DTensor "
            "(ColwiseParallel(use_local_output=False)) or all logits (output_layouts=Replicate())"
        )
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)),
        labels,
        reduction="none",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def checked(
    fn: Callable[..., Any],
    mesh: DeviceMesh | None,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """Run `fn` on a tile and check its result."""
    if mesh is not None:  # a head that gathers its input must know that this one is whole
        from torch.distributed.tensor import DTensor, Replicate

        hidden = DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)
    losses = gathered(fn(hidden, labels, *rest))
    if not isinstance(losses, torch.Tensor) or losses.shape[:1] != labels.shape or losses.ndim != 1:
        shape = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ValueError(
            f"{function_name(fn)} returned {shape} for a tile of {len(labels)} tokens, expected "
            f"[{len(labels)}]. Return one loss per token (reduction='none')"
        )
    return losses


def _begins_with(value: Any, labels: torch.Tensor) -> int | None:
    """Return 0 for a tensor with one entry per token, None for anything else."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return None
    return 0 if value.shape[: labels.ndim] == labels.shape else None


def gathered(value: Any) -> Any:
    """Gather a DTensor into a plain tensor on each rank; return any other value unchanged."""
    return value.full_tensor() if is_dtensor(value) else value


def _mesh_for(fn: Any, hidden: torch.Tensor) -> DeviceMesh | None:
    """Return the mesh on which a sharded head expects its hidden states as a DTensor."""
    if not is_dtensor(hidden):
        return None
    sharded = any(
        is_dtensor(p) and any(placement.is_shard() for placement in p.placements)
        for module in used_modules(unwrap(fn, (), {})[0])
        for p in module.parameters()
    )
    return hidden.device_mesh if sharded else None


def _is_fused(fn: Any, hidden: torch.Tensor, reduction: str) -> bool:
    """Return True if the gradients are computed in the forward pass, without calling the head."""
    if type(fn) is not nn.Linear or reduction == "none":  # "none" has one gradient per token
        return False
    hooks = ("forward", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    if any(fn.__dict__.get(name) for name in (*hooks, "_backward_pre_hooks")):
        return False
    if getattr(nn.modules.module, "_has_any_global_hook", lambda: False)():
        return False
    # A FakeTensor has no values, but shows how much memory the loss needs.
    if type(fn.weight) not in (nn.Parameter, torch.Tensor, FakeTensor):  # sharded, quantized
        return False
    if fn.weight.dtype != hidden.dtype or torch.is_autocast_enabled(hidden.device.type):
        return False
    # Neither torch.compile nor torch.func can trace it.
    return not torch.compiler.is_compiling() and not in_transform() and torch.is_grad_enabled()


def check(
    fn: Any,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    rest: Sequence[Any],
    chunk_size: int,
    reduction: str,
    count: Any,
    label_smoothing: float,
) -> None:
    """Raise TypeError or ValueError for wrong arguments, or arguments that do not match."""
    check_function("fn", fn, "a head, or a function of a tile")
    check_type("hidden", hidden, torch.Tensor, "a tensor [..., H]")
    check_type("labels", labels, torch.Tensor, "a tensor [...]")
    if hidden.ndim < 1 or hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, and labels {list(labels.shape)}; they must be "
            "[..., H] and [...]. Under sequence parallelism, pass hidden as a DTensor, or gather it"
        )
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    check_chunk_size(chunk_size, "token")
    if not isinstance(count, torch.Tensor | None):
        check_number("count", count)
    elif count is not None and count.numel() != 1:
        raise ValueError(f"count=: expected one number, got a tensor of shape {list(count.shape)}")
    check_type("label_smoothing", label_smoothing, Real, "a number from 0 to 1")
    if count is not None and reduction != "mean":
        raise ValueError(
            f'count= is the divisor of reduction="mean", but reduction="{reduction}". Remove count='
        )
    if isinstance(fn, nn.Module):
        if rest:
            raise ValueError(
                "further arguments need a function as fn; a head is called only with hidden states"
            )
        _check_as_cross_entropy(labels, label_smoothing)
    elif label_smoothing:
        raise ValueError("label_smoothing= needs a head as fn; a function computes its own loss")


def _check_as_cross_entropy(labels: torch.Tensor, label_smoothing: float) -> None:
    """Raise TypeError or ValueError for labels that torch's `cross_entropy` would not accept."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(
            f"labels=: expected class indices (integers), got {labels.dtype}. Pass labels.long(), "
            "or a function that computes the loss for such labels"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing}: must be from 0 to 1")


PRODUCT_ROWS = 8192  # of the vocabulary


class _FusedLoss(torch.autograd.Function):
    """(hidden [T, H], weight [V, H], bias [V] or None, labels [T], ...) -> sum of losses, 0-d.

    Gradients are stored without the incoming gradient and multiplied by it in place, so they can be
    used only once.
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
            total += _loss_into_gradient(logits, tile, wide, ignore_index, label_smoothing)
            if grads[0] is not None:
                torch.mm(logits, weight, out=grads[0][start : start + chunk_size])
            if grads[1] is not None:
                _add_product(grads[1], logits.t(), rows)
            if grads[2] is not None:
                grads[2] += logits.sum(0, dtype=grad_dtype)
        ctx.grads = grads
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.grads is None or torch.is_grad_enabled():
            raise RecomputeError(
                "tiled_loss() of a plain head supports a single backward, and no second "
                "derivative. For retain_graph or create_graph, pass nn.Sequential(head)"
            )
        kept, ctx.grads = ctx.grads, None
        return *(None if grad is None else grad.mul_(grads[0]) for grad in kept), *[None] * 5


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Compute total += a @ b, a few rows at a time if total is wider: products are temporaries."""
    if total.dtype == b.dtype:
        total.addmm_(a, b)
        return
    for start in range(0, len(total), PRODUCT_ROWS):
        total[start : start + PRODUCT_ROWS] += a[start : start + PRODUCT_ROWS] @ b


def _loss_into_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    wide: torch.dtype,
    ignore_index: int,
    label_smoothing: float,
) -> torch.Tensor:
    """Return the sum of one tile's losses; overwrite the logits with their gradient."""
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
