"""`anyrank.tiled_loss`: a loss over a large vocabulary, a few rows of logits at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from anyrank.memory.arguments import name_of
from anyrank.memory.fused import FusedLoss
from anyrank.memory.module_state import modules_in
from anyrank.memory.tile import Tiled


def tiled_loss(
    fn: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *rest: Any,
    chunk_size: int = 1024,
    reduction: Literal["mean", "sum", "none"] = "mean",
    impl: Literal["auto", "recompute", "fused"] = "auto",
    ignore_index: int = -100,
    count: float | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    in_dims: Sequence[int | None] | None = None,
    grad_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The loss of hidden states, without ever holding more logits than those of one tile.

    With a module as `fn`, the head, the loss is the cross entropy of `fn(hidden)` in float32. Any
    other loss is a function of a tile: `fn(hidden [t, H], labels [t], *rest)` returns the losses
    [t] of its tokens; it may call any head, soft-cap, add a z-loss. The mean is the sum over all
    tiles divided once, so it does not depend on the tiles. Shift labels, not hidden states: those
    would be copied.

    Each rank by itself, inside the unit of FSDP2 that owns the head's weight. A head that is a unit
    of its own gathers its weight for each tile; the number of tiles has to be equal on all ranks
    then, and is compared. A DTensor of hidden states (sequence parallel) is gathered first, and
    the logits of a head that is sharded over the vocabulary are gathered tile by tile: all ranks of
    its mesh must call, with the same labels.

    Args:
        fn: a module from [t, H] to logits [t, V], or a function from a tile to losses.
        hidden: [..., H], any floating dtype.
        labels: [...], class indices (or what `fn` takes, for a function).
        rest: more arguments of a function: a tensor whose shape begins with that of `labels` is cut
            with it, all else (and any parameter) is passed whole, unless `in_dims` says otherwise.
        chunk_size: tokens of a tile.
        reduction: "none" gives losses in the shape of `labels`, 0 where ignored.
        impl: "recompute" computes the logits of a tile again in backward: for any `fn`, any order
            of differentiation. "fused" computes gradients in the forward pass, faster and in less
            memory: for a plain `nn.Linear` whose weight is whole, reduction "mean" or "sum", and
            one backward pass. "auto" is "fused" where that applies.
        ignore_index: label of tokens that do not count.
        count: what "mean" divides by, instead of the number of tokens that count; 0 divides by 1.
            For a mean over the tokens of all ranks, under DDP and FSDP2, which average gradients:
            their number divided by that of the ranks. All tokens ignored gives 0 with a graph.
        label_smoothing: as in `torch.nn.functional.cross_entropy`; for a head.
        in_dims: for each of `rest` 0, cut along with the labels, or None, passed whole.
        grad_dtype: sum the gradients of the head's weights over the tiles in this dtype, and round
            once, at the end. None sums in the dtype of the weights: with many tiles in bfloat16
            that is several times as inexact as all logits at once. For a function, the head is
            looked for in what it captures.

    Returns:
        0-d in float32 (float64 for float64 losses), or losses in the shape of `labels`.

    Raises:
        ValueError, TypeError: shapes or options that do not fit; logits that are a part of the
            vocabulary.
        RankError: as of `tile`.
        RecomputeError: from backward, as of `recompute`; a second pass through a fused loss.
    """
    check(fn, hidden, labels, rest, chunk_size, reduction, impl, count, label_smoothing)
    cut = [begins_with(each, labels) for each in rest] if in_dims is None else list(in_dims)
    mesh = mesh_for(fn, hidden)
    hidden, labels, rest = gathered(hidden), gathered(labels), tuple(map(gathered, rest))
    check_cut(cut, rest, labels)
    flat, target = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    obstacle = why_not_fused(fn, hidden, reduction)
    if impl == "fused" and obstacle:
        raise ValueError(f'impl="fused" does not apply: {obstacle}; use impl="auto"')
    if impl != "recompute" and obstacle is None and isinstance(fn, nn.Linear):
        args = (flat, fn.weight, fn.bias, target, chunk_size, ignore_index, label_smoothing)
        total: Any = FusedLoss.apply(*args, grad_dtype)
        return total if reduction == "sum" else total / divisor(target, ignore_index, count)
    head = fn if isinstance(fn, nn.Module) else None
    if head is not None:
        fn, target = (
            functools.partial(head_loss, head, ignore_index, label_smoothing),
            target.long(),
        )
    more = [
        each if dim is None else each.flatten(0, labels.ndim - 1)
        for dim, each in zip(cut, rest, strict=True)
    ]
    run = functools.partial(checked, fn, mesh)
    tiled = Tiled(run, name_of(head or fn), chunk_size, (0, 0, *cut), 0, grad_dtype, False)
    tiled.module, tiled.label = head, f"tiled_loss({name_of(head or fn)})"
    losses = tiled(flat, target, *more)
    losses = torch.where(target != ignore_index, losses, 0)
    if reduction == "none":
        return losses.reshape(labels.shape)
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    return total if reduction == "sum" else total / divisor(target, ignore_index, count)


def divisor(
    labels: torch.Tensor, ignore_index: int, count: float | torch.Tensor | None
) -> float | torch.Tensor:
    """What the mean divides by; never 0, as the sum is 0 then."""
    if count is None:
        return (labels != ignore_index).sum().clamp(min=1)
    return torch.where(count == 0, 1, count) if isinstance(count, torch.Tensor) else count or 1


def head_loss(
    head: nn.Module,
    ignore_index: int,
    label_smoothing: float,
    hidden: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """Cross entropy of a head's logits, token by token."""
    logits: torch.Tensor = gathered(head(hidden))
    if isinstance(head, nn.Linear) and logits.shape[-1] != head.out_features:
        raise ValueError(
            f"{name_of(head)} returns {logits.shape[-1]} of {head.out_features} logits: it is "
            "sharded over the vocabulary and hands out its own part. Let it return a DTensor "
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
    """Run `fn` on a tile and look at what it returns."""
    if mesh is not None:  # a head that is told to gather shards must see that this is whole
        hidden = DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)
    losses = gathered(fn(hidden, labels, *rest))
    if not isinstance(losses, torch.Tensor) or losses.shape[:1] != labels.shape or losses.ndim != 1:
        shape = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ValueError(
            f"{name_of(fn)} returns {shape} for a tile of {len(labels)} tokens, and "
            f"[{len(labels)}] is expected, one loss for each: take reduction='none' inside"
        )
    return losses


def begins_with(value: Any, labels: torch.Tensor) -> int | None:
    """0 for an argument that has one entry for each token, None for any other."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return None
    return 0 if value.shape[: labels.ndim] == labels.shape else None


def check_cut(cut: Sequence[int | None], rest: Sequence[Any], labels: torch.Tensor) -> None:
    """Raises ValueError: `in_dims` does not fit the arguments."""
    if len(cut) != len(rest) or any(dim not in (0, None) for dim in cut):
        raise ValueError(
            f"in_dims={tuple(cut)!r}: one entry for each of the {len(rest)} arguments after "
            "labels, 0 to cut it along with the labels or None to pass it whole"
        )
    for n, (dim, each) in enumerate(zip(cut, rest, strict=True)):
        if dim == 0 and (
            not isinstance(each, torch.Tensor) or each.shape[: labels.ndim] != labels.shape
        ):
            shape = list(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__
            raise ValueError(
                f"argument {n} after labels is {shape}: to be cut along with the labels it must be "
                f"a tensor whose shape begins with theirs, {list(labels.shape)}"
            )


def gathered(value: Any) -> Any:
    """A DTensor as the plain tensor that it stands for, whole on each rank."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def mesh_for(fn: Any, hidden: torch.Tensor) -> DeviceMesh | None:
    """The mesh of hidden states that a sharded head takes as a DTensor."""
    if not isinstance(hidden, DTensor):
        return None
    sharded = any(isinstance(p, DTensor) for module in modules_in(fn) for p in module.parameters())
    return hidden.device_mesh if sharded else None


def why_not_fused(fn: Any, hidden: torch.Tensor, reduction: str) -> str | None:
    """What keeps the fused form from being the same as calling the head, if anything does."""
    if type(fn) is not nn.Linear:
        return f"it is for nn.Linear itself, and the head is a {name_of(fn)}"
    hooks = ("forward", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    if any(fn.__dict__.get(name) for name in hooks):
        return "the head has hooks, or a forward of its own"
    if isinstance(fn.weight, DTensor):
        return "the head's weight is sharded"
    if fn.weight.dtype != hidden.dtype or torch.is_autocast_enabled(hidden.device.type):
        return "the head computes in another dtype than its weight and input have"
    if reduction == "none":
        return 'reduction="none" has a gradient for each token'
    if torch.compiler.is_compiling():
        return "it is not traced by torch.compile"
    return None if torch.is_grad_enabled() else "gradients are off"


def check(
    fn: Any,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    rest: Sequence[Any],
    chunk_size: int,
    reduction: str,
    impl: str,
    count: Any,
    label_smoothing: float,
) -> None:
    """Raises ValueError: arguments that do not fit one another."""
    if hidden.ndim < 1 or hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} and labels {list(labels.shape)}: they must be "
            "[..., H] and [...] (under sequence parallelism, give hidden as a DTensor or gather it)"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction={reduction!r}: "mean", "sum" or "none"')
    if impl not in ("auto", "recompute", "fused"):
        raise ValueError(f'impl={impl!r}: "auto", "recompute" or "fused"')
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: a tile has at least one token")
    if not isinstance(count, torch.Tensor) and count is not None and count < 0:
        raise ValueError(f"count={count}: the mean is over 0 tokens or more")
    if count is not None and reduction != "mean":
        raise ValueError(f'count is what reduction="mean" divides by, not "{reduction}"')
    if isinstance(fn, nn.Module):
        if rest:
            raise ValueError("more arguments are for a function; a head takes hidden states alone")
    elif label_smoothing:
        raise ValueError("label_smoothing is for a head: a function smooths in its own loss")
