"""Whether what a source holds can be written into a tensor of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from anyrank.models.tensors import ModelTensor
from anyrank.tensors.sharded_tensor import ShardedTensor, is_released
from anyrank.tensors.spec import StoredTensor

PACKED = torch.float4_e2m1fn_x2  # which torch casts to no other dtype


def unwritable(target: ModelTensor) -> str | None:
    """Why the elements of a real tensor cannot be written to."""
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


@dataclass(frozen=True, slots=True)
class SourceMemory:
    """A tensor that others are filled from.

    Attributes:
        tensor: as this rank holds it.
        memory: of its elements here.
        strides: of a chunk that is all of it in order.
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
    """Refuse two tensors that share memory but not all of it: one would overwrite the other.

    The same elements in the same order are one tensor in two objects.

    Args:
        tensors: of the model.
        stored: tensor -> what fills it.
        filled: memory of the real ones that are filled, by position; {} where they are all filled
            apart, and put in place when everything has been read.
        sources: this rank's tensors that others are filled from, by the number that `Chunk.file`
            counts.

    Raises:
        LoadError: names the two tensors.
    """
    memory = [*filled.values(), *(source.memory for source in sources.values())]
    # Sources are only read.
    pairs = [(first, second) for first, second in _touching(memory) if first < len(filled)]
    if pairs:
        from anyrank.models.overlaps import check_pairs  # a door: see test_house

        check_pairs(pairs, tensors, stored, filled, sources)


def _touching(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs, in the order given, of which neither ends before the other starts in memory."""
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


def shared_on_meta(targets: Iterable[ModelTensor]) -> list[str]:
    """Name tensors on meta that overlap in one storage: real ones would share that memory.

    Parts of one storage that do not overlap are tensors of their own.
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
                    f"{lower.name} and {upper.name} share memory, which tensors on meta have not: "
                    "tie the parameters themselves (head.weight = embed.weight), or build the "
                    "model without anyrank.meta()"
                )
    return problems


def _first(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _last(tensor: torch.Tensor) -> int:
    """The last element of its storage that a tensor has."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return _first(tensor) + sum((size - 1) * stride for size, stride in steps)


# Tools without bfloat16 (NumPy) store its bits as integers of the same size.
BITS = (
    "16-bit integers may be the bits of bfloat16, which are no numbers: give a dict of "
    "tensor.view(torch.bfloat16); if they are numbers, "
)


def find_misfit(target: ModelTensor, stored: StoredTensor, cast: str) -> str | None:
    """Why a tensor of the source does not fit, by its shape and dtype."""
    if stored.shape != target.shape:
        part_text = None
        if target.layout is not None and target.layout.is_given:
            from anyrank.models.dialects.layouts.given import misfit_of_parts

            part_text = misfit_of_parts(target, stored)
        return part_text or (
            f"{target.name}: the model has shape {list(target.shape)}, "
            f"the source {list(stored.shape)} ({stored.name})"
        )
    have, want = stored.dtype, target.dtype
    if have != want and PACKED in (have, want):
        return (
            f"{target.name}: {have} of the source ({stored.name}) does not become {want} of the "
            "model: it is two numbers in a byte: dequantise it with the library that made it"
        )
    # A float of another width is the same number, rounded, and the report names each cast.
    if have == want or cast == "any" or (have.is_floating_point and want.is_floating_point):
        return None
    if have.is_complex and want.is_complex:
        return None
    if _holds_all_of(want, have):  # each value stays the number that it is
        return None
    bits_of_half = want.is_floating_point and have in (torch.int16, torch.uint16)
    return (
        f"{target.name}: {have} of the source ({stored.name}) does not become {want} of the model "
        f"by itself: {BITS if bits_of_half else ''}ask for it with cast='any'"
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
