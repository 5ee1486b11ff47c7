"""Finds the memory that has a tensor's values: its own, that of one inner tensor, or none.

A tensor subclass may not have its own memory (torch's wrapper classes). Some, such as those with
which torchao trains in float8, only add behavior to one plain tensor, whose memory they use.
Others, such as quantized tensors, compute their values from several tensors; an error names their
class.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

PLAIN = (torch.Tensor, torch.nn.Parameter)
WRAPPED = "load or save the model before it is wrapped or quantized, or use fully_shard (FSDP2)"
SHARDED = "ShardedTensor"
SHARDED_WAY_OUT = (
    "each rank has one part. Save the dict with torch.distributed.checkpoint, and pass that "
    "folder; or call state_dict() under FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)"
)
# Library classes that keep packed numbers, not the values, in a tensor's own memory.
PACKED = ("FlatParameter", "Params4bit", "Int8Params", "GGUFParameter")
IN_FILE = "save its .dequantize(), or a state_dict() from before it was wrapped or quantized"


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the detached tensor whose memory has the values, to be read and written in place."""
    plain = tensor.detach()
    while type(plain) is not torch.Tensor and (name := _inner_name(plain)) is not None:
        plain = getattr(plain, name).detach()
    return plain


def packed_parts(tensor: Any) -> dict[str, torch.Tensor]:
    """Map names to the plain tensors from which a tensor's class computes its values.

    The name is "" for the tensor's own memory, which under FSDP2 is a plain tensor. Empty for a
    tensor whose memory has its values, and for one that is not made of plain tensors. Scales that
    bitsandbytes keeps in other objects are not included.
    """
    if type(tensor) in PLAIN or hasattr(tensor, "placements") or not without_bytes(tensor):
        return {}
    if type(tensor).__name__ in PACKED:
        return {"": tensor.detach().as_subclass(torch.Tensor)}
    parts: dict[str, torch.Tensor] = {}
    for name in tensor.__tensor_flatten__()[0] if is_wrapper(tensor) else ():
        inner = getattr(tensor, name)
        below = packed_parts(inner)
        parts |= {f"{name}.{key}".rstrip("."): part for key, part in below.items()} or {name: inner}
    return parts


def rewrapped(like: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return `values` in the same wrapper as another tensor; unchanged if that has none."""
    outer: Any = like.detach()
    name = _inner_name(outer)
    if name is None:
        return values
    inner = rewrapped(getattr(outer, name), values)
    context = outer.__tensor_flatten__()[1]
    return type(outer).__tensor_unflatten__({name: inner}, context, outer.size(), outer.stride())


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's class keeps its numbers in inner tensors."""
    return type(tensor) not in PLAIN and _is_wrapper_class(type(tensor))


def without_bytes(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return the kind of a tensor whose memory lacks its values, and the way out; None for others.

    A DTensor is judged by its local part.
    """
    if type(tensor).__name__ == SHARDED:  # first, because it lacks most methods of a tensor
        return f"{SHARDED} of FSDP1", SHARDED_WAY_OUT
    if hasattr(tensor, "placements"):
        return without_bytes(_local_of(tensor))
    if tensor.is_nested:
        return "nested tensor", "pass its parts, from .unbind()"
    if tensor.layout != torch.strided:
        return f"{tensor.layout} tensor", "pass a dense tensor, from .to_dense()"
    if tensor.is_quantized:
        return "quantized tensor", "load or save before it is quantized, or pass .dequantize()"
    if type(tensor) not in PLAIN and (problem := _hiding_class(tensor)) is not None:
        return problem
    if tensor.is_conj() or tensor.is_neg():
        return "conj or neg view", "pass the result of .resolve_conj().resolve_neg()"
    return None


def _hiding_class(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Apply `without_bytes` to a tensor subclass."""
    name = type(tensor).__name__
    if name in PACKED:
        return name, WRAPPED
    if is_wrapper(tensor):
        return (name, WRAPPED) if _inner_name(tensor.detach()) is None else None
    has_memory = tensor.is_meta or not tensor.numel() or tensor.data_ptr()
    return None if has_memory else (name, WRAPPED)


def _inner_name(tensor: Any) -> str | None:
    """Return the attribute with the one inner tensor that holds all of a wrapper's values.

    Return None for a tensor that is not a wrapper, or that computes its values.
    """
    if not is_wrapper(tensor):
        return None
    names: list[str] = tensor.__tensor_flatten__()[0]
    inner = getattr(tensor, names[0]) if len(names) == 1 else None
    if inner is None or _look(inner) != _look(tensor) or without_bytes(inner) is not None:
        return None
    return names[0]


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _local_of(dtensor: Any) -> torch.Tensor:
    """Return the local part of a DTensor itself, because `to_local` takes ten times as long."""
    return getattr(dtensor, dtensor.__tensor_flatten__()[0][0])


@lru_cache(maxsize=256)
def _is_wrapper_class(kind: type[torch.Tensor]) -> bool:
    return hasattr(kind, "__tensor_flatten__")  # torch's protocol of wrapper classes


def stored_class(name: str, is_one: bool) -> str | None:
    """Return why a tensor subclass in a file has no bytes with its values, and the way out.

    Return None if the bytes are its own, or those of its one inner tensor.

    Args:
        name: the name of the class, which is not imported.
        is_one: whether the file has exactly one tensor of its dtype, shape and strides for it.
    """
    if name == SHARDED:
        return f"{SHARDED} of FSDP1: {SHARDED_WAY_OUT}"
    if name in PACKED or not is_one:
        return f"{name}, a tensor subclass whose own code computes its values: {IN_FILE}"
    return None
