"""A batch, and its way from a worker: small tensors travel as bytes in the message.

A DataLoader passes each tensor by a file descriptor, for which the rank must ask a thread of the
worker. That takes longer than copying a small tensor, because the worker is busy reading meanwhile,
and a rank may run out of descriptors.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

SMALL = 128 * 1024  # bytes: three such tensors take half the time, three of 1 MiB take longer


class FetchedBatch(NamedTuple):
    """A request and its batch; it is a tuple, which a DataLoader with pin_memory pins.

    Attributes:
        request: the request that the batch answers.
        batch: the result of collate_fn.
        has_own_memory: whether no tensor of the batch shares memory with another process.
    """

    request: Any
    batch: Any
    has_own_memory: bool = False

    def __reduce__(self) -> Any:
        return _from_message, (_as_message(self),)


def _as_message(fetched: FetchedBatch) -> bytes:
    """Return a batch, for `_from_message` in the rank. Large tensors go by descriptor."""
    message = io.BytesIO()
    try:
        # As a plain tuple, because this function may not pickle it again.
        _Pickler(message, fetched.has_own_memory).dump((*fetched,))
    except Exception as error:
        # A queue prints exceptions raised here and sends nothing, so the rank would wait forever.
        why = (
            f"the batch of samples {list(fetched.request.ids)} cannot be pickled by its worker: "
            f"{type(error).__name__}: {error}. Return picklable objects from the dataset and "
            "collate_fn, or set num_workers=0."
        )
        return pickle.dumps((None, _Unsent(why)))
    return message.getvalue()


def _from_message(message: bytes) -> FetchedBatch:
    """Unpickle a message of `_as_message`, once, for `as_sent`."""
    return FetchedBatch(*pickle.loads(message))  # noqa: S301 - of this process's own worker


def as_sent(fetched: FetchedBatch) -> FetchedBatch:
    """Return a batch of `_from_message`.

    Raises:
        TypeError: the worker could not pickle it. It is raised here because unpickling may run in a
            thread of the DataLoader, which would end silently.
    """
    if isinstance(fetched.batch, _Unsent):
        raise TypeError(fetched.batch.why)
    return fetched


@dataclass(frozen=True)
class _Unsent:
    """A stand-in for a batch that its worker could not pickle."""

    why: str


class _Pickler(ForkingPickler):
    def __init__(self, message: io.BytesIO, has_own_memory: bool) -> None:
        super().__init__(message, pickle.HIGHEST_PROTOCOL)
        self._has_own_memory = has_own_memory
        self._memories: dict[tuple[int, int], _Memory] = {}  # by address and size

    def reducer_override(self, value: Any) -> Any:
        """Choose how an object other than a plain value is pickled."""
        if type(value) is not torch.Tensor:
            return NotImplemented
        if value.is_conj() or value.is_neg():  # torch would pass different numbers
            return _unchanged, (value.resolve_conj().resolve_neg(),)
        if not _is_small(value) or (value.is_shared() and not self._has_own_memory):
            return NotImplemented
        storage = value.untyped_storage()
        memory, size = _Memory(storage), storage.nbytes()
        if size:  # empty memories share one address
            memory = self._memories.setdefault((storage.data_ptr(), size), memory)
        layout = value.storage_offset(), [*value.shape], [*value.stride()]
        return _as_tensor, (memory, value.dtype, *layout)


class _Memory:
    """The memory of small tensors: tensors that share it in the worker share it in the rank."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def __reduce__(self) -> Any:
        data = ctypes.string_at(self._storage.data_ptr(), self._storage.nbytes())
        return _as_memory, (data,)


def _is_small(tensor: torch.Tensor) -> bool:
    """Return True if a tensor holds plain values in small memory."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
        and tensor.untyped_storage().nbytes() <= SMALL
    )


def _unchanged(value: torch.Tensor) -> torch.Tensor:
    return value


def _as_memory(data: bytes) -> torch.UntypedStorage:
    # Torch's own memory: math libraries may compute different bits for different alignments.
    values = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    ctypes.memmove(values.data_ptr(), data, len(data))
    return values.untyped_storage()


def _as_tensor(memory: torch.UntypedStorage, dtype: torch.dtype, *layout: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory, *layout)
