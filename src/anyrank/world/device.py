"""The device of this rank (promise 3), and the machine that it runs on."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from anyrank.errors import RankError
from anyrank.settings import READ_THREADS

LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def rank_device() -> torch.device:
    """Return this rank's accelerator by its local rank, or the CPU if there is none.

    Does not initialize the accelerator. A process that sees only one device, because its launcher
    hides the others, owns that device.

    Raises:
        RankError: the machine has several devices, but fewer than local ranks.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index = _local_rank()
    if index is None:
        index = torch.accelerator.current_device_index()
    count = torch.accelerator.device_count()
    if index >= count > 1:
        raise RankError(
            f"local rank {index} has no device: this machine has {count} {accelerator.type} "
            f"devices. Start at most {count} ranks on it, assign one device to each process with "
            "CUDA_VISIBLE_DEVICES, or build the model on the device to use."
        )
    return torch.device(accelerator.type, index if count > 1 else 0)


def _local_rank() -> int | None:
    """Return the local rank that the launcher set; None if it did not."""
    for name in LOCAL_RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def read_threads(ranks_on_node: int) -> int:
    """Return the number of reading threads: this rank's share of cores, or ANYRANK_READ_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(READ_THREADS.get(), (cores or 1) // ranks_on_node))


def boot_id() -> str:
    """Return the id of this boot of the machine; process ids are reused after a boot.

    The id is empty if the system does not have one.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


@lru_cache(maxsize=64)
def name_device(device: torch.device) -> str:
    """Return a device's type and uuid, which is unique across machines; "" for the CPU.

    Only the type is returned if the device's module has no uuid, such as for meta.
    """
    if device.type == "cpu":
        return ""
    module = None if device.type == "meta" else torch.get_device_module(device)
    properties = getattr(module, "get_device_properties", lambda _: None)(device)
    uuid = getattr(properties, "uuid", None)
    return device.type if uuid is None else f"{device.type}:{uuid}"
