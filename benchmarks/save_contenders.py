"""Ways to save and to load a sharded training state: one function each. Run on fresh ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import device
from models import linears, local_part, sharded
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)

import anyrank

State = tuple[nn.Module, torch.optim.Optimizer]
Save = Callable[[State, str], float | None]  # the seconds of stall, where it is not all of them


def make_state(widths: Sequence[int], is_sharded: bool = True) -> State:
    """Square layers of fp32 with Adam's state, on this rank's device: FSDP2, or whole."""
    with torch.device("meta" if is_sharded else device()):
        model: Any = linears(widths)
    if is_sharded:
        model = sharded(model, model).to_empty(device=device())
    # One tensor at a time: the step's own memory must not hide the save's.
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    for number, parameter in enumerate(model.parameters()):
        if is_sharded:
            local_part(parameter).fill_(0.01 * (number + dist.get_rank() + 1))
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_dict_of(state: State, full: bool = False) -> dict[str, Any]:
    """As torch's helpers give it, on the CPU."""
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    model, optimizer = state
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def local_tensors(state: State) -> Iterator[torch.Tensor]:
    """What this rank holds."""
    model, optimizer = state
    for parameter in model.parameters():
        yield local_part(parameter)
        yield from map(local_part, optimizer.state[parameter].values())


def hand(state: State, folder: str) -> None:
    """The least there is to do: each rank's bytes into one file, and fsync."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, f"{dist.get_rank()}.raw"), "wb", buffering=0) as file:
        for tensor in local_tensors(state):
            view = memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy())
            while len(view):
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    dist.barrier()


def rank0(state: State, folder: str) -> None:
    """Gather the whole state on one rank, and torch.save."""
    whole = state_dict_of(state, full=True)
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "state.pt")
        torch.save(whole, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    dist.barrier()


def dcp_save(state: State, folder: str) -> None:
    """torch.distributed.checkpoint, which fsyncs its files by default."""
    dcp.save(state_dict_of(state), checkpoint_id=folder)


def dcp_async(state: State, folder: str) -> float:
    """The same behind the training; returns the seconds for which that stands still."""
    start = time.perf_counter()
    future: Any = dcp.async_save(state_dict_of(state), checkpoint_id=folder)
    stall = time.perf_counter() - start
    future.result()
    return stall


def manager_of_torch_checkpointing() -> Any:
    """Of the package of that name. Its direct I/O fails on some file systems, so it is off."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    config = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
    return CheckpointManager(config)


def torch_checkpointing(state: State, folder: str) -> None:
    """Its metadata for another layout need a GPU, so without them; it does not fsync."""
    manager = manager_of_torch_checkpointing()
    manager.save(folder, state_dict_of(state))
    manager.close()
    dist.barrier()


def accelerate_save(state: State, folder: str) -> None:
    """accelerate's save_state: on the CPU of DDP replicas, written by the first rank."""
    from accelerate import Accelerator

    accelerator: Any = Accelerator(cpu=True)
    accelerator._models, accelerator._optimizers = [state[0]], [state[1]]
    accelerator.save_state(folder)
    dist.barrier()


def ours(state: State, folder: str) -> None:
    """Committed, durable, with checksums."""
    with anyrank.Checkpoints(folder, anyrank.TrainState(*state)) as ckpts:
        ckpts.save()


def ours_background(state: State, folder: str) -> float:
    """The same behind the training; `seconds` are those until it is committed."""
    whole = anyrank.TrainState(*state)
    with anyrank.Checkpoints(folder, whole, background=True) as ckpts:
        ckpts.resume()  # as every program begins; finds nothing
        start = time.perf_counter()
        ckpts.save()
        stall = time.perf_counter() - start
        ckpts.wait()
    return stall


SAVES: dict[str, tuple[str, Save]] = {
    "hand": ("each rank its bytes + fsync", hand),
    "rank0": ("torch.save on rank 0", rank0),
    "dcp": ("dcp.save", dcp_save),
    "dcp_async": ("dcp.async_save", dcp_async),
    "torch_checkpointing": ("torch_checkpointing: same layout only, no fsync", torch_checkpointing),
    "accelerate": ("accelerate save_state: replicas, no fsync", accelerate_save),
    "anyrank": ("anyrank", ours),
    "anyrank_background": ("anyrank, background=True", ours_background),
}


# -- loads ----------------------------------------------------------------------------------------


def load_dcp(state: State, folder: str) -> None:
    """torch.distributed.checkpoint, and its helpers for the state."""
    table = state_dict_of(state)
    dcp.load(table, checkpoint_id=folder)
    give(state, table)


def give(state: State, table: dict[str, Any], is_full: bool = False) -> None:
    """What was loaded, to model and optimizer."""
    set_state_dict(
        *state,
        model_state_dict=table["model"],
        optim_state_dict=table["optimizer"],
        options=StateDictOptions(full_state_dict=is_full),
    )
