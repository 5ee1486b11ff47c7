"""How a batch comes from a worker: its small tensors as bytes, beside the rest of the message.

A DataLoader passes each tensor by a file descriptor, for which the rank has to ask a thread of the
worker. That takes longer than copying a small tensor, as the worker is busy reading meanwhile, and
a rank may run out of descriptors.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

SMALL = 128 * 1024  # bytes: three such tensors take half the time, three of 1 MiB take longer


def as_message(request: Any, batch: object) -> bytes:
    """A request and its batch, for `from_message` in the rank. Large tensors go by descriptor."""
    message = io.BytesIO()
    try:
        _Pickler(message, pickle.HIGHEST_PROTOCOL).dump((request, batch))
    except Exception as error:
        # A queue prints what is raised here and sends nothing, so the rank would wait for ever.
        return pickle.dumps(
            _Unsent(
                f"a worker cannot send the batch of {list(request.ids)}: {type(error).__name__}: "
                f"{error}: let the dataset and collate_fn return what can be pickled, or give "
                "num_workers=0"
            )
        )
    return message.getvalue()


def from_message(message: bytes) -> Any:
    """The inverse of `as_message`, once.

    Raises:
        TypeError: the worker could not pickle the batch.
    """
    value = pickle.loads(message)  # noqa: S301 - of this process's own worker
    if isinstance(value, _Unsent):
        raise TypeError(value.why)
    return value


@dataclass(frozen=True)
class _Unsent:
    """In the place of a batch that its worker could not pickle."""

    why: str


class _Pickler(ForkingPickler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._memories: dict[int, _Memory] = {}  # by address

    def reducer_override(self, value: Any) -> Any:
        """How an object is pickled that is no plain value."""
        if type(value) is not torch.Tensor:
            return NotImplemented
        if value.is_conj() or value.is_neg():  # torch would pass other numbers
            return _unchanged, (value.resolve_conj().resolve_neg(),)
        if not _is_small(value):
            return NotImplemented
        storage = value.untyped_storage()
        memory = self._memories.setdefault(storage.data_ptr(), _Memory(storage))
        layout = value.storage_offset(), [*value.shape], [*value.stride()]
        return _as_tensor, (memory, value.dtype, *layout)


class _Memory:
    """The memory of small tensors: those that share it in the worker share it in the rank."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def __reduce__(self) -> Any:
        data = bytearray(self._storage.nbytes())
        if data:
            values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(self._storage)
            torch.frombuffer(data, dtype=torch.uint8).copy_(values)
        return _as_memory, (data,)


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is values in a memory of its own process, and that is small."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized)
        and tensor.untyped_storage().nbytes() <= SMALL
        and not tensor.is_shared()
    )


def _unchanged(value: torch.Tensor) -> torch.Tensor:
    return value


def _as_memory(data: bytearray) -> torch.UntypedStorage:
    # Torch's own memory: math libraries may compute other bits where it begins elsewhere.
    values = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    if data:
        values.copy_(torch.frombuffer(data, dtype=torch.uint8))
    return values.untyped_storage()


def _as_tensor(memory: torch.UntypedStorage, dtype: torch.dtype, *layout: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(memory, *layout)
