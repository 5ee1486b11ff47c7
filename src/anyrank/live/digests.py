"""Digests of elements that are equal at both ends of a sync, on a CPU and on a device.

On a CPU they are hashes. Where a device takes part they are sums of integers, which come to the
same bits in whatever order a device adds: nothing but sixteen bytes a block leaves it, and the host
waits once. The two have nothing in common, so all ranks of a call take one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from anyrank.files.content_hash import BLOCK_BYTES, hash_of
from anyrank.loading.sharing.messages import ALIGN, aligned, copy_all

DIGEST_BYTES = 16
WORD = 8  # bytes of an int64
FIRST = ALIGN // WORD  # where the first block begins: behind zeros, whose sum is nothing
ROOM_BYTES = 8 << 20  # of a device's elements that are added at once
SEED = 0x616E7972616E6B

Parts = Iterable[torch.Tensor]
DigestAll = Callable[[Iterable[Parts]], list[bytes]]


def choose_digest(accelerators: Sequence[str]) -> DigestAll:
    """What all ranks of a call digest by.

    Args:
        accelerators: of all ranks, as `accelerator_of` names them.

    Returns:
        The function. It takes elements in parts of at most BLOCK_BYTES, cut alike at both ends, and
        returns the DIGEST_BYTES of each.
    """
    has_device = any(name not in ("", "meta") for name in accelerators)
    return sums_of_all if has_device else hashes_of_all


def hashes_of_all(items: Iterable[Parts]) -> list[bytes]:
    """By the host: three bytes in a cycle or more, where a sum takes as many cycles for one."""
    return [bytes.fromhex(hash_of(parts)) for parts in items]


def parts_of(tensor: torch.Tensor) -> Parts:
    """A whole tensor's elements, row by row."""
    return tensor.detach().reshape(-1).split(BLOCK_BYTES // tensor.itemsize)


def sums_of_all(items: Iterable[Parts]) -> list[bytes]:
    """By the devices on which the elements are, each on its current stream."""
    sums: dict[torch.device, BlockSums] = {}
    where: list[list[tuple[torch.device, int]]] = []  # the blocks of each item
    for parts in items:
        blocks = list[tuple[torch.device, int]]()
        for part in parts:
            known = sums.get(part.device)
            if known is None:
                known = sums[part.device] = BlockSums(part.device)
            blocks.append((part.device, known.add(part)))
        where.append(blocks)
    totals = {device: of_device.finish() for device, of_device in sums.items()}
    return [
        bytes.fromhex(hash_of(totals[device][number] for device, number in blocks))
        for blocks in where
    ]


class BlockSums:
    """Two sums modulo 2^64 for each block of a device's elements, which are gathered in words.

    The first is of each word times a key, which is odd, so that a change of one word changes it.
    The second is of the upper half of each word times another: the first would lose two changed
    signs there, as twice the highest bit is nothing. Keys depend on the place in the block alone.

    Args:
        device: of all elements.
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator("cpu").manual_seed(SEED)
        shape, ends = (2, BLOCK_BYTES // WORD), (-(1 << 63), (1 << 63) - 1)
        keys = torch.randint(*ends, shape, generator=generator, dtype=torch.int64, device="cpu")
        self.keys = (keys | 1).to(device)
        room = FIRST + (BLOCK_BYTES if device.type == "cpu" else ROOM_BYTES) // WORD
        self.words = torch.empty(room, dtype=torch.int64, device=device)
        self.products = torch.empty(2, room, dtype=torch.int64, device=device)
        self.parts: list[torch.Tensor] = []
        self.ends = [FIRST]
        self.count = 0
        self.sums: list[torch.Tensor] = []

    def add(self, part: torch.Tensor) -> int:
        """Take a block into account, and return its number."""
        words = aligned(part.numel() * part.itemsize) // WORD
        if self.ends[-1] + words > len(self.words):
            self._sum()
        self.parts.append(part)
        self.ends.append(self.ends[-1] + words)
        self.count += 1
        return self.count - 1

    def finish(self) -> torch.Tensor:
        """The sums of all blocks, of one at least: int64[blocks, 2] on the CPU."""
        self._sum()
        return torch.cat(self.sums).cpu()

    def _sum(self) -> None:
        """Add up what is gathered, in a few calls for all blocks, and make room."""
        if not self.parts:
            return
        stop = self.ends[-1]
        words, products = self.words[:stop], self.products[:, :stop]
        words.zero_()  # also what is left of a block's last word
        bounds = [*zip(self.ends, self.ends[1:], strict=False)]
        targets = [
            words[low:high].view(torch.uint8)[: part.numel() * part.itemsize].view(part.dtype)
            for part, (low, high) in zip(self.parts, bounds, strict=True)
        ]
        copy_all([t.view(p.shape) for t, p in zip(targets, self.parts, strict=True)], self.parts)
        for row, keys in zip(products, self.keys, strict=True):
            copy_all(
                [row[low:high] for low, high in bounds],
                [keys[: high - low] for low, high in bounds],
            )
        products[0].mul_(words)
        products[1].mul_(words >> 32)
        products.cumsum_(1)
        totals = torch.stack([products[:, end - 1] for end in self.ends])
        self.sums.append(totals.diff(dim=0))
        self.parts.clear()
        self.ends = [FIRST]
