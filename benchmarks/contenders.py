"""The ways of loading that are compared. Each runs on one rank, between two barriers."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bench import PAGE
from launch import Stages, device, meet, settle, timed
from models import local_part, rows_of, weight_map, wrapped, wrong_tensors
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import anyrank

SCRATCH_BYTES = 1 << 20  # of the hand-written minimum's cast or copy; stays in the core's cache


@dataclass(frozen=True)
class Target:
    """What each rank loads.

    Attributes:
        folder: of the safetensors shards.
        dtype: of the model's parameters, by name; the files are bf16.
        layout: fsdp (sharded over all ranks), hsdp (two replicas, sharded inside), ddp (whole).
    """

    folder: str
    dtype: str
    layout: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]


SHARDED = ("fsdp", "hsdp")
EVERY = (*SHARDED, "ddp")
Loader = Callable[[Target, Any], nn.Module]


@dataclass(frozen=True)
class Contender:
    """A way of loading.

    Attributes:
        title: in tables.
        run: from the target, and the model if it was built before, to the loaded model.
        layouts: that it can load.
        full_copies: whole models in private memory at its highest: a fixed number, and one for
            every rank; decides what this machine can run.
        repeats: most repetitions of a slow way that no goal speaks of.
        sharded_before: the model is built on meta and sharded before the clock starts; else
            building it is part of the way, and of its time.
    """

    title: str
    run: Loader
    layouts: tuple[str, ...]
    full_copies: tuple[float, float] = (1.1, 0.0)
    repeats: int = 1000
    sharded_before: bool = False


# -- models ---------------------------------------------------------------------------------------


def build(target: Target, is_real: bool = False) -> nn.Module:
    """The model without its weights: on meta, or in memory of the host nobody has written to."""
    config = AutoConfig.from_pretrained(target.folder)
    with anyrank.meta():
        model = AutoModelForCausalLM.from_config(config, dtype=target.torch_dtype)
    return allocate(model, torch.device("cpu")) if is_real else model


def allocate(model: nn.Module, where: torch.device) -> nn.Module:
    """Uninitialized memory for a model on meta. Its real buffers keep their values."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=where)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model


def shard(model: Any, target: Target) -> nn.Module:
    """As the layout says, by layers; a model that DDP will hold stays plain, on its device."""
    if target.layout == "ddp":
        return model if model.device.type == "meta" else model.to(device())
    return wrapped(target.layout, model, model.model.layers)


# -- the ways -------------------------------------------------------------------------------------


def with_anyrank(target: Target, model: nn.Module) -> nn.Module:
    anyrank.load(model, target.folder)
    return model


def by_hand(target: Target, model: nn.Module) -> nn.Module:
    """Each rank reads its own bytes into its own tensors: no agreement, no checks, no report."""
    allocate(model, device())
    where, files = weight_map(target.folder), dict[str, tuple[int, int, dict[str, Any]]]()
    on_cpu = device().type == "cpu"
    scratch = torch.empty(SCRATCH_BYTES // 2, dtype=torch.bfloat16, pin_memory=not on_cpu)
    for name, parameter in model.named_parameters():
        if where[name] not in files:
            fd = os.open(Path(target.folder, where[name]), os.O_RDONLY)
            length = int.from_bytes(os.pread(fd, 8, 0), "little")
            files[where[name]] = fd, 8 + length, json.loads(os.pread(fd, length, 8))
        fd, base, header = files[where[name]]
        local = local_part(parameter).view(-1)
        row = parameter.shape[1:].numel()
        start = base + header[name]["data_offsets"][0] + 2 * row * rows_of(parameter)[0]
        if on_cpu and local.dtype == torch.bfloat16:
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


def dcp_reader(target: Target, model: nn.Module) -> nn.Module:
    allocate(model, device())
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(target.folder))
    return model


def rank0_broadcast(target: Target, _: object) -> nn.Module:
    """Rank 0 holds the full model, the others are on meta; every tensor is broadcast whole.

    Rank 0 skips the random first values that the original spends seconds on.
    """
    full: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        model = load_all(target)
        full = model.state_dict()
    else:
        model = build(target)
    shard(model, target)
    if not full:
        allocate(model, device())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, full, options=options)
    for _name, buffer in sorted(model.named_buffers()):
        dist.broadcast(buffer, src=0)
    return model


def load_all(target: Target) -> nn.Module:
    """The whole model from all files, on this rank."""
    model = build(target, is_real=True)
    for file in sorted(set(weight_map(target.folder).values())):
        model.load_state_dict(load_file(Path(target.folder, file)), strict=False)
    return model


def load_and_shard(target: Target, _: object) -> nn.Module:
    return shard(load_all(target), target)


def from_pretrained(target: Target, _: object) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=target.torch_dtype)
    return shard(model, target)


def ddp_sends(target: Target, _: object) -> nn.Module:
    """Rank 0 loads, and DDP's constructor sends it to the others."""
    model = load_all(target) if dist.get_rank() == 0 else build(target, is_real=True)
    return DistributedDataParallel(model.to(device()))


def transformers_distributed(target: Target, _: object) -> nn.Module:
    replicas = 2 if target.layout == "hsdp" else 1
    config = DistributedConfig(
        fsdp_size=dist.get_world_size() // replicas, dp_replicate_size=replicas
    )
    return AutoModelForCausalLM.from_pretrained(
        target.folder, dtype=target.torch_dtype, distributed_config=config
    )


def with_accelerate(target: Target, _: object) -> nn.Module:
    """Accelerate's own steps for FSDP2, one by one: its Accelerator shards nothing on a CPU."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=target.torch_dtype)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
        device=device(),
    )
    return fsdp2_prepare_model(accelerator, model)


EACH = (1.1, 1.1)  # whole models, when every rank holds one
CONTENDERS = {
    "hand": Contender("hand-written minimum", by_hand, EVERY, sharded_before=True),
    "anyrank": Contender("anyrank", with_anyrank, EVERY, sharded_before=True),
    "dcp": Contender("DCP, HuggingFaceStorageReader", dcp_reader, SHARDED, sharded_before=True),
    "transformers": Contender("transformers DistributedConfig", transformers_distributed, SHARDED),
    "from_pretrained": Contender("from_pretrained on every rank", from_pretrained, EVERY, EACH, 2),
    "rank0": Contender("rank 0 + set_model_state_dict", rank0_broadcast, SHARDED, (2.5, 0.0)),
    "accelerate": Contender("accelerate fsdp2_prepare_model", with_accelerate, ("fsdp",), EACH, 2),
    "load_file": Contender("load_file on every rank", load_and_shard, EVERY, EACH, 2),
    "ddp_sends": Contender("rank 0, sent by DDP", ddp_sends, ("ddp",), EACH, 2),
}


# -- one rank's run -------------------------------------------------------------------------------


def touch(model: nn.Module) -> None:
    """Write to every page of every parameter: weights that only promise to be there come now."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = local_part(parameter)
            if local.numel():
                local.view(-1)[:: PAGE // local.element_size()].add_(0)


def run(name: str, folder: str, dtype: str, layout: str, is_watched: bool) -> Stages:
    """The job of one rank: prepare, load, check; see `Launcher.run`."""
    warnings.simplefilter("ignore")
    contender, target = CONTENDERS[name], Target(folder, dtype, layout)
    start = time.perf_counter()
    model: Any = shard(build(target), target) if contender.sharded_before else None
    prepared_sec = time.perf_counter() - start
    settle()
    meet()
    yield {"prepared_sec": prepared_sec}

    def load() -> None:
        nonlocal model
        model = contender.run(target, model)
        touch(model)

    yield timed(load, watch_host=is_watched)

    share = sum(local_part(one).numel() * one.element_size() for one in model.parameters())
    yield {"wrong": wrong_tensors(model, folder, target.torch_dtype), "share_bytes": share}
