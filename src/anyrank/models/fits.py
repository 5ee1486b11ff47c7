"""Decides whether a tensor of a source can be written into a tensor of a model."""

from __future__ import annotations

import torch

from anyrank.models.dialects.layouts.given import misfit_of_parts
from anyrank.models.tensors import ModelTensor
from anyrank.tensors.sharded_tensor import is_released
from anyrank.tensors.spec import StoredTensor

PACKED = torch.float4_e2m1fn_x2  # torch casts it to no other dtype


def unwritable(target: ModelTensor) -> str | None:
    """Explain why the elements of a real tensor cannot be written to; None if they can."""
    tensor = target.tensor
    if not target.is_dtensor and is_released(tensor):
        return f"{target.name}: its memory was released (untyped_storage().resize_): load before"
    if target.is_meta or target.layout is not None:
        return None
    if tensor.is_inference():
        return (
            f"{target.name}: is an inference tensor, which cannot be written to: build the model "
            "outside torch.inference_mode()"
        )
    strides = tensor.stride()
    pairs = zip(tensor.shape, strides, strict=True) if 0 in strides else ()
    if any(size > 1 and stride == 0 for size, stride in pairs):
        return (
            f"{target.name}: is expanded, and its elements share memory: give the model a .clone()"
        )
    return None


# Tools without bfloat16 (NumPy) store its bits as integers of the same size.
BITS = (
    "16-bit integers may be the bits of bfloat16, which are no numbers: give a dict of "
    "tensor.view(torch.bfloat16); if they are numbers, "
)


def find_misfit(target: ModelTensor, stored: StoredTensor, cast: str) -> str | None:
    """Explain why a tensor of the source does not fit, by shape and dtype; None if it does."""
    if stored.shape != target.shape:
        part_text = None
        if target.layout is not None and target.layout.is_given:
            part_text = misfit_of_parts(target, stored)
        return part_text or (
            f"{target.name}: the model has shape {list(target.shape)}, "
            f"the source {list(stored.shape)} ({stored.name})"
        )
    have, want = stored.dtype, target.dtype
    if have != want and PACKED in (have, want):
        return (
            f"{target.name}: {have} of the source ({stored.name}) does not become {want} of the "
            "model: it is two numbers in a byte: dequantize it with the library that made it"
        )
    # A float of another width is the same number, rounded, and the report names each cast.
    if have == want or cast == "any" or (have.is_floating_point and want.is_floating_point):
        return None
    if have.is_complex and want.is_complex:
        return None
    if _holds_all_of(want, have):  # each value stays the same number
        return None
    bits_of_half = want.is_floating_point and have in (torch.int16, torch.uint16)
    return (
        f"{target.name}: {have} of the source ({stored.name}) does not become {want} of the model "
        f"by itself: {BITS if bits_of_half else ''}ask for it with cast='any'"
    )


def _holds_all_of(want: torch.dtype, have: torch.dtype) -> bool:
    """Return whether every value of one integer dtype is a value of another."""
    floats = have.is_floating_point or have.is_complex or want.is_floating_point or want.is_complex
    if floats or want == torch.bool:
        return False
    if have == torch.bool:
        return True
    small, large = torch.iinfo(have), torch.iinfo(want)
    return large.min <= small.min and small.max <= large.max
