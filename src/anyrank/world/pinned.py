"""Page-locked host memory of an exact size, for asynchronous copies from and to a device."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import torch

from anyrank.errors import AnyrankError

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process


def page_locked(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialized uint8[nbytes] on the CPU, page-locked for copies from and to `device`.

    The memory is freed with its last view, after pending copies. pin_memory=True, which rounds up
    to a power of two and never frees its memory, is used only for devices without CUDA's runtime
    calls.

    Raises:
        AnyrankError: the system has too little memory, or the limit of locked memory is too low.
    """
    module = torch.get_device_module(device)
    with torch.inference_mode(False):  # inference tensors could not be used outside inference mode
        if nbytes == 0 or not hasattr(module, "cudart"):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=nbytes > 0)
        locked = _map_pages(nbytes)
        address = ctypes.addressof(locked)
        with torch.accelerator.device_index(device.index):
            code = int(module.cudart().cudaHostRegister(address, nbytes, PORTABLE))
        if code:
            raise AnyrankError(
                f"CUDA error {code} while page-locking {nbytes} bytes of host memory. Raise the "
                "limit of locked memory (ulimit -l)."
            )
        # `memory` is freed before the mapping that it views, so pages are first unlocked, then
        # unmapped.
        weakref.finalize(locked, _unlock, module, address, device).atexit = False
        return torch.frombuffer(locked, dtype=torch.uint8)


def _map_pages(nbytes: int) -> Any:
    """Map new memory whose pages hold nothing else, because a page can be locked only once."""
    try:
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise AnyrankError(
            f"cannot allocate {nbytes} bytes of host memory to page-lock: {error}"
        ) from error
    return (ctypes.c_char * nbytes).from_buffer(mapped)


def _unlock(module: Any, address: int, device: torch.device) -> None:
    """Release a registration. The garbage collector calls this, so no caller would see an error."""
    with torch.accelerator.device_index(device.index):
        torch.accelerator.synchronize(device)
        module.cudart().cudaHostUnregister(address)
