"""Decides whether a tensor of a source can be loaded into a tensor of a model."""

from __future__ import annotations

import torch

from anyrank.models.dialects.layouts.given import misfit_of_parts
from anyrank.models.tensors import ModelTensor
from anyrank.tensors.sharded_tensor import is_released
from anyrank.tensors.spec import StoredTensor

PACKED = torch.float4_e2m1fn_x2  # torch cannot cast it to other dtypes


def unwritable(target: ModelTensor) -> str | None:
    """Return the error text for a real tensor that cannot be written to; None if it can."""
    tensor = target.tensor
    if not target.is_dtensor and is_released(tensor):
        return (
            f"{target.name}: its storage was freed with untyped_storage().resize_(0). Load the "
            "model before that."
        )
    if target.is_meta or target.layout is not None:
        return None
    if tensor.is_inference():
        return (
            f"{target.name}: is an inference tensor, which cannot be written to. Build the model "
            "outside torch.inference_mode()."
        )
    strides = tensor.stride()
    pairs = zip(tensor.shape, strides, strict=True) if 0 in strides else ()
    if any(size > 1 and stride == 0 for size, stride in pairs):
        return (
            f"{target.name}: is an expanded tensor, whose elements share memory. Put a .clone() "
            "into the model."
        )
    return None


# Tools without bfloat16 (NumPy) store its bits as 16-bit integers.
BITS = (
    "These 16-bit integers may be bit patterns of bfloat16; if so, pass a dict of "
    "tensor.view(torch.bfloat16). If they are integers, "
)


def find_misfit(target: ModelTensor, stored: StoredTensor, cast: str) -> str | None:
    """Return the error text for a tensor of the source with a wrong shape or dtype, or None."""
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
            f"{target.name}: the source packs two values into a byte ({have}, {stored.name}), but "
            f"the model has {want}. Dequantize the source with the library that created it."
        )
    # A cast between floats keeps the number except for rounding, and the report names each cast.
    if have == want or cast == "any" or (have.is_floating_point and want.is_floating_point):
        return None
    if have.is_complex and want.is_complex:
        return None
    if _holds_all_of(want, have):  # each value stays the same number
        return None
    bits_of_half = want.is_floating_point and have in (torch.int16, torch.uint16)
    return (
        f"{target.name}: the source has {have} ({stored.name}), but the model has {want}. "
        f"{BITS if bits_of_half else 'This cast is not automatic; '}allow it with cast='any'."
    )


def _holds_all_of(want: torch.dtype, have: torch.dtype) -> bool:
    """Return whether an integer dtype can represent every value of another one."""
    floats = have.is_floating_point or have.is_complex or want.is_floating_point or want.is_complex
    if floats or want == torch.bool:
        return False
    if have == torch.bool:
        return True
    small, large = torch.iinfo(have), torch.iinfo(want)
    return large.min <= small.min and small.max <= large.max
