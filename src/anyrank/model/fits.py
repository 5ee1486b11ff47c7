"""Whether what a source holds can be written into a tensor of a model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch

from anyrank.model.tensors import ModelTensor
from anyrank.tensors.sharded_tensor import lazy_view
from anyrank.tensors.spec import StoredTensor


def unwritable(target: ModelTensor) -> str | None:
    """Why the elements of a real tensor cannot be written to."""
    tensor = target.tensor
    if target.is_meta or target.layout is not None:
        return None
    if tensor.is_inference():
        return (
            f"{target.name}: is an inference tensor, which cannot be written to: build the model "
            "outside torch.inference_mode()"
        )
    if problem := lazy_view(target):
        return problem
    strides = tensor.stride()
    pairs = zip(tensor.shape, strides, strict=True) if 0 in strides else ()
    if any(size > 1 and stride == 0 for size, stride in pairs):
        return (
            f"{target.name}: is expanded, and its elements share memory: give the model a .clone()"
        )
    return None


def shared_on_meta(targets: Iterable[ModelTensor]) -> list[str]:
    """The problems of tensors that are several, and would have the same memory but for meta.

    Parts of one storage that do not overlap are tensors of their own.
    """
    by_storage: dict[torch.UntypedStorage, list[ModelTensor]] = {}
    for target in targets:
        tensor = target.tensor
        if target.is_meta and not target.is_dtensor and tensor.layout == torch.strided:
            by_storage.setdefault(tensor.untyped_storage(), []).append(target)
    found: list[str] = []
    for several in by_storage.values():
        several = sorted((t for t in several if t.tensor.numel()), key=_first)
        for one, other in pairwise(several):
            if _first(other) <= _last(one):
                found.append(
                    f"{one.name} and {other.name} share memory, which tensors on meta have not: "
                    "tie the parameters themselves (head.weight = embed.weight), or build the "
                    "model without anyrank.meta()"
                )
    return found


def _first(target: ModelTensor) -> int:
    return int(target.tensor.storage_offset())


def _last(target: ModelTensor) -> int:
    """The last element of its storage that a tensor has."""
    steps = zip(target.tensor.shape, target.tensor.stride(), strict=True)
    return _first(target) + sum((size - 1) * stride for size, stride in steps)


def misfit(target: ModelTensor, stored: StoredTensor, cast: str) -> str | None:
    """Why a tensor of the source does not fit, by its shape and dtype."""
    if stored.shape != target.shape:
        return (
            f"{target.name}: the model has shape {list(target.shape)}, "
            f"the source {list(stored.shape)} ({stored.name})"
        )
    have, want = stored.dtype, target.dtype
    if have == want or cast == "any" or (have.is_floating_point and want.is_floating_point):
        return None
    if have.is_complex and want.is_complex:
        return None
    if _holds_all_of(want, have):
        return None
    return (
        f"{target.name}: {have} of the source ({stored.name}) does not become {want} of the model "
        "by itself: ask for it with cast='any'"
    )


def _holds_all_of(want: torch.dtype, have: torch.dtype) -> bool:
    """Whether every value of one integer dtype is a value of another."""
    floats = have.is_floating_point or have.is_complex or want.is_floating_point or want.is_complex
    if floats or want == torch.bool:
        return False
    if have == torch.bool:
        return True
    small, large = torch.iinfo(have), torch.iinfo(want)
    return large.min <= small.min and small.max <= large.max
