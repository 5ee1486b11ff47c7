"""Gradients that are exchanged together: one collective for many small tensors.

A bucket is exchanged as one flat tensor; a gradient that fills one by itself is not copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anyrank.tensors.torch_classes import is_dtensor

BUCKET_BYTES = 4 << 20  # gradients that are exchanged together
MAX_STARTED = 2  # pending buckets, each in two copies or more


def buckets(
    parameters: Mapping[str, nn.Parameter],
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    nbytes: int = BUCKET_BYTES,
) -> Iterator[list[str]]:
    """Yield the names of trained parameters in each bucket, in the order of the backward.

    Args:
        parameters: by name, in the order of the forward.
        dtype_of: the dtype in which a parameter's gradient is exchanged; a bucket has only one.
        nbytes: size from which a bucket is full.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name in reversed(list(parameters)):
        parameter = parameters[name]
        if parameter.requires_grad:
            kinds.setdefault((dtype_of(parameter), parameter.device), []).append(name)
    for (dtype, _), members in kinds.items():
        names: list[str] = []
        size = 0
        for name in members:
            grad_bytes = local(parameters[name]).numel() * dtype.itemsize
            if grad_bytes >= nbytes:  # by itself, it is exchanged without a copy
                yield [name]
                continue
            names.append(name)
            size += grad_bytes
            if size >= nbytes:
                yield names
                names, size = [], 0
        if names:
            yield names


def average(parameters: Mapping[str, nn.Parameter], size: int, group: Any) -> None:
    """Average the gradients of parameters, which all have one, in place. Collective over the group.

    Args:
        parameters: the same on every rank.
        size: number of ranks.
        group: their process group.
    """
    sparse = [name for name in parameters if _gradient(parameters[name]).layout != torch.strided]
    dense = {name: parameters[name] for name in parameters if name not in sparse}
    started: deque[Callable[[], None]] = deque()
    for names in [*([name] for name in sparse), *buckets(dense, lambda p: _gradient(p).dtype)]:
        if len(started) == MAX_STARTED:
            started.popleft()()
        started.append(_start_average([_gradient(parameters[n]) for n in names], size, group))
    while started:
        started.popleft()()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _start_average(parts: list[torch.Tensor], size: int, group: Any) -> Callable[[], None]:
    """Start to average some gradients; return a function that waits and writes them back."""
    first = parts[0]
    is_flat = len(parts) == 1 and (first.layout != torch.strided or first.is_contiguous())
    flat = first if is_flat else torch.cat([part.reshape(-1) for part in parts])
    work: Any = dist.all_reduce(flat, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        flat.div_(size)
        if not is_flat:
            pieces = flat.split([part.numel() for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece.view(part.shape))

    return finish


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
