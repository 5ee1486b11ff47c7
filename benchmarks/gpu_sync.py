"""The channel of a sync on devices, also on a shared one, beside one all-to-all of its bytes.

One function chooses the channel, and knows of devices of their own alone. A job of
`gpu.py` puts another in its place, so that rounds go over real NCCL where ranks share a device, and
over the simulated one's library.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from bench import MIB, Case, Run, Runs
from launch import device, timed
from models import local_part
from sync import Ends, ends_of

import anyrank
from anyrank.live import device_channel
from anyrank.live.device_group import open_nccl

TIMEOUT = timedelta(seconds=60)


def open_simccl(store: Any, index: int, size: int) -> Any:
    """A group of the simulated device's library."""
    from tests.device.sim import _C

    return _C.make_backend(dist.ProcessGroupGloo(store, index, size, TIMEOUT), index, size)


LIBRARIES: dict[str, tuple[str, Any]] = {
    "cuda": ("nccl", open_nccl),
    "sim": ("simccl", open_simccl),
}


def take_channel(is_taken: bool) -> None:
    """From now on all syncs of this rank go from device to device, or none does."""
    name, open_raw = LIBRARIES[device().type]
    kind = device_channel.ChannelKind(name, open_raw, from_bytes=0) if is_taken else None
    setattr(device_channel, "choose_channel", lambda devices: kind)  # noqa: B010 - pyright knows its type


def channel_ways(ends: Ends, mib: int, repeats: int) -> tuple[Runs, Run]:
    """Kept syncs of one rank, through the channel and gloo, an all-to-all of as many bytes, and the
    channel's report. Values are compared with those that came over gloo.
    """
    dst, src = ends_of(mib, ends)
    calls: dict[str, anyrank.Sync] = {}
    reports: dict[str, anyrank.SyncReport] = {}
    for way, is_taken in (("channel", True), ("channel, verify=True", True), ("gloo", False)):
        take_channel(is_taken)  # which a kept plan remembers
        calls[way] = anyrank.Sync(dst, src, verify="verify" in way)
        reports[way] = calls[way]()
    report = reports["channel"]
    rank, size = dist.get_rank(), dist.get_world_size()
    length = max(report.bytes_sent) // max(1, size - 1)
    splits = [length * (other != rank) for other in range(size)]
    source, target = (
        torch.zeros(sum(splits), dtype=torch.uint8, device=device()) for _ in range(2)
    )
    ways: dict[str, Callable[[], Any]] = {
        "all_to_all_single": lambda: dist.all_to_all_single(target, source, splits, splits),
        **calls,
    }
    mine = {n: local_part(p) for n, p in (dst.named_parameters() if dst is not None else ())}
    wanted = {name: tensor.clone() for name, tensor in mine.items()}

    def once(way: str, number: int) -> Run:
        if way in calls:
            for tensor in mine.values():
                tensor.detach().fill_(7)
        table = timed(ways[way])
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in mine.items()), way
        return {"seconds": table["seconds"], "peak_mib": round(table["peak_bytes"] / MIB, 1)}

    runs = Case("channel", ways, once).run(repeats, warm=1, is_told=False)
    facts = {
        "by": report.channel,
        "sent_mib": round(max(report.bytes_sent) / MIB, 1),
        "buffers_mib": round(max(report.channel_bytes) / MIB, 1),
        "group_mib": round(max(report.group_bytes) / MIB, 1),
    }
    return runs, facts
