"""The memory into which a background save copies a rank's share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from anyrank.files.pages import use_large_pages
from anyrank.files.reader import copy_into
from anyrank.models.digests import check_has_memory
from anyrank.runs.saving.rank_file import Item
from anyrank.sources.torch_zip import ALIGN
from anyrank.world.pinned import page_locked
from anyrank.world.ranks import Ranks


class Staging:
    """Memory for a copy of a rank's share, page-locked for shares on an accelerator; reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._streams: dict[torch.device, torch.Stream] = {}

    def copy(self, items: Sequence[Item], ranks: Ranks) -> list[Item]:
        """Copy every item; return the copies in the same order. The next call overwrites them.

        Raises:
            CheckpointError: a tensor's memory was freed.
            AnyrankError: there is no memory to page-lock.
        """
        devices = {item.source.device for item in items if not item.source.is_cpu}
        self._reserve(sum(_padded_bytes(item) for item in items), devices, ranks)
        for device in devices:
            stream = self._streams.setdefault(device, torch.Stream(device))
            with torch.accelerator.device_index(device.index):  # makes no context on others
                stream.wait_event(torch.accelerator.current_stream(device).record_event())
        copies: list[Item] = []
        position = 0
        for item in items:
            copy_bytes = self._memory[position : position + item.nbytes]
            copy = copy_bytes.view(item.dtype).view(item.box.sizes)
            check_has_memory(item.name, item.source)
            with self._streams.get(item.source.device, contextlib.nullcontext()):
                copy_into(copy, item.source, non_blocking=True)
            copies.append(replace(item, source=copy))
            position += _padded_bytes(item)
        for device in devices:
            self._streams[device].synchronize()
        return copies

    def _reserve(self, nbytes: int, devices: set[torch.device], ranks: Ranks) -> None:
        """Allocate memory if there is too little, after the old memory is freed."""
        if self._memory.numel() >= nbytes:
            return
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if devices:
            self._memory = page_locked(nbytes, min(devices, key=str))
        else:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            use_large_pages([self._memory], ranks.ranks_on_node)


def _padded_bytes(item: Item) -> int:
    """Return the bytes that a copy of an item takes, with its alignment."""
    return -(-item.nbytes // ALIGN) * ALIGN
