"""`check=True`: does a function do to a tile what it does to the same rows of the whole?"""

from __future__ import annotations

from typing import Any

import torch

from anyrank.memory.ambient_state import AmbientState
from anyrank.memory.arguments import Call, flatten
from anyrank.memory.tiling_dims import Cut, normal, spread


def compare_probe(call: Call, cut: Cut, out_dims: Any, label: str) -> None:
    """Run the call untiled and its second tile alone, without gradients, and compare.

    Random state is set back. Costs one untiled call and two tiles.

    Raises:
        ValueError: the results differ, or the function draws random numbers.
    """
    devices = {leaf.device for leaf in call.leaves if isinstance(leaf, torch.Tensor)}
    with torch.no_grad(), AmbientState.now(devices, ()).restored():
        k = 1
        probe = flatten(call.run(cut.tile(k, call.leaves)))[0]
        result = call.run(call.leaves)
        again = flatten(call.run(cut.tile(k, call.leaves)))[0]
        whole = flatten(result)[0]
        dims = spread(out_dims, result, label)
    for n, tensor in enumerate(whole):
        if not isinstance(tensor, torch.Tensor):
            continue
        dim = normal(dims[n], tensor, f"{label}: a result")
        if not same(probe[n], again[n], dim):
            raise ValueError(
                f"{label}: gives another result for the same tile each time, so check=True cannot "
                "compare: turn dropout off for the check, or leave it out"
            )
        if tensor.shape[dim] != cut.size:
            raise ValueError(
                f"{label}: a result has shape {list(tensor.shape)}, and not {cut.size} rows in dim "
                f"{dim} (out_dims)"
            )
        rows = tensor.narrow(dim, cut.starts[k], cut.length(k))
        if not same(probe[n], rows, dim):
            raise ValueError(
                f"{label}: is not independent along the tiled dim: rows {cut.starts[k]} to "
                f"{cut.starts[k] + cut.length(k) - 1} come out differently alone "
                f"({distance(probe[n], rows)}) than as a part of the whole; tile another dim, or "
                "another function"
            )


def same(a: torch.Tensor, b: torch.Tensor, dim: int) -> bool:
    """Equal up to the order of sums, row by row along a dim: a few wrong rows do not hide among
    many right ones, as those at the edges of a tile would.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    # Narrow dtypes are summed in float32 and rounded at the end; wide ones in their own precision.
    tolerance = (4 if a.dtype.itemsize <= 2 else 32) * torch.finfo(a.dtype).eps
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = (each.to(wide).movedim(dim, 0).flatten(1) for each in (a, b))
    odd = ~(a.isfinite() & b.isfinite())  # infinities and nan have to be in the same places
    if not torch.equal(a[odd].nan_to_num(), b[odd].nan_to_num()):
        return False
    a, b = a.masked_fill(odd, 0), b.masked_fill(odd, 0)
    size = b.norm(dim=1)
    # A row that cancels out is as inexact as the others are.
    scale = torch.maximum(size, size.square().mean().sqrt())
    return bool(((a - b).norm(dim=1) <= tolerance * scale).all())


def distance(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.shape != b.shape:
        return f"shape {list(a.shape)} for {list(b.shape)}"
    return f"by up to {(a.double() - b.double()).abs().max().item():.3g}"
