"""A simulated accelerator, "sim": import it before anything asks torch for an accelerator.

| | |
| --- | --- |
| memory | host access to a device tensor's bytes faults |
| freed | what a stream was recorded for counts until the host has waited for that stream |
| streams | lazy: a non-blocking copy of pinned memory runs when something forces it |
| races | `torch.sim.races()`: accesses of the same bytes by two streams that nothing orders |
| devices | `SIM_DEVICES` (2); every thread starts on device 0; `used_devices()` have a context |
| page locks | `torch.sim.cudart()`, as CUDA's; `registered()` has the addresses |
| collectives | backend `simccl` (`cpu:gloo,sim:simccl`) |
| off | `SIM_LAZY=0`: copies run at once |

Kernels run at once, on the host, so a copy that begins too early shows in the races only.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from tests.device.build_sim import build


def _extension() -> Any:
    path = str(build())
    loader = importlib.machinery.ExtensionFileLoader("_C", path)
    spec = importlib.util.spec_from_file_location("_C", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)  # registers the backend
    return module


_C = _extension()
torch.utils.rename_privateuse1_backend("sim")
sim: Any = types.ModuleType("torch.sim")


def index_of(device: Any = None) -> int:
    """A device's number; the current one's where none is named."""
    if device is None or isinstance(device, int):
        return _C.current_device() if device is None or device < 0 else device
    index = torch.device(device).index
    return _C.current_device() if index is None else index


class Device:
    """`torch.sim.device(...)`: the current device of a block."""

    def __init__(self, device: Any) -> None:
        self.index = -1 if device is None else index_of(device)

    def __enter__(self) -> None:
        self.before = _C.exchange_device(self.index)

    def __exit__(self, *exc_info: object) -> None:
        _C.exchange_device(self.before)


def set_device(device: Any) -> None:
    sim._lazy_init()
    _C.set_device(index_of(device))


def manual_seed_all(seed: int) -> None:
    for number in range(_C.device_count()):
        _C.default_generator(number).manual_seed(seed)


sim.__dict__.update(
    device=Device,
    is_available=lambda: _C.device_count() > 0,
    device_count=_C.device_count,
    is_initialized=_C.is_initialized,
    init=lambda: sim._lazy_init(),
    _lazy_init=_C.init,
    _is_in_bad_fork=lambda: False,
    current_device=_C.current_device,
    set_device=set_device,
    synchronize=lambda device=None: _C.synchronize(index_of(device)),
    get_rng_state=lambda device="sim": _C.default_generator(index_of(device)).get_state(),
    set_rng_state=lambda state, device="sim": _C.default_generator(index_of(device)).set_state(
        state
    ),
    manual_seed=lambda seed: _C.default_generator(_C.current_device()).manual_seed(seed),
    manual_seed_all=manual_seed_all,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    # What FSDP2 asks its device's module for.
    Stream=torch.Stream,
    Event=torch.Event,
    stream=lambda stream: stream,
    current_stream=lambda device=None: torch.accelerator.current_stream(index_of(device)),
    cudart=lambda: types.SimpleNamespace(
        cudaHostRegister=lambda pointer, nbytes, flags: _C.host_register(pointer, nbytes),
        cudaHostUnregister=_C.host_unregister,
    ),
    **{name: getattr(_C, name) for name in ("races", "pending", "used_devices")},
    **{name: getattr(_C, name) for name in ("host_allocated", "registered")},
)
torch._register_device_module("sim", sim)
sys.modules["torch.sim"] = sim
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_storage=True
)


def make_backend(options: Any, *_: Any) -> Any:
    """`simccl`: gloo on the device's memory."""
    store = dist.PrefixStore("simccl", options.store)
    shape = (options.group_rank, options.group_size)
    return _C.make_backend(dist.ProcessGroupGloo(store, *shape, options.timeout), *shape)


dist.Backend.register_backend("simccl", make_backend, extended_api=True, devices=["sim"])
