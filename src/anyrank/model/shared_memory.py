"""Tensors that share memory: a write to one of them is a write to the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from anyrank.errors import LoadError
from anyrank.model.fits import unwritable
from anyrank.model.match import ModelMatch
from anyrank.tensors.box import Box
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.spec import StoredTensor


@dataclass(frozen=True, slots=True)
class SourceMemory:
    """A tensor that others are filled from.

    Attributes:
        held: as this rank holds it.
        memory: of its elements here.
        strides: of a chunk that is all of it in order.
    """

    held: ShardedTensor
    memory: torch.Tensor
    strides: tuple[int, ...]


class SharedMemory:
    """What of the memory that is filled belongs to more than one tensor, on this rank.

    Args:
        match: what fills the model, with its tensors.
        filled: the memory of real tensors that are filled, by position.
        sources: this rank's, by the number that `Chunk.file` counts.
    """

    def __init__(
        self,
        match: ModelMatch,
        filled: Mapping[int, torch.Tensor],
        sources: Mapping[int, SourceMemory],
    ) -> None:
        self.match = match
        self.targets = list(filled.items())
        self.sources = list(sources.items())
        memory = [*filled.values(), *(source.memory for source in sources.values())]
        self.touching = list(_touching(memory))

    def filled_apart(self) -> set[int]:
        """The tensors whose memory also belongs to a source, and which may not be filled before all
        ranks have read that source.

        A source that is the very tensor that it fills, element for element, loses nothing by it.
        """
        found: set[int] = set()
        for one, other in self.touching:
            if one < len(self.targets) <= other:
                index, memory = self.targets[one]
                number, source = self.sources[other - len(self.targets)]
                stored, target = self.match.stored[index], self.match.tensors[index]
                if not _is_itself(target, memory, stored, number, source):
                    found.add(index)
        return found

    def check_writable(self) -> None:
        """Refuse real tensors that cannot be filled: by themselves, or as two share a part of
        memory.

        Raises:
            LoadError: names the tensor, or the two.
        """
        tensors = self.match.tensors
        problems = [problem for i, _ in self.targets if (problem := unwritable(tensors[i]))]
        if problems:
            raise LoadError("\n".join(problems))
        for one, other in self.touching:
            if other >= len(self.targets):
                continue
            (first, memory), (second, others) = self.targets[one], self.targets[other]
            if _is_same_memory(memory, others):
                continue  # a tie, in two objects
            if _shares_elements(memory, others):
                raise LoadError(
                    f"{tensors[first].name} and {tensors[second].name} of dst share a part of "
                    "their memory, so the values of one would overwrite those of the other: leave "
                    "out one of them, or give it memory of its own (.clone())"
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
    held = source.held
    return (
        not others
        and first.file == number
        and first.offset == 0
        and first.box == Box.whole(held.shape)
        and first.strides == source.strides
        and (target.shape, target.layout, target.coordinate)
        == (held.shape, held.layout, held.coordinate)
        and _is_same_memory(memory, source.memory)
    )


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
        other.dtype,
    )


def _touching(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs, in the order given, of which neither ends before the other starts in memory."""
    by_device: dict[torch.device, list[tuple[int, int, int]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            start = tensor.data_ptr()
            span = (start, start + _extent(tensor), number)
            by_device.setdefault(tensor.device, []).append(span)
    for spans in by_device.values():
        opened: list[tuple[int, int, int]] = []
        for span in sorted(spans):
            if opened:
                opened = [each for each in opened if each[1] > span[0]]
            for *_, number in opened:
                yield min(number, span[2]), max(number, span[2])
            opened.append(span)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _shares_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether any byte belongs to both: columns of one matrix touch, and share nothing."""
    first, second = _runs(one), _runs(other)
    starts, stops = (torch.cat(both) for both in zip(first, second, strict=True))
    order = starts.argsort()
    starts, stops = starts[order], stops[order]
    return bool((starts[1:] < stops[:-1]).any())


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First byte, and the byte after the last, of each run of elements without a gap."""
    run, starts = tensor.element_size(), torch.tensor([tensor.data_ptr()], device="cpu")
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        step = stride * tensor.element_size()
        if size > 1 and step == run:
            run *= size
        elif size > 1:
            steps = torch.arange(size, device="cpu") * step
            starts = (starts[:, None] + steps).reshape(-1)
    return starts, starts + run
