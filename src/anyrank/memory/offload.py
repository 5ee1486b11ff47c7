"""`anyrank.Offload`: inputs of recomputed blocks wait for backward in host memory."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from anyrank.errors import RecomputeError
from anyrank.memory.copy_streams import CopyStreams, copy_streams_of
from anyrank.memory.offloaded_storage import Group, OffloadedStorage, Slot
from anyrank.memory.pool import Buffer, HostPool
from anyrank.memory.uncompiled import uncompiled
from anyrank.tensors.sharded_tensor import version_of

MIB = 1 << 20


@dataclass(frozen=True)
class OffloadStats:
    """What an `Offload` has done, in bytes and times since it was made.

    Attributes:
        pool_bytes: the bound.
        held_bytes: host memory held now, used or idle; `used_bytes`: of that, used; `peak_bytes`:
            most that was used.
        copied_bytes: to the host; `loaded_bytes`: back.
        shared: tensors that needed no copy, as another block had sent the same storage.
        kept: tensors that stayed on the device as the pool was full.
        allocated: buffers made; `reused`: times that one was used again.
    """

    pool_bytes: int
    held_bytes: int
    used_bytes: int
    peak_bytes: int
    copied_bytes: int
    loaded_bytes: int
    shared: int
    kept: int
    allocated: int
    reused: int


class Offload:
    """Moves the arguments of recomputed blocks to host memory until backward needs them.

    Give one object to all blocks of a model: `recompute_(model, "layers.*", offload=offload)`. Each
    rank by itself. A block's tensors are copied while later blocks compute, on a stream of their
    own, from pinned buffers that are used again step after step; in backward the block before the
    one that runs is fetched ahead. All state of a step hangs on its graph. Nothing happens without
    gradients.

    What stays: tensors under `min_bytes`, parameters and buffers, expanded, sparse and meta
    tensors, views of less than half of their storage, tensor subclasses other than DTensor (of
    which the local part moves). Several tensors of one storage are one copy.

    Args:
        pool_bytes: most host memory, in bytes, of this rank.
        keep_last: blocks at the end of the forward pass that stay on the device, as backward begins
            with them.
        min_bytes: smaller tensors stay.
        on_full: when the pool is full, "keep" the tensor on the device, "wait" until a backward
            pass in another thread has given memory back, or "raise" RecomputeError.
        force: move CPU tensors too: real copies, for tests of the whole mechanism without a device.

    Raises:
        ValueError: a size or choice that makes no sense; any use after `close`.
    """

    def __init__(
        self,
        pool_bytes: int,
        *,
        keep_last: int = 1,
        min_bytes: int = MIB,
        on_full: Literal["keep", "wait", "raise"] = "keep",
        force: bool = False,
    ) -> None:
        if pool_bytes < 1:
            raise ValueError(
                f"pool_bytes={pool_bytes}: nothing could be moved; leave offload=None instead"
            )
        if keep_last < 0 or min_bytes < 0:
            raise ValueError(f"keep_last={keep_last}, min_bytes={min_bytes}: not below 0")
        if on_full not in ("keep", "wait", "raise"):
            raise ValueError(f'on_full={on_full!r}: "keep", "wait" or "raise"')
        self.pool = HostPool(pool_bytes)
        self.keep_last = keep_last
        self.min_bytes = min_bytes
        self.on_full = on_full
        self.force = force
        self.closed = False
        self.lanes: dict[torch.device, CopyStreams] = {}
        self.parcels: dict[
            int, weakref.ref[OffloadedStorage]
        ] = {}  # by id of a storage that is alive
        self.waiting: deque[weakref.ref[Group]] = deque()  # packed, not yet sent
        self.sent: list[weakref.ref[Group]] = []
        self.last: weakref.ref[Group] | None = None
        self.copied_bytes = self.loaded_bytes = self.shared = self.kept = 0
        self.lock = threading.RLock()

    def stats(self) -> OffloadStats:
        """Figures up to now."""
        self.pool.collect()
        return OffloadStats(
            pool_bytes=self.pool.limit_bytes,
            held_bytes=self.pool.held_bytes,
            used_bytes=self.pool.used_bytes,
            peak_bytes=self.pool.peak_bytes,
            copied_bytes=self.copied_bytes,
            loaded_bytes=self.loaded_bytes,
            shared=self.shared,
            kept=self.kept,
            allocated=self.pool.allocated,
            reused=self.pool.reused,
        )

    def close(self) -> None:
        """Free the host memory. Again does nothing.

        Raises:
            ValueError: a graph still needs some of it.
        """
        self.pool.collect()
        if self.pool.used_bytes:
            raise ValueError(
                f"{self.pool.used_bytes} bytes of this offload wait for a backward pass: run it, "
                "or drop the loss, before close()"
            )
        self.pool.close()
        self.closed = True

    # -- what recompute calls ---------------------------------------------------------------------

    @uncompiled
    def pack(
        self,
        tensors: Sequence[torch.Tensor],
        names: Callable[[int], str],
        label: str,
        resident: Collection[int],
    ) -> Callable[[], list[torch.Tensor]]:
        """Take a block's tensors before it runs; returns what brings them back.

        `resident` has ids of storages that stay anyway: buffers of the model.
        """
        if self.closed:
            raise ValueError(f"{label}: its offload was closed; make a new one")
        with self.lock:
            slots: list[Slot] = []
            for n, tensor in enumerate(tensors):
                name = f"{names(n)} of {label}" if self.moves(tensor, resident) else ""
                slots.append(Slot(tensor, self.parcel(tensor) if name else None, name))
            group = Group(slots, self, self.last)
            self.last = weakref.ref(group)
            self.waiting.append(self.last)
            while len(self.waiting) > self.keep_last:
                leaving = self.waiting.popleft()
                alive = leaving()
                if alive is not None:
                    alive.send()
                    self.sent.append(leaving)
        return group.restore

    @uncompiled
    def settle(self) -> None:
        """Behind a block: what was sent while it ran leaves the device."""
        with self.lock:
            sent, self.sent = self.sent, []
            for ref in sent:
                group = ref()
                if group is not None:
                    group.release()

    # -- what groups and parcels call -------------------------------------------------------------

    def moves(self, tensor: torch.Tensor, resident: Collection[int]) -> bool:
        """Whether a tensor is one to move."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return False
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return False
        if tensor.device.type == "meta" or (tensor.device.type == "cpu" and not self.force):
            return False
        if tensor.is_conj() or tensor.is_neg() or 0 in tensor.stride():
            return False
        nbytes = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        if id(storage) in resident:
            return False
        return nbytes >= max(1, self.min_bytes) and 2 * nbytes >= storage.nbytes()

    def parcel(self, tensor: torch.Tensor) -> OffloadedStorage:
        """The parcel of a tensor's storage: one for each that is alive."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        known = self.parcels.get(id(storage))
        parcel = known() if known else None
        if parcel is not None and parcel.version == version_of(tensor):
            self.shared += 1
            return parcel
        if storage.device not in self.lanes:
            self.lanes[storage.device] = copy_streams_of(storage.device)
        parcel = OffloadedStorage(
            storage, version_of(tensor), self.lanes[storage.device], self.on_load
        )
        if known is None:  # an id is used again once the storage is gone
            weakref.finalize(storage, self.parcels.pop, id(storage), None).atexit = False
        self.parcels[id(storage)] = weakref.ref(parcel)
        return parcel

    def on_load(self, nbytes: int) -> None:
        self.loaded_bytes += nbytes

    def buffer(self, nbytes: int, device: torch.device, name: str) -> Buffer | None:
        """Host memory, or None to keep the tensor where it is."""
        buffer = self.pool.take(nbytes, device)
        if buffer is None and self.on_full == "wait":
            buffer = self.pool.wait_for(nbytes, device)
        if buffer is None and self.on_full == "raise":
            raise RecomputeError(
                f"no room for {name}, {nbytes} bytes: {self.pool.used_bytes} of the offload pool's "
                f'{self.pool.limit_bytes} bytes are used; raise pool_bytes, or use on_full="keep"'
            )
        if buffer is None:
            self.kept += 1
        else:
            self.copied_bytes += nbytes
        return buffer
