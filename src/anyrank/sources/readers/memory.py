"""A dict of tensors in memory, as a source."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from anyrank.errors import LoadError, WrongValue
from anyrank.files.listing import ABSENT, EXTRA_STATE, NOT_A_TENSOR, FileInfo, Listing
from anyrank.sources.part_names import NESTED, is_other_part
from anyrank.tensors.box import Box
from anyrank.tensors.sharded_tensor import is_released
from anyrank.tensors.spec import Chunk, StoredTensor
from anyrank.tensors.wrapped import values_of, without_bytes


def list_memory(tensors: Mapping[str, Any]) -> Listing:
    """List a dict of tensors in memory; each tensor is a "file" whose bytes are its storage.

    Raises:
        LoadError: a value is not a plain dense tensor.
        ValueError: the dict has no tensors, or they are in an inner dict.
    """
    files: list[FileInfo] = []
    stored: dict[str, StoredTensor] = {}
    skipped: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    extras: dict[str, tuple[Any] | None] = {}
    first: dict[Any, StoredTensor] = {}  # by memory
    _check_has_tensors(tensors)
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            if key.rsplit(".", 1)[-1] == EXTRA_STATE:
                extras[key] = extra_of(value)
                continue
            if what := describe_unread(key, value):
                unreadable[key] = what
            skipped[key] = what or (ABSENT if value is None else NOT_A_TENSOR)
            continue
        value = _dense(key, value)
        shape = tuple(value.shape)
        memory = (value.device, value.data_ptr(), value.dtype, shape, value.stride())
        if memory in first and value.numel():  # tied
            stored[key] = first[memory].renamed(key)
            continue
        chunk = Chunk(Box.whole(shape), len(files), 0, tuple(value.stride()))
        stored[key] = first[memory] = StoredTensor(key, shape, value.dtype, (chunk,))
        nbytes = value.numel() * value.element_size()
        files.append(FileInfo(key, nbytes, "", in_memory=True, tensor=value))
    return Listing(
        "memory",
        tuple(files),
        stored,
        skipped=skipped,
        extras=extras,
        unreadable=unreadable,
    )


def _check_has_tensors(tensors: Mapping[str, Any]) -> None:
    """Raise ValueError if a dict has no tensors, or they are in an inner dict."""
    direct = sum(isinstance(value, torch.Tensor) for value in tensors.values())
    inner = next((name for name in NESTED if _tensors_in(tensors.get(name)) > direct), None)
    if inner is not None:
        raise WrongValue(
            f"the tensors are in an inner dict; pass that, for example source[{inner!r}]"
        )
    if not direct:
        keys = ", ".join(map(str, list(tensors)[:20]))
        raise WrongValue(
            f"the dict {f'has no tensors, only {keys}' if keys else 'is empty'}; pass the dict "
            "of tensors"
        )


def _tensors_in(value: Any) -> int:
    inner: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    return sum(isinstance(tensor, torch.Tensor) for tensor in inner.values())


def _dense(key: str, value: torch.Tensor) -> torch.Tensor:
    """Return the plain dense tensor with a value's bytes.

    Raises:
        LoadError: this process does not have its values as plain bytes.
    """
    if hasattr(value, "placements"):
        raise LoadError(
            f"{key}: is a DTensor, of which this process has only its local part. Use "
            "anyrank.load or anyrank.sync for a dict of DTensors."
        )
    if value.is_meta:
        raise LoadError(f"{key}: is on meta, so it has no values; load or materialize it first")
    if what := without_bytes(value):
        raise LoadError(f"{key}: is a {what[0]}, whose bytes are not its values; {what[1]}")
    value = values_of(value)
    if is_released(value):
        raise LoadError(
            f"{key}: its storage was freed with untyped_storage().resize_(0); restore it first"
        )
    return value


def describe_unread(key: str, value: Any) -> str | None:
    """Return the kind of a value that may be weights, which would otherwise be overlooked."""
    if hasattr(value, "__array__"):
        return "an array, not a tensor (convert it with torch.as_tensor)"
    is_optimizer = is_other_part(key) or (isinstance(value, Mapping) and "param_groups" in value)
    if is_optimizer or not _holds_tensors(value):
        return None
    return (
        f"a {type(value).__name__} with tensors in it (pass each of them, for example as "
        f"{key + '.weight'!r})"
    )


def _holds_tensors(value: Any, depth: int = 16) -> bool:
    parts: Any = value.values() if isinstance(value, Mapping) else value
    is_container = isinstance(value, (Mapping, list, tuple)) and depth > 0
    return isinstance(value, torch.Tensor) or (
        is_container and any(_holds_tensors(part, depth - 1) for part in parts)
    )


def extra_of(value: Any) -> tuple[Any] | None:
    """Return a module's extra state in the form of `Listing.extras`."""
    return (value,) if _is_plain(value) else None


def _is_plain(value: Any, depth: int = 16) -> bool:
    if isinstance(value, (list, tuple, dict, set, frozenset)) and depth:
        parts: Any = value
        inner = [*parts.keys(), *parts.values()] if isinstance(value, dict) else parts
        return type(parts) in (list, tuple, dict, OrderedDict, set, frozenset) and all(
            _is_plain(part, depth - 1) for part in inner
        )
    return value is None or type(value) in (bool, int, float, complex, str, bytes, torch.dtype)
