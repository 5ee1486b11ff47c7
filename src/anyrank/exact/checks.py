"""What keeps a run from the same bits on any number of ranks: refused, or noted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from anyrank.steps.gradient_sync import GradientSync
from anyrank.world.ranks import Ranks

TITLES = {
    "device": "device type",
    "cpu": "CPU instruction set",
    "torch": "torch version",
    "anyrank": "anyrank version",
}
FSDP2, OTHER = "FSDP2", "DDP or none"
COMPILED = (
    "exact=True: the model is compiled, and has the same bits on any number of ranks while its "
    "wrapper stays: another one may change what torch compiles (of an nn.Sequential in a wrapper, "
    "nothing), unless what is compiled is wrapped, as in DDP(torch.compile(model)); and "
    "torch.compile(mode='max-autotune') chooses kernels by timing them, which may round in another "
    "way in each process: compile it without autotuning"
)


def environment(model: nn.Module) -> dict[str, int | str]:
    """What the results of a model on this rank depend on, apart from its data."""
    return {
        "threads": torch.get_num_threads(),
        "device": " and ".join(_device_types(model)),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "anyrank": version("anyrank"),
        "wrapper": FSDP2 if any(isinstance(m, FSDPModule) for m in model.modules()) else OTHER,
    }


def _device_types(model: nn.Module) -> list[str]:
    """The types of devices that a model is on."""
    return sorted({parameter.device.type for parameter in model.parameters()})


def check_threads(record: Mapping[str, Any], error: Callable[[str], Exception]) -> None:
    """Raise if this rank has another number of threads than the run began with."""
    threads = torch.get_num_threads()
    if record.get("threads", threads) != threads:
        raise error(
            f"exact=True: the run began with {record['threads']} intra-op threads on each rank, "
            f"here there are {threads}, and sums within a kernel depend on them: call "
            f"torch.set_num_threads({record['threads']})"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """How this run differs from a record, in words."""
    reasons = {
        "anyrank": "it may add up in another order",
        "wrapper": "where a unit of FSDP2 uses its input several times, as with skip connections, "
        "it adds up gradients in another order (x = x.view_as(x) at its beginning prevents it)",
    }
    return [
        f"exact=True: the {TITLES.get(name, name)} was {value} and is {now[name]}: "
        f"{reasons.get(name, 'kernels may round in another way')}, so bits may differ from here on"
        for name, value in before.items()
        if now[name] != value
    ]


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile wraps a model or a module of it."""
    return any(name.endswith("_orig_mod") for name, _ in model.named_modules())


def check_model(model: nn.Module, ranks: Ranks) -> None:
    """Refuse what makes results depend on the number of ranks.

    Raises:
        ValueError: names the module or the parameter, and the way out.
    """
    for name, module in model.named_modules():
        adds_over_ranks = isinstance(module, nn.SyncBatchNorm) and module.training
        if adds_over_ranks or updates_statistics(module):
            raise ValueError(
                f"exact=True: {name or 'the model'} is a {type(module).__name__} in train mode, "
                "whose statistics are those of the microbatches of its rank, or run over the "
                "ranks: use GroupNorm or LayerNorm, or BatchNorm with track_running_stats=False, "
                f"or {name or 'model'}.eval()"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            _check_sharding(name, parameter, ranks)
    is_kept = torch.are_deterministic_algorithms_enabled()
    is_kept = is_kept and not torch.is_deterministic_algorithms_warn_only_enabled()
    if set(_device_types(model)) - {"cpu"} and not is_kept:
        raise ValueError(
            "exact=True: kernels of accelerators may add in any order: call "
            "torch.use_deterministic_algorithms(True), without warn_only, before the first step"
        )


def updates_statistics(module: nn.Module) -> bool:
    """Whether a forward pass changes a module's running statistics, which no version counts."""
    return module.training and bool(getattr(module, "track_running_stats", False))


def sparse_gradient(name: str, layout: torch.layout) -> str:
    """Why a gradient that is not dense is refused, and the way out."""
    return (
        f"the gradient of {name} is {layout}, which exact=True does not add up: build the module "
        "with sparse=False"
    )


def _check_sharding(name: str, parameter: DTensor, ranks: Ranks) -> None:
    """Refuse a parameter whose gradient the ranks of the data do not add up in one order."""
    mesh, placements = parameter.device_mesh, parameter.placements
    members = mesh.mesh.flatten().tolist()
    sharded = [axis for axis, place in enumerate(placements) if isinstance(place, Shard)]
    is_summed = (
        sorted(members) == sorted(ranks.ranks)
        and len(sharded) == 1
        and len(placements) <= 2
        and all(isinstance(place, Shard | Replicate) for place in placements)
        and (mesh.size(sharded[0]) > 1 or ranks.size == 1)
    )
    if not is_summed:
        raise ValueError(
            f"exact=True: {name} is laid out as {list(placements)} on {mesh}, over ranks "
            f"{members}, and the data over {list(ranks.ranks)}: use DistributedDataParallel over "
            "the ranks of the data, or FSDP2 that shards over one axis of a mesh of them (tensor "
            "parallelism adds up in an order of its own)"
        )


def check_wrappers(sync: GradientSync) -> None:
    """Refuse a wrapper whose reduction cannot be ordered.

    Raises:
        ValueError: names it, and the way out.
        RuntimeError: FSDP2 of a torch before 2.13.
    """
    if sync.fsdp and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise RuntimeError(
            "exact=True under FSDP2 needs torch 2.13 or newer, as FSDP2 leaves out the gradients "
            f"of unused parameters before; this is torch {torch.__version__}: use "
            "DistributedDataParallel, or exact=False"
        )
    if any(module.static_graph for module in sync.ddp):
        raise ValueError(
            "exact=True: DistributedDataParallel(static_graph=True) reduces gradients in its "
            "first backward in an order of its own: build it with static_graph=False"
        )
