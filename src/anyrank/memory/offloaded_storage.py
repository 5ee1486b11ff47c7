"""What an offload knows of a storage, of a tensor in it, and of a block's tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from anyrank.errors import RecomputeError
from anyrank.memory.copy_streams import CopyStreams, Event
from anyrank.memory.pool import Buffer, HostPool
from anyrank.tensors.sharded_tensor import version_of


class Owner(Protocol):
    """What a group needs of its offload."""

    pool: HostPool

    def buffer(self, nbytes: int, device: torch.device, name: str) -> Buffer | None: ...


class OffloadedStorage:
    """The bytes of one storage, on the device, on the host or on the way.

    Attributes:
        source: the storage, until it is released; for good when the pool was full.
        buffer: where its bytes are on the host.
        loaded: a storage on the device that has the bytes again, as long as somebody uses it;
            `ahead` holds one that was fetched before it was asked for.
    """

    def __init__(
        self,
        source: torch.UntypedStorage,
        version: int,
        lanes: CopyStreams,
        on_load: Callable[[int], None],
    ) -> None:
        self.source: torch.UntypedStorage | None = source
        self.version = version
        self.nbytes = source.nbytes()
        self.device = source.device
        self.lanes = lanes
        self.on_load = on_load
        self.buffer: Buffer | None = None
        self.full = False
        self.out: Event = None
        self.back: Event = None
        self.loaded: weakref.ref[torch.UntypedStorage] | None = None
        self.ahead: torch.UntypedStorage | None = None

    def send(self, owner: Owner, name: str) -> None:
        """Begin the copy to the host, if it has not begun and there is room."""
        if self.buffer is not None or self.source is None or self.full:
            return
        self.buffer = owner.buffer(self.nbytes, self.device, name)
        if self.buffer is None:
            self.full = True
            return
        before = self.buffer.busy
        after = () if before is None else (before,)
        self.out = self.lanes.to_host(self.buffer.data, as_bytes(self.source), after)
        self.buffer.busy = self.out
        # However the graph ends: the buffer goes back, and its next user waits for `busy`.
        weakref.finalize(self, owner.pool.returned.append, self.buffer).atexit = False

    def release(self) -> None:
        """Let the device memory go. What is computed from here on may use it."""
        if self.source is not None and self.buffer is not None:
            self.lanes.wait(self.out)
            self.source = None

    def fetch(self) -> torch.UntypedStorage:
        """Begin the copy back, or take part in one that somebody still uses."""
        storage = self.ahead or (self.loaded() if self.loaded else None)
        if storage is not None:
            return storage
        assert self.buffer is not None
        target = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        after = () if self.out is None else (self.out,)
        self.back = self.lanes.to_device(target, self.buffer.data, after)
        self.buffer.busy = self.back
        self.on_load(self.nbytes)
        storage = target.untyped_storage()
        self.loaded = weakref.ref(storage)
        return storage

    def fetch_ahead(self) -> None:
        if self.source is None and self.ahead is None:
            self.ahead = self.fetch()

    def storage(self) -> torch.UntypedStorage:
        """The bytes on the device, for what is computed from here on."""
        if self.source is not None:
            return self.source
        storage = self.fetch()
        self.ahead = None
        self.lanes.wait(self.back)
        return storage


class Slot:
    """One tensor of a block: as it was, or as a place in a parcel."""

    def __init__(self, tensor: torch.Tensor, parcel: OffloadedStorage | None, name: str) -> None:
        self.parcel = parcel
        self.name = name
        self.version = version_of(tensor)
        self.tensor: torch.Tensor | None = tensor
        self.seen = weakref.ref(tensor)
        local = tensor
        self.wrap: Callable[[torch.Tensor], torch.Tensor] = as_it_is
        if parcel is not None and isinstance(tensor, DTensor):
            local = tensor.to_local()
            self.wrap = wrapper(tensor)
        self.dtype = local.dtype
        self.place: tuple[Any, ...] = (
            (local.storage_offset(), local.shape, local.stride()) if parcel is not None else ()
        )

    def check(self) -> None:
        """Raises RecomputeError: the tensor was changed in place since the block took it."""
        tensor = self.tensor if self.tensor is not None else self.seen()
        if tensor is not None and version_of(tensor) != self.version:
            raise RecomputeError(
                f"{self.name or 'an argument of a recomputed block'}, a "
                f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, was changed in "
                "place after the block had taken it, and backward needs it as it was: use the "
                "operation that returns a new tensor, or clone it"
            )

    def release(self) -> None:
        if self.parcel is not None and not self.parcel.full:
            self.check()
            self.parcel.release()
            self.tensor = None

    def restore(self) -> torch.Tensor:
        self.check()
        if self.tensor is not None:
            return self.tensor
        assert self.parcel is not None
        storage = self.parcel.storage()
        local = torch.empty(0, dtype=self.dtype, device=storage.device)
        return self.wrap(local.set_(storage, *self.place))


class Group:
    """The tensors of one block. The block's inputs hold it, and it dies with the graph."""

    def __init__(self, slots: list[Slot], owner: Owner, before: weakref.ref[Group] | None) -> None:
        self.slots = slots
        self.owner = owner
        self.before = before

    def send(self) -> None:
        for slot in self.slots:
            if slot.parcel is not None:
                slot.check()
                slot.parcel.send(self.owner, slot.name)

    def release(self) -> None:
        for slot in self.slots:
            slot.release()

    def restore(self) -> list[torch.Tensor]:
        """The tensors on the device; the block that ran before is fetched meanwhile."""
        with torch.no_grad():
            tensors = [slot.restore() for slot in self.slots]
            before = self.before() if self.before else None
            for slot in before.slots if before else ():
                if slot.parcel is not None:
                    slot.parcel.fetch_ahead()
        return tensors


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as uint8[nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def wrapper(like: DTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a DTensor of a local part."""
    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()

    def wrap(local: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    return wrap
