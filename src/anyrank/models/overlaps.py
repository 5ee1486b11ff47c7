"""Finds tensors that overlap in memory, which is an error unless two objects are one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from anyrank.errors import LoadError
from anyrank.models.tensors import ModelTensor
from anyrank.tensors.box import Box
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.spec import StoredTensor
from anyrank.tensors.wrapped import PLAIN, values_of


class Twin(NamedTuple):
    """The earlier tensor that has the same memory as a tensor.

    Attributes:
        first: position of the earlier one among the model's tensors.
        is_turned: whether the tensor is a transposed view of the earlier one.
    """

    first: int
    is_turned: bool


def twins_of(tensors: Sequence[ModelTensor]) -> dict[int, Twin]:
    """Find the tensors that have all of the memory of an earlier one. load, sync and PEFT's merge
    ask this to know whether two objects are one tensor. `tensors_of` has already joined the entries
    of one object.

    Returns:
        Position -> the earlier tensor.
    """
    by_address: dict[int, list[int]] = {}
    for index, target in enumerate(tensors):
        tensor = target.tensor
        if target.layout is not None or target.is_meta or target.kind == "derived":
            continue
        if tensor.numel() and tensor.layout == torch.strided:
            by_address.setdefault(_address(tensor), []).append(index)
    # A model has many tensors and few twins, so shapes and strides are read only for these.
    at_shared = [index for indices in by_address.values() if len(indices) > 1 for index in indices]
    known: dict[tuple[object, ...], int] = {}
    twins: dict[int, Twin] = {}
    for index in sorted(at_shared):
        tensor = values_of(tensors[index].tensor)
        start = (tensor.device, tensor.data_ptr(), tensor.dtype)
        looks = (tuple(tensor.shape), tensor.stride())
        turned = (looks[0][::-1], looks[1][::-1])
        if (first := known.get((*start, *looks))) is not None:
            twins[index] = Twin(first, is_turned=False)
        elif (first := known.get((*start, *turned))) is not None:
            twins[index] = Twin(first, is_turned=True)
        else:
            known[*start, *looks] = index
    return twins


@dataclass(frozen=True, slots=True)
class SourceMemory:
    """A source tensor in memory from which others are filled.

    Attributes:
        tensor: the tensor as this rank holds it.
        memory: memory of its elements on this rank.
        strides: strides of a chunk that contains the whole tensor in order.
    """

    tensor: ShardedTensor
    memory: torch.Tensor
    strides: tuple[int, ...]


def check_overlaps(
    tensors: Sequence[ModelTensor],
    stored: Mapping[int, StoredTensor],
    filled: Mapping[int, torch.Tensor],
    sources: Mapping[int, SourceMemory],
) -> None:
    """Check that no two tensors share only part of their memory: one would overwrite the other.

    The same elements in the same order are one tensor in two objects.

    Args:
        tensors: the tensors of the model.
        stored: tensor -> the bytes that fill it.
        filled: memory of the real tensors that are filled, by position; {} if all are filled in new
            memory, and put in place when everything has been read.
        sources: this rank's tensors from which others are filled, by the index in `Chunk.file`.

    Raises:
        LoadError: two tensors overlap; the error names them.
    """
    memory = [*filled.values(), *(source.memory for source in sources.values())]
    # Sources are only read.
    pairs = ((first, second) for first, second in _touching(memory) if first < len(filled))
    _check_pairs(pairs, tensors, stored, filled, sources)


def _touching(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yield the pairs, in the given order, whose ranges in memory overlap."""
    by_device: dict[torch.device, list[tuple[int, int, int]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            start, size = tensor.data_ptr(), tensor.element_size()
            span = (start, start + (_last(tensor) - _first(tensor) + 1) * size, number)
            by_device.setdefault(tensor.device, []).append(span)
    for spans in by_device.values():
        opened: list[tuple[int, int, int]] = []
        for span in sorted(spans):
            opened = [earlier for earlier in opened if earlier[1] > span[0]]
            for *_, number in opened:
                yield min(number, span[2]), max(number, span[2])
            opened.append(span)


def _check_pairs(
    pairs: Iterable[tuple[int, int]],
    tensors: Sequence[ModelTensor],
    stored: Mapping[int, StoredTensor],
    filled: Mapping[int, torch.Tensor],
    sources: Mapping[int, SourceMemory],
) -> None:
    """Check that pairs consist of the same elements in the same order.

    Args:
        pairs: positions in `filled`, followed by `sources`, of touching tensors; the lower one
            first.
        tensors, stored, filled, sources: as for `check_overlaps`.

    Raises:
        LoadError: as for `check_overlaps`.
    """
    targets, givers = list(filled.items()), list(sources.items())
    for first, second in pairs:
        index, target_memory = targets[first]
        if second < len(targets):
            other, other_memory = targets[second]
            if not _is_same_memory(target_memory, other_memory):
                raise LoadError(
                    f"{tensors[index].name} and {tensors[other].name} overlap in memory, so "
                    "loading one would overwrite the other. Leave out one of them, or .clone() it."
                )
        else:
            number, source = givers[second - len(targets)]
            if not _is_itself(tensors[index], target_memory, stored[index], number, source):
                raise LoadError(
                    f"{tensors[index].name}: shares memory with {source.tensor.name} of the "
                    "source, so the load would overwrite the source before it reads it. Copy one "
                    "of them (copy.deepcopy, .clone())."
                )


def _is_itself(
    target: ShardedTensor,
    memory: torch.Tensor,
    stored: StoredTensor,
    number: int,
    source: SourceMemory,
) -> bool:
    """Return whether a tensor is filled from one whole source tensor in the same memory."""
    first, *others = stored.chunks
    giver = source.tensor
    return (
        not others
        and first.file == number
        and first.offset == 0
        and first.box == Box.whole(giver.shape)
        and first.strides == source.strides
        and (target.shape, target.layout, target.coordinate)
        == (giver.shape, giver.layout, giver.coordinate)
        and _is_same_memory(memory, source.memory)
    )


def _is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
        other.dtype,
    )


def shared_on_meta(targets: Iterable[ModelTensor]) -> list[str]:
    """Return the error texts for meta tensors that share memory, which real ones would not do.

    Parts of one storage that do not overlap are separate tensors.
    """
    by_storage: dict[torch.UntypedStorage, list[ModelTensor]] = {}
    for target in targets:
        tensor = target.tensor
        if target.is_meta and not target.is_dtensor and tensor.layout == torch.strided:
            by_storage.setdefault(tensor.untyped_storage(), []).append(target)
    problems: list[str] = []
    for sharers in by_storage.values():
        sharers = sorted((t for t in sharers if t.tensor.numel()), key=lambda t: _first(t.tensor))
        for lower, upper in pairwise(sharers):
            if _first(upper.tensor) <= _last(lower.tensor):
                problems.append(
                    f"{lower.name} and {upper.name} share memory, which meta tensors cannot do. "
                    "Tie the parameters themselves (head.weight = embed.weight), or build the "
                    "model without anyrank.meta()."
                )
    return problems


def _address(tensor: torch.Tensor) -> int:
    plain = tensor if type(tensor) in PLAIN else values_of(tensor)
    return plain.data_ptr()


def _first(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _last(tensor: torch.Tensor) -> int:
    """Return the index of the last element in its storage that belongs to a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return _first(tensor) + sum((size - 1) * stride for size, stride in steps)
