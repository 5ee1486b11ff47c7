"""The norm of all gradients, with bits that depend on neither the ranks nor the sharding.

Every power of an element is rounded to a multiple of one number, derived from the largest element
of all. Sums of such multiples are exact in integers, so their order does not matter (Demmel and
Nguyen, "Parallel Reproducible Summation", 2015, with one bin of 60 bits).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anyrank.tensors.torch_classes import is_dtensor

SLAB = 1 << 22  # elements that are converted at a time
BITS = 60  # for the largest power
LIMB_BITS = 20  # of each summed part: no overflow below 2**43 elements
SMALLEST_EXPONENT = -1000  # smaller elements count as 0
EPS = 1e-6  # the value in torch.nn.utils.clip_grad_norm_


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are added up: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class _ShardedGradients:
    """Gradients that are sharded over the same axes of the same mesh.

    Attributes:
        mesh: the mesh; None for whole tensors.
        axes: the axes of the mesh over which the parts are disjoint.
        parts: this rank's parts, as real numbers.
    """

    mesh: Any
    axes: Sequence[int]
    parts: list[torch.Tensor]

    def device(self) -> torch.device:
        """Return the device type on which the mesh communicates."""
        kind = self.parts[0].device if self.mesh is None else self.mesh.device_type
        return torch.device(kind)

    def reduce(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        """Reduce values over all parts. Collective over the mesh."""
        for axis in self.axes:
            dist.all_reduce(values, op=op, group=self.mesh.get_group(axis))
        return values


def _by_sharding(gradients: Iterable[torch.Tensor]) -> list[_ShardedGradients]:
    """Return the gradients' local parts, by their sharding; in the same order on every rank."""
    groups: dict[Any, _ShardedGradients] = {}
    for gradient in gradients:
        mesh, axes, part = None, (), gradient
        if is_dtensor(gradient):
            from torch.distributed.tensor import Replicate

            mesh = gradient.device_mesh
            places = [Replicate() if p.is_partial() else p for p in gradient.placements]
            if any(p.is_partial() for p in gradient.placements):
                gradient = gradient.redistribute(placements=places)
            axes = tuple(axis for axis, p in enumerate(places) if not p.is_replicate())
            part = gradient.to_local()
        if part.is_sparse:
            part = part.coalesce().values()
        key = (mesh, axes) if axes else (None, ())
        part = torch.view_as_real(part.detach()) if part.is_complex() else part.detach()
        groups.setdefault(key, _ShardedGradients(*key, [])).parts.append(part)
    return list(groups.values())


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> float:
    """Return the norm of all gradients as one vector. Collective over the ranks that share them.

    Args:
        gradients: whole tensors, or DTensors on any meshes.
        norm_type: at least 1, or inf.

    Returns:
        The same value on every rank; inf or nan if an element is.
    """
    groups = _by_sharding(gradients)
    extremes = [_largest_element(group) for group in groups]
    largest = max((value for _, value in extremes), default=0.0)
    if any(is_nan for is_nan, _ in extremes):
        return math.nan
    if norm_type == math.inf or largest in (0.0, math.inf):
        return largest
    exponent = max(math.frexp(largest)[1], SMALLEST_EXPONENT)
    total = sum(_sum_of_powers(group, exponent, norm_type) for group in groups)
    if norm_type == 2:
        return math.sqrt(total) * 2.0 ** (exponent - BITS // 2)
    return (total / (1 << BITS)) ** (1 / norm_type) * 2.0**exponent


def _largest_element(group: _ShardedGradients) -> tuple[float, float]:
    """Return whether an element is nan (0 or 1), and the largest of the others. Collective over the
    mesh.
    """
    norms = [
        torch.linalg.vector_norm(part, math.inf).double().to(group.device())
        for part in group.parts
        if part.numel()
    ]
    values = torch.zeros(2, dtype=torch.float64, device=group.device())
    if norms:
        stacked = torch.stack(norms)
        values[0] = stacked.isnan().any()
        values[1] = stacked.nan_to_num(nan=0.0, posinf=math.inf).max()
    is_nan, largest = group.reduce(values, dist.ReduceOp.MAX).tolist()
    return is_nan, largest


def _sum_of_powers(group: _ShardedGradients, exponent: int, norm_type: float) -> int:
    """Return the sum of |x / 2**exponent|**norm_type, in units of 2**-BITS. Collective over the
    mesh.
    """
    limbs = torch.zeros(3, dtype=torch.int64, device=group.device())
    mask = (1 << LIMB_BITS) - 1
    for part in group.parts:
        for slab in part.reshape(-1).split(SLAB):
            scaled = slab.double() * 2.0**-exponent
            if norm_type == 2:
                scaled.square_()
            elif norm_type == 1:
                scaled.abs_()
            else:
                scaled.abs_().pow_(norm_type)
            units = scaled.mul_(2.0**BITS).round_().long()
            parts = [units >> 2 * LIMB_BITS, (units >> LIMB_BITS) & mask, units & mask]
            limbs += torch.stack([limb.sum() for limb in parts]).to(limbs.device)
    high, middle, low = group.reduce(limbs, dist.ReduceOp.SUM).tolist()
    return (high << 2 * LIMB_BITS) + (middle << LIMB_BITS) + low


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float, is_finite: bool
) -> torch.Tensor:
    """Scale gradients so that their norm is at most `max_norm`. Collective over the ranks that
    share them.

    Args:
        parameters: those without a gradient are left out.
        max_norm: at least 0.
        norm_type: at least 1, or inf.
        is_finite: raise for a norm that is not finite.

    Returns:
        The norm before scaling, 0-d, on the CPU.

    Raises:
        RuntimeError: the norm is not finite; raised on every rank, and nothing is scaled.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = total_norm(gradients, norm_type)
    if is_finite and not math.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm (order {norm_type}) is {norm}. Check the loss and the data of this "
            "step, or pass error_if_nonfinite=False to clip anyway."
        )
    factor = max_norm / (norm + EPS)
    if not factor >= 1:  # nan too, as in torch
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(factor)
    dtype = torch.float32
    for gradient in gradients:
        dtype = torch.promote_types(dtype, sum_dtype(gradient.dtype).to_real())
    return torch.tensor(norm, dtype=dtype, device="cpu")
