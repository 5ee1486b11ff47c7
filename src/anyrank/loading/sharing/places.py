"""This rank's memory of a source and of the model that is filled, by the blocks of messages."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from anyrank.loading.sharing.flows import Flow
from anyrank.loading.sharing.messages import MESSAGE_BYTES, Block, Message, StridedView, copy_all
from anyrank.loading.sharing.transfers import Strip, Transfer
from anyrank.tensors.box import Box

DIMS = tuple(range(64))  # torch's limit of dims


class LocalMemory:
    """This rank's memory of a source and of the model that is filled.

    Attributes:
        sources: number of a source tensor -> this rank's part of it.
        targets: position in `dst` -> this rank's part to fill.
    """

    def __init__(
        self, sources: Mapping[int, torch.Tensor], targets: Mapping[int, torch.Tensor]
    ) -> None:
        self.sources = sources
        self.targets = targets

    def begin(self, flows: Sequence[Flow]) -> None:
        """Prepare the values that this rank sends in a round."""

    @cached_property
    def devices(self) -> set[torch.device]:
        """The devices of both, except the CPU."""
        tensors = (*self.sources.values(), *self.targets.values())
        return {tensor.device for tensor in tensors if not tensor.is_cpu}

    def source_view(self, flow: Flow, transfer: Transfer, box: Box) -> torch.Tensor:
        """Return the elements of a box in this rank's source, in the order of `dst`."""
        strip = flow.strips[transfer.strip]
        memory = self.sources[strip.source]
        if memory.shape == box.sizes and strip.dims == DIMS[: memory.dim()]:
            return memory  # all of it
        return turned(self.view_of(transfer, strip, box), strip, box.sizes)

    def view_of(self, transfer: Transfer, strip: Strip, box: Box) -> torch.Tensor:
        """Return the elements of a box in this rank's source, in the source's order."""
        moved = strip.to_source(box).relative_to(strip.to_source(transfer.box).offsets)
        return self.sources[strip.source][moved.shifted(transfer.source).slices()]

    def is_computed(self, flow: Flow, transfer: Transfer) -> bool:
        """Return True if `source_view` computes the values; in this class, it never does."""
        return False

    def piece_bytes(self, flow: Flow, transfer: Transfer, most_bytes: int) -> int:
        """Return the size limit of a block. Copies within a rank have none.

        Computed values, and casts and strided copies between two devices, need a temporary of the
        block's size, so they are limited.
        """
        if self.is_computed(flow, transfer):
            return min(MESSAGE_BYTES, most_bytes)
        source = self.sources.get(flow.strips[transfer.strip].source)
        if source is None or transfer.sender != transfer.receiver:
            return most_bytes
        return sys.maxsize if source.device == self._target(flow).device else most_bytes

    @property
    def is_on_one_device(self) -> bool:
        """Whether all tensors are on one device."""
        return len({t.device for t in (*self.sources.values(), *self.targets.values())}) <= 1

    def settle(self) -> None:
        """Wait until the devices have finished their copies."""
        for device in self.devices:
            torch.accelerator.current_stream(device).synchronize()

    def target_view(self, flow: Flow, transfer: Transfer, box: Box) -> torch.Tensor:
        """Return the elements of a box in this rank's `dst`."""
        into = self._target(flow)
        if into.shape == box.sizes:
            return into  # all of it
        return into[box.relative_to(transfer.box.offsets).shifted(transfer.target).slices()]

    def source_of(self, block: Block) -> torch.Tensor:
        """Return the `source_view` of a block; caches its place."""
        memory = self.sources[block.number]
        if block.source is not None:
            return block.source.view(memory)
        view = self.source_view(block.flow, block.transfer, block.box)
        block.source = StridedView.find(view, memory)
        return view

    def target_of(self, block: Block) -> torch.Tensor:
        """Return the `target_view` of a block; caches its place."""
        memory = self._target(block.flow)
        if block.target is not None:
            return block.target.view(memory)
        view = self.target_view(block.flow, block.transfer, block.box)
        block.target = StridedView.find(view, memory)
        return view

    def pack(self, message: Message, memory: torch.Tensor) -> None:
        """Read a message's values into its memory, uint8 on any device, cast to the wire dtype."""
        self.give(message, message.parts(memory))

    def copy(self, message: Message) -> None:
        """Copy a message from this rank to itself."""
        self.give(message, [self.target_of(block) for block in message.blocks])

    def unpack(self, message: Message, memory: torch.Tensor) -> None:
        """Put a received message in place."""
        copy_all([self.target_of(block) for block in message.blocks], message.parts(memory))

    def give(self, message: Message, targets: Sequence[torch.Tensor]) -> None:
        """Copy the sources of a message's blocks to targets; computed ones one by one."""
        together: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for block, target in zip(message.blocks, targets, strict=True):
            view = self.source_of(block)
            if block.source is None:
                copy_all([target], [view])
            else:
                together[0].append(target)
                together[1].append(view)
        copy_all(*together)

    def _target(self, flow: Flow) -> torch.Tensor:
        return self.targets[flow.index] if flow.twin < 0 else self.sources[flow.twin]


def turned(view: torch.Tensor, strip: Strip, sizes: Sequence[int]) -> torch.Tensor:
    """Return a source's part of a strip, in the order of `dst`."""
    if strip.dims == DIMS[: view.dim()]:
        return view
    order = [dim for dim in strip.dims if dim >= 0]
    rest = [dim for dim in range(view.dim()) if dim not in order]  # of size 1 in the box
    return view.permute(order + rest).reshape(tuple(sizes))
