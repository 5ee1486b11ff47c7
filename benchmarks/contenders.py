"""The ways of loading that are compared. Each runs on one rank, between two barriers."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from launch import settle
from torch import nn
from weights import local_part, rows_of, weight_map, wrong_tensors

import anyrank

PAGE = 4096
SCRATCH_BYTES = 1 << 20  # of the hand-written minimum's cast; stays in the core's cache


@dataclass(frozen=True)
class Case:
    """What one rank loads.

    Attributes:
        folder: of the safetensors shards.
        dtype: of the model's parameters, by name; the files are bf16.
        layout: fsdp (sharded over all ranks), hsdp (two replicas, sharded inside), ddp (whole).
        rank, size: of this process.
    """

    folder: str
    dtype: str
    layout: str
    rank: int
    size: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]


Loader = Callable[[Case, Any], nn.Module]


@dataclass(frozen=True)
class Contender:
    """A way of loading.

    Attributes:
        title: in tables.
        run: from the case, and the model if it was built before, to the loaded model.
        layouts: that it can load.
        sharded_before: the model is built on meta and sharded before the clock starts; else
            building it is part of the way, and of its time.
        full_copies: whole models in private memory at its highest: a fixed number, and one for
            every rank; decides what this machine can run.
        repeats: most repetitions of a slow way that no goal speaks of.
    """

    title: str
    run: Loader
    layouts: tuple[str, ...]
    sharded_before: bool = False
    full_copies: tuple[float, float] = (1.1, 0.0)
    repeats: int = 1000


# -- models ---------------------------------------------------------------------------------------


def build(case: Case, device: str = "meta") -> nn.Module:
    """The model without its weights: on meta, or in memory nobody has written to."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(case.folder)
    with anyrank.meta():
        model = AutoModelForCausalLM.from_config(config, dtype=case.torch_dtype)
    return model if device == "meta" else allocate(model)


def allocate(model: nn.Module) -> nn.Module:
    """Uninitialised memory for a model on meta. Its real buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model


def shard(model: Any, case: Case) -> nn.Module:
    """`fully_shard` layer by layer, then the rest, on the mesh of the layout."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (2, case.size // 2) if case.layout == "hsdp" else (case.size,)
    names = ("replicate", "shard") if case.layout == "hsdp" else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# -- the ways -------------------------------------------------------------------------------------


def with_anyrank(case: Case, model: nn.Module) -> nn.Module:
    anyrank.load(model, case.folder)
    return model


def by_hand(case: Case, model: nn.Module) -> nn.Module:
    """Each rank reads its own bytes into its own tensors: no agreement, no checks, no report."""
    allocate(model)
    where, files = weight_map(case.folder), dict[str, tuple[int, int, dict[str, Any]]]()
    scratch = torch.empty(SCRATCH_BYTES // 2, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if where[name] not in files:
            fd = os.open(Path(case.folder, where[name]), os.O_RDONLY)
            length = int.from_bytes(os.pread(fd, 8, 0), "little")
            files[where[name]] = fd, 8 + length, json.loads(os.pread(fd, length, 8))
        fd, base, header = files[where[name]]
        local = local_part(parameter).view(-1)
        row = parameter.shape[1:].numel()
        start = base + header[name]["data_offsets"][0] + 2 * row * rows_of(parameter)[0]
        if local.dtype == torch.bfloat16:
            read_into(fd, local, start)
            continue
        for part in local.split(len(scratch)):
            read_into(fd, scratch[: len(part)], start)
            part.copy_(scratch[: len(part)])
            start += 2 * len(part)
    for fd, _, _ in files.values():
        os.close(fd)
    return model


def read_into(fd: int, tensor: torch.Tensor, offset: int) -> None:
    """Fill a contiguous CPU tensor from a file."""
    if not tensor.numel():
        return
    view = memoryview(tensor.view(torch.uint8).numpy())
    while view:
        count = os.preadv(fd, [view], offset)
        view, offset = view[count:], offset + count


def dcp_reader(case: Case, model: nn.Module) -> nn.Module:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    allocate(model)
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(case.folder))
    return model


def rank0_broadcast(case: Case, _: object) -> nn.Module:
    """Rank 0 holds the full model, the others are on meta; every tensor is broadcast whole.

    Rank 0 skips the random first values that the original spends seconds on.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    full: dict[str, torch.Tensor] = {}
    if case.rank == 0:
        model = load_all(case)
        full = model.state_dict()
    else:
        model = build(case)
    shard(model, case)
    if case.rank:
        allocate(model)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, full, options=options)
    for _name, buffer in sorted(model.named_buffers()):
        dist.broadcast(buffer, src=0)
    return model


def load_all(case: Case) -> nn.Module:
    """The whole model from all files, on this rank."""
    from safetensors.torch import load_file

    model = build(case, "cpu")
    for file in sorted(set(weight_map(case.folder).values())):
        model.load_state_dict(load_file(Path(case.folder, file)), strict=False)
    return model


def every_rank_loads_all(case: Case, _: object) -> nn.Module:
    model = load_all(case)
    return model if case.layout == "ddp" else shard(model, case)


def every_rank_from_pretrained(case: Case, _: object) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=case.torch_dtype)
    return model if case.layout == "ddp" else shard(model, case)


def ddp_sends(case: Case, _: object) -> nn.Module:
    """Rank 0 loads, and DDP's constructor sends it to the others."""
    from torch.nn.parallel import DistributedDataParallel

    model = load_all(case) if case.rank == 0 else build(case, "cpu")
    return DistributedDataParallel(model)


def transformers_distributed(case: Case, _: object) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    replicas = 2 if case.layout == "hsdp" else 1
    config = DistributedConfig(fsdp_size=case.size // replicas, dp_replicate_size=replicas)
    return AutoModelForCausalLM.from_pretrained(
        case.folder, dtype=case.torch_dtype, distributed_config=config
    )


def accelerate_fsdp2(case: Case, _: object) -> nn.Module:
    """Accelerate's own steps for FSDP2, called one by one: its Accelerator shards nothing on
    CPU.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from transformers import AutoModelForCausalLM

    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=case.torch_dtype)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=case.rank == 0,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)


SHARDED = ("fsdp", "hsdp")
EVERY = (*SHARDED, "ddp")
CONTENDERS = {
    "hand": Contender("hand-written minimum", by_hand, EVERY, True),
    "anyrank": Contender("anyrank", with_anyrank, EVERY, True),
    "dcp": Contender("DCP, HuggingFaceStorageReader", dcp_reader, SHARDED, True),
    "transformers": Contender(
        "transformers DistributedConfig", transformers_distributed, SHARDED, False, (1.2, 0)
    ),
    "from_pretrained": Contender(
        "from_pretrained on every rank", every_rank_from_pretrained, EVERY, False, (1.1, 1.1), 2
    ),
    "rank0": Contender(
        "rank 0 + set_model_state_dict", rank0_broadcast, SHARDED, False, (2.5, 0.0)
    ),
    "accelerate": Contender(
        "accelerate fsdp2_prepare_model", accelerate_fsdp2, ("fsdp",), False, (1.2, 1.1), 2
    ),
    "load_file": Contender(
        "load_file on every rank", every_rank_loads_all, EVERY, False, (1.1, 1.1), 2
    ),
    "ddp_sends": Contender("rank 0, sent by DDP", ddp_sends, ("ddp",), False, (1.1, 1.1), 2),
}


# -- one rank's run -------------------------------------------------------------------------------


def touch(model: nn.Module) -> None:
    """Write to every page of every parameter: weights that only promise to be there come now."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = local_part(parameter)
            if local.numel():
                local.view(-1)[:: PAGE // local.element_size()].add_(0)


def run(
    rank: int, size: int, name: str, folder: str, dtype: str, layout: str
) -> Iterator[dict[str, Any]]:
    """The job of one rank: prepare, load, check; see `Launcher.run`."""
    warnings.simplefilter("ignore")
    contender, case = CONTENDERS[name], Case(folder, dtype, layout, rank, size)
    start = time.perf_counter()
    model: Any = None
    if contender.sharded_before:
        model = build(case)
        model = model if layout == "ddp" else shard(model, case)
    prepared_sec = time.perf_counter() - start
    loaded = set(sys.modules)
    dist.barrier()
    settle()
    dist.barrier()
    yield {"prepared_sec": prepared_sec}

    dist.barrier()
    start = time.perf_counter()
    model = contender.run(case, model)
    called = time.perf_counter()
    touch(model)
    dist.barrier()
    usable = time.perf_counter()
    yield {
        "called_sec": called - start,
        "usable_sec": usable - start,
        "late": sorted(set(sys.modules) - loaded),
    }

    yield {
        "wrong": wrong_tensors(model, folder, case.torch_dtype),
        "share_bytes": sum(
            local_part(one).numel() * one.element_size() for one in model.parameters()
        ),
    }
