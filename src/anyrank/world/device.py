"""The device that belongs to this rank (promise 3), and the machine that the rank is on."""

from __future__ import annotations

import os
from functools import lru_cache

import torch

from anyrank.errors import RankError
from anyrank.settings import READ_THREADS

LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def rank_device() -> torch.device:
    """Return this rank's accelerator by its local rank, or the CPU if there is none.

    Does not initialize the accelerator. A process that sees a single device because its launcher
    hides the others, owns that device.

    Raises:
        RankError: there are several devices, but fewer than local ranks.
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
            f"local rank {index} has no device of its own: this machine has {count} of type "
            f"{accelerator.type}: start at most {count} ranks on it, give each process one device "
            "(CUDA_VISIBLE_DEVICES), or build the model on the device that it shall use"
        )
    return torch.device(accelerator.type, index if count > 1 else 0)


def _local_rank() -> int | None:
    """This process's number on its machine, as its launcher set it; None if it did not."""
    for name in LOCAL_RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def read_threads(ranks_on_node: int) -> int:
    """Count the threads that a rank reads with: its share of the cores, or ANYRANK_READ_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(READ_THREADS.get(), (cores or 1) // ranks_on_node))


def boot_id() -> str:
    """The id of this boot of the machine: process ids start anew after each boot.

    Empty if the system has none.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


@lru_cache(maxsize=64)
def name_device(device: torch.device) -> str:
    """A device's type and uuid, unique over all machines; "" for the CPU.

    The type alone if the device's module knows no uuid, as for meta.
    """
    if device.type == "cpu":
        return ""
    module = None if device.type == "meta" else torch.get_device_module(device)
    properties = getattr(module, "get_device_properties", lambda _: None)(device)
    uuid = getattr(properties, "uuid", None)
    return device.type if uuid is None else f"{device.type}:{uuid}"
