"""Messages between two ranks: their blocks, and the place of each block at both ends.

Every rank computes its own messages by the same rule, in one order. They are made once for a plan
and kept with it, and hold no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from anyrank.files.reader import copy_into
from anyrank.loading.sharing.flows import Flow
from anyrank.loading.sharing.transfers import Transfer
from anyrank.tensors.box import Box, row_major

MESSAGE_BYTES = 1 << 20  # limit over gloo; the same on every rank
WHAT = "passing on the weights"
ALIGN = 16  # of messages in memory, and of blocks in a message


class StridedView(NamedTuple):
    """The place of a block in a tensor's memory: sizes, strides, and offset."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_all: bool

    @staticmethod
    def find(view: torch.Tensor, memory: torch.Tensor) -> StridedView | None:
        """Return the place of a view in some memory; None if the view has its own memory."""
        if view.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            return None
        offset = int(view.storage_offset() - memory.storage_offset())
        is_all = offset == 0 and (view.shape, view.stride()) == (memory.shape, memory.stride())
        return StridedView(tuple(view.shape), view.stride(), offset, is_all)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the block in memory, with the strides of the view that was found."""
        if self.is_all:
            return memory
        return memory.as_strided(self.sizes, self.strides, memory.storage_offset() + self.offset)


@dataclass(slots=True)
class Block:
    """A box of one transfer, and its place in its message.

    Attributes:
        offset: offset in the message, in bytes.
        nbytes: size in the message.
        source, target: its places at both ends, once they are known.
        strides: strides of its elements in the message.
    """

    flow: Flow
    transfer: Transfer
    box: Box
    offset: int
    nbytes: int
    source: StridedView | None = None
    target: StridedView | None = None
    strides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.strides = row_major(self.box.sizes)

    @property
    def number(self) -> int:
        """The number of the source tensor."""
        return self.flow.strips[self.transfer.strip].source


@dataclass(slots=True)
class Message:
    """Consecutive blocks between two ranks; or one block that a rank copies for itself.

    Attributes:
        sender, receiver: global ranks.
        blocks: the blocks, in order.
        nbytes: size of all blocks, with the gaps that align them.
        payload: size of all blocks, without gaps.
        target_bytes: size of all blocks in `dst`.
    """

    sender: int
    receiver: int
    blocks: list[Block]
    nbytes: int = 0
    payload: int = 0
    target_bytes: int = 0

    def parts(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the blocks in the message's memory (uint8[nbytes], aligned)."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        parts: list[torch.Tensor] = []
        for block in self.blocks:
            dtype = block.flow.wire_dtype
            whole = typed.get(dtype)
            if whole is None:
                usable = memory.numel() // dtype.itemsize * dtype.itemsize
                whole = typed[dtype] = memory[:usable].view(dtype)
            first = whole.storage_offset() + block.offset // dtype.itemsize
            parts.append(whole.as_strided(block.box.sizes, block.strides, first))
        return parts


def messages_of(
    flows: Iterable[Flow], most_bytes: int, piece_bytes: Callable[[Flow, Transfer, int], int]
) -> list[Message]:
    """Return a rank's messages in order, each of limited size; both ends compute the same.

    Args:
        flows: flows with this rank's transfers.
        most_bytes: limit of a message between two ranks.
        piece_bytes: function that returns the limit of a transfer's blocks from the message's
            limit.
    """
    messages: list[Message] = []
    opened: dict[tuple[int, int], Message] = {}
    for flow in flows:
        itemsize = flow.wire_dtype.itemsize
        for transfer in flow.transfers:
            pair = (transfer.sender, transfer.receiver)
            for box in transfer.box.cut(piece_bytes(flow, transfer, most_bytes) // itemsize):
                nbytes = box.numel * itemsize
                message = opened.get(pair)
                offset = 0 if message is None else aligned(message.nbytes)
                if message is None or offset + nbytes > most_bytes:
                    message, offset = Message(*pair, []), 0
                    messages.append(message)
                    opened[pair] = message
                message.blocks.append(Block(flow, transfer, box, offset, nbytes))
                message.nbytes = offset + nbytes
                message.payload += nbytes
                message.target_bytes += box.numel * flow.target_dtype.itemsize
    return messages


def aligned(position: int) -> int:
    """Return the next aligned position."""
    return -(-position // ALIGN) * ALIGN


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, with casts; one call for each pair of dtypes.

    Between two devices each copy is one call, because the cast then runs on the target's device.
    """
    alike: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.device != source.device:
            copy_into(target, source)
            continue
        if target.dtype == source.dtype and target.dtype.itemsize == 1:
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        key = (target.dtype, source.dtype)
        known = alike.get(key)
        if known is None:
            known = alike[key] = ([], [])
        known[0].append(target)
        known[1].append(source)
    copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    for their_targets, their_sources in alike.values():
        if len(their_targets) == 1:
            their_targets[0].copy_(their_sources[0])
        else:
            copy(their_targets, their_sources)
