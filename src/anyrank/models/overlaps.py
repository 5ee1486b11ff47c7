"""Tensors that lie in one another's memory: which are one tensor in two objects, and which not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from anyrank.errors import LoadError
from anyrank.models.fits import SourceMemory
from anyrank.models.tensors import ModelTensor
from anyrank.tensors.box import Box
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.spec import StoredTensor


def check_pairs(
    pairs: Iterable[tuple[int, int]],
    tensors: Sequence[ModelTensor],
    stored: Mapping[int, StoredTensor],
    filled: Mapping[int, torch.Tensor],
    sources: Mapping[int, SourceMemory],
) -> None:
    """Refuse pairs that are not the same elements in the same order.

    Args:
        pairs: positions in `filled`, and behind it in `sources`, of what touches; the lower first.
        tensors, stored, filled, sources: as for `check_overlaps` of the core.

    Raises:
        LoadError: as `check_overlaps`.
    """
    targets, givers = list(filled.items()), list(sources.items())
    for first, second in pairs:
        index, target_memory = targets[first]
        if second < len(targets):
            other, other_memory = targets[second]
            if not _is_same_memory(target_memory, other_memory):
                raise LoadError(
                    f"{tensors[index].name} and {tensors[other].name} share a part of their "
                    "memory, or lie between each other's elements, and are filled one after the "
                    "other: leave out one of them, or give it memory of its own (.clone())"
                )
        else:
            number, source = givers[second - len(targets)]
            if not _is_itself(tensors[index], target_memory, stored[index], number, source):
                raise LoadError(
                    f"{tensors[index].name}: shares memory with {source.tensor.name} of the "
                    "source, and the load would overwrite that before it reads it: give one of "
                    "them memory of its own (copy.deepcopy, .clone())"
                )


def _is_itself(
    target: ShardedTensor,
    memory: torch.Tensor,
    stored: StoredTensor,
    number: int,
    source: SourceMemory,
) -> bool:
    """Whether a tensor is filled by all of one source in order, and both are one memory."""
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
