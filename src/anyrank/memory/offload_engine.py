"""Move the arguments of blocks to the host and back: per block, per tensor, per storage."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from anyrank.errors import RecomputeError
from anyrank.memory.host_buffers import Buffer, CopyEngine, Event, HostPool, Stream
from anyrank.tensors.sharded_tensor import version_of
from anyrank.tensors.torch_classes import is_dtensor


class OffloadEngine:
    """The state of an `Offload`: its host memory, and the current blocks.

    Args:
        pool_bytes, keep_last, min_bytes: as for `Offload`.
    """

    def __init__(self, pool_bytes: int, keep_last: int, min_bytes: int) -> None:
        self.pool = HostPool(pool_bytes)
        self.keep_last = keep_last
        self.min_bytes = min_bytes
        self.moves_cpu = False
        self.closed = False
        self.copy_engines: dict[torch.device, CopyEngine] = {}
        # By id of a live storage.
        self.storages: dict[int, weakref.ref[OffloadedStorage]] = {}
        self.waiting: deque[weakref.ref[_BlockTensors]] = deque()  # packed, not yet sent
        self.sent: list[weakref.ref[_BlockTensors]] = []
        self.last: weakref.ref[_BlockTensors] | None = None
        self.copied_bytes = self.kept = 0
        self.lock = threading.RLock()

    def close(self) -> None:
        """Free the host memory; raises ValueError if a graph still needs some of it."""
        self.pool.collect()
        if self.pool.used_bytes:
            raise ValueError(
                f"a graph still needs {self.pool.used_bytes} bytes of this offload. Run backward, "
                "or delete the loss, before close()"
            )
        self.pool.close()
        self.closed = True

    def pack(
        self,
        tensors: Sequence[torch.Tensor],
        names: Callable[[int], str],
        label: str,
        resident: Collection[int],
    ) -> Callable[[], list[torch.Tensor]]:
        """Start to move a block's tensors before it runs; return the function that restores them.

        `resident` has the ids of storages that stay on the device: buffers of the model.
        """
        if self.closed:
            raise ValueError(f"{label}: its offload is closed. Create a new one")
        with self.lock:
            packed: list[_OffloadedTensor] = []
            for n, tensor in enumerate(tensors):
                moves = self.moves(tensor, resident)
                name = f"{names(n)} of {label}" if moves else ""
                packed.append(
                    _OffloadedTensor(tensor, self.storage(tensor) if moves else None, name)
                )
            block = _BlockTensors(packed, self.last)
            self.last = weakref.ref(block)
            self.waiting.append(self.last)
            while len(self.waiting) > self.keep_last:
                leaving = self.waiting.popleft()
                alive = leaving()
                if alive is not None:
                    alive.send()
                    self.sent.append(leaving)
        return block.restore

    def release_sent(self) -> None:
        """Free, after a block, the device memory of tensors that were sent while it ran."""
        with self.lock:
            sent, self.sent = self.sent, []
            for ref in sent:
                block = ref()
                if block is not None:
                    block.release()

    def moves(self, tensor: torch.Tensor, resident: Collection[int]) -> bool:
        """Return True if this offload moves a tensor."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return False
        if is_dtensor(tensor):
            tensor = tensor.to_local()
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            return False
        if tensor.device.type == "meta" or (tensor.device.type == "cpu" and not self.moves_cpu):
            return False
        if tensor.is_conj() or tensor.is_neg() or 0 in tensor.stride():
            return False
        nbytes = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        if id(storage) in resident:
            return False
        return nbytes >= max(1, self.min_bytes) and 2 * nbytes >= storage.nbytes()

    def storage(self, tensor: torch.Tensor) -> OffloadedStorage:
        """Return the entry of a tensor's storage, the same one while the storage is alive."""
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        storage = local.untyped_storage()
        known = self.storages.get(id(storage))
        entry = known() if known else None
        if entry is not None and entry.version == version_of(tensor):
            return entry
        if storage.device not in self.copy_engines:
            self.copy_engines[storage.device] = CopyEngine(storage.device)
        entry = OffloadedStorage(storage, version_of(tensor), self)
        if known is None:  # the id of a dead storage may be reused
            weakref.finalize(storage, self.storages.pop, id(storage), None).atexit = False
        self.storages[id(storage)] = weakref.ref(entry)
        return entry

    def buffer(self, nbytes: int, device: torch.device) -> Buffer | None:
        """Return host memory, or None to keep the tensor on the device."""
        buffer = self.pool.take(nbytes, device)
        if buffer is None:
            self.kept += 1
        else:
            self.copied_bytes += nbytes
        return buffer


class OffloadedStorage:
    """The bytes of one storage, on the device, on the host or in a copy between the two.

    Attributes:
        source: the storage, until it is released; never released if the pool was full.
        loaded: a storage on the device with the bytes copied back, while anything uses it.
        stream: the stream on which `loaded` was allocated, and on which its memory is reused.
        ahead: keeps alive the bytes that were copied back ahead of their use, with the event of the
            copy and its stream: at most one.
    """

    def __init__(
        self,
        source: torch.UntypedStorage,
        version: int,
        engine: OffloadEngine,
    ) -> None:
        self.source: torch.UntypedStorage | None = source
        self.version = version
        self.nbytes = source.nbytes()
        self.device = source.device
        self.engine = engine
        self.copies = engine.copy_engines[source.device]
        self.buffer: Buffer | None = None
        self.is_kept = False
        self.out: Event = None
        self.back: Event = None
        self.loaded: weakref.ref[torch.UntypedStorage] | None = None
        self.stream: Stream = None
        self.ahead: list[tuple[torch.UntypedStorage, Event, Stream]] = []
        # Backward may end without using the copy: its memory must then wait for the copy.
        weakref.finalize(self, _drop_unused, self.copies, self.ahead).atexit = False

    def send(self) -> None:
        """Start the copy to the host, unless it has started or the pool is full."""
        if self.buffer is not None or self.source is None or self.is_kept:
            return
        self.buffer = self.engine.buffer(self.nbytes, self.device)
        if self.buffer is None:
            self.is_kept = True
            return
        before = self.buffer.busy
        after = () if before is None else (before,)
        self.out = self.copies.to_host(self.buffer.data, _as_bytes(self.source), after)
        self.buffer.busy = self.out
        # When the graph ends, the buffer returns to the pool; its next user waits for `busy`.
        weakref.finalize(self, self.engine.pool.returned.append, self.buffer).atexit = False

    def release(self) -> None:
        """Free the device memory after the copy to the host."""
        if self.source is not None and self.buffer is not None:
            self.copies.wait(self.out)
            self.source = None

    def fetch(self) -> torch.UntypedStorage:
        """Start the copy back, or share one that is still in use."""
        storage = self.loaded() if self.loaded else None
        if storage is not None:
            return storage
        assert self.buffer is not None
        self.stream = self.copies.stream()
        target = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        after = () if self.out is None else (self.out,)
        self.back = self.copies.to_device(target, self.buffer.data, after)
        self.buffer.busy = self.back
        storage = target.untyped_storage()
        self.loaded = weakref.ref(storage)
        return storage

    def prefetch(self) -> None:
        if self.source is None and not self.ahead:
            storage = self.fetch()
            self.ahead.append((storage, self.back, self.stream))

    def on_device(self) -> torch.UntypedStorage:
        """Return the bytes on the device; the computing stream waits for their copy."""
        if self.source is not None:
            return self.source
        storage = self.fetch()
        self.ahead.clear()
        self.copies.wait(self.back)
        if self.copies.stream() != self.stream:
            # The previous block used a different stream. Its use must end before the stream that
            # owns the memory hands it out again.
            self.copies.wait(self.back, self.stream)
            _as_bytes(storage).record_stream(torch.accelerator.current_stream(self.device))
        return storage


class _OffloadedTensor:
    """One tensor of a block: the tensor itself, or its view of an offloaded storage."""

    def __init__(self, tensor: torch.Tensor, storage: OffloadedStorage | None, name: str) -> None:
        self.storage = storage
        self.name = name
        self.version = version_of(tensor)
        self.tensor: torch.Tensor | None = tensor
        self.alive = weakref.ref(tensor)
        local = tensor
        self.wrap: Callable[[torch.Tensor], torch.Tensor] | None = None
        if storage is not None and is_dtensor(tensor):
            local = tensor.to_local()
            self.wrap = _dtensor_wrapper(tensor)
        self.dtype = local.dtype
        self.view: tuple[Any, ...] = (
            (local.storage_offset(), local.shape, local.stride()) if storage is not None else ()
        )

    def check(self) -> None:
        """Raise RecomputeError if the tensor was changed in place since the block was called."""
        tensor = self.tensor if self.tensor is not None else self.alive()
        if tensor is not None and version_of(tensor) != self.version:
            raise RecomputeError(
                f"{self.name or 'an argument of a recomputed block'}, a "
                f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, was changed in "
                "place after the block was called, but backward needs its former value. Use the "
                "out-of-place operation, or clone it"
            )

    def release(self) -> None:
        if self.storage is not None and not self.storage.is_kept:
            self.check()
            self.storage.release()
            self.tensor = None

    def restore(self) -> torch.Tensor:
        self.check()
        if self.tensor is not None:
            return self.tensor
        assert self.storage is not None
        loaded = self.storage.on_device()
        local = torch.empty(0, dtype=self.dtype, device=loaded.device)
        local.set_(loaded, *self.view)
        return local if self.wrap is None else self.wrap(local)


class _BlockTensors:
    """The tensors of one block. The block's inputs own it, and it dies with the graph."""

    def __init__(
        self,
        tensors: list[_OffloadedTensor],
        preceding: weakref.ref[_BlockTensors] | None,
    ) -> None:
        self.tensors = tensors
        self.preceding = preceding

    def send(self) -> None:
        for tensor in self.tensors:
            if tensor.storage is not None:
                tensor.check()
                tensor.storage.send()

    def release(self) -> None:
        for tensor in self.tensors:
            tensor.release()

    def restore(self) -> list[torch.Tensor]:
        """Return the tensors on the device; start to copy back those of the preceding block."""
        with torch.no_grad():
            tensors = [tensor.restore() for tensor in self.tensors]
            preceding = self.preceding() if self.preceding else None
            for tensor in preceding.tensors if preceding else ():
                if tensor.storage is not None:
                    tensor.storage.prefetch()
        return tensors


def _drop_unused(
    copies: CopyEngine, ahead: list[tuple[torch.UntypedStorage, Event, Stream]]
) -> None:
    """Drop bytes that were copied back and never used; their memory is reused after the copy."""
    for _, event, stream in ahead:
        copies.wait(event, stream)
    ahead.clear()


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as uint8[nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _dtensor_wrapper(like: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that wraps a local part into a DTensor."""
    kind = type(like)
    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()

    def wrap(local: torch.Tensor) -> torch.Tensor:
        return kind.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return wrap
