"""Rejects or reports conditions that prevent the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anyrank.tensors.sharded_tensor import version_of
from anyrank.tensors.torch_classes import is_dtensor, is_fsdp2
from anyrank.training.gradients.fsdp2 import parameter_groups
from anyrank.training.gradients.sync import GradientSync
from anyrank.versions import __version__
from anyrank.world.ranks import Ranks

SAMPLED = 1 << 14  # elements of a buffer; larger ones are compared whole only in the first step
KEEPS_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
TITLES = {
    "device": "device type",
    "cpu": "CPU instruction set",
    "torch": "torch version",
    "anyrank": "anyrank version",
}
FSDP2, OTHER = "FSDP2", "DDP or none"
COMPILED = (
    "exact=True with a compiled model: results are the same on any number of ranks only while the "
    "wrapper stays the same, because a different wrapper can change what torch compiles (for an "
    "nn.Sequential in a wrapper, nothing). To avoid this, wrap the compiled model: "
    "DDP(torch.compile(model)). Do not use mode='max-autotune', which selects kernels by timing: "
    "they may round differently in each process."
)


def environment(model: nn.Module) -> dict[str, int | str]:
    """Return the conditions, except its data, on which a model's results on this rank depend."""
    return {
        "threads": torch.get_num_threads(),
        "device": " and ".join(_device_types(model)),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "anyrank": __version__,
        "wrapper": FSDP2 if any(is_fsdp2(m) for m in model.modules()) else OTHER,
    }


def _device_types(model: nn.Module) -> list[str]:
    """Return the device types that a model is on."""
    return sorted({parameter.device.type for parameter in model.parameters()})


def check_threads(record: Mapping[str, Any], error: Callable[[str], Exception]) -> None:
    """Raise if this rank's number of threads is not the one that the run started with."""
    threads = torch.get_num_threads()
    if record.get("threads", threads) != threads:
        raise error(
            f"exact=True: the run started with {record['threads']} intra-op threads per rank, this "
            f"process has {threads}, and kernel sums depend on the number. Call "
            f"torch.set_num_threads({record['threads']})."
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the differences between this run and a record."""
    reasons = {
        "anyrank": "sums may be evaluated in a different order",
        "wrapper": "where an FSDP2 unit uses its input several times, such as in skip connections, "
        "it adds gradients in a different order (x = x.view_as(x) at its start prevents this)",
    }
    return [
        f"exact=True: the {TITLES.get(name, name)} was {value} and is {now[name]} now: "
        f"{reasons.get(name, 'kernels may round differently')}, so results may differ from here on"
        for name, value in before.items()
        if now[name] != value
    ]


def is_compiled(model: nn.Module) -> bool:
    """Return True if torch.compile wraps a model or a module of it."""
    return any(name.endswith("_orig_mod") for name, _ in model.named_modules())


def check_model(model: nn.Module, ranks: Ranks) -> None:
    """Check that a model's results do not depend on the number of ranks.

    Raises:
        ValueError: they do; names the module or the parameter, and the way out.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise ValueError(
                f"exact=True: {name} is a SyncBatchNorm in train mode, which reduces over ranks. "
                f"Use GroupNorm or LayerNorm, or {name}.eval()."
            )
        if _updates_statistics(module):
            raise ValueError(
                f"exact=True: {name} is a {type(module).__name__} in train mode, whose running "
                "statistics depend on the microbatches of each rank. Use GroupNorm or LayerNorm, "
                f"track_running_stats=False, or {name}.eval()."
            )
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ValueError(sparse_gradient(f"{name}.weight".lstrip("."), torch.sparse_coo))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"exact=True: {name or 'the model'} is an {type(module).__name__} with max_norm, "
                "which scales rows of its weight in the forward pass, on each rank those of its "
                "own microbatches. Build it without, and scale all rows after optimizer.step()."
            )
        if is_fsdp2(module) and len(parameter_groups(module)) > 1:
            raise ValueError(
                f"exact=True: {name or 'the model'} is sharded over several meshes, and FSDP2 has "
                "no reduction over all of them. Shard it over one mesh."
            )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            _check_mesh(name, parameter, ranks)
            _check_hooks(name, parameter)
    is_kept = torch.are_deterministic_algorithms_enabled()
    is_kept = is_kept and not torch.is_deterministic_algorithms_warn_only_enabled()
    if set(_device_types(model)) - {"cpu"} and not is_kept:
        raise ValueError(
            "exact=True: kernels of accelerators may add in any order. Call "
            "torch.use_deterministic_algorithms(True), without warn_only, before the first step."
        )


def _updates_statistics(module: nn.Module) -> bool:
    """Return True if a forward pass changes a module's running statistics.

    The statistics' versions do not count such changes.
    """
    return isinstance(module, KEEPS_STATISTICS) and module.training and module.track_running_stats


def sparse_gradient(name: str, layout: torch.layout) -> str:
    """Return the error text for a gradient that is not dense."""
    return (
        f"the gradient of {name} is {layout}, which exact=True cannot add. Build the module with "
        "sparse=False."
    )


def _check_mesh(name: str, parameter: Any, ranks: Ranks) -> None:
    """Check that a parameter is sharded over the ranks of the data."""
    members = parameter.device_mesh.mesh.flatten().tolist()
    if sorted(members) != sorted(ranks.ranks):
        raise ValueError(
            f"exact=True: {name} is sharded over ranks {members}, the data over "
            f"{list(ranks.ranks)}. Tensor parallelism reduces in its own order. Use FSDP2 or DDP "
            "over the ranks of the data."
        )
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    others = [p for p in placements if not (p.is_shard() or p.is_replicate())]
    if len(sharded) != 1 or len(placements) > 2 or others:
        raise ValueError(
            f"exact=True: {name} is laid out as {list(placements)} on {mesh}. Shard it over one "
            "axis of a mesh of one or two."
        )
    if mesh.size(sharded[0]) == 1 and ranks.size > 1:
        raise ValueError(
            f"exact=True: {name} is only replicated over {members}, by FSDP2's own all-reduce. Use "
            "DistributedDataParallel, or a mesh of one axis."
        )


def _check_hooks(name: str, parameter: Any) -> None:
    """Raise ValueError for gradient hooks: FSDP2 calls them once a step on several ranks, or
    never."""
    of_tensor = parameter._backward_hooks  # pyright: ignore[reportPrivateUsage]
    of_sum = parameter._post_accumulate_grad_hooks  # pyright: ignore
    if of_tensor or of_sum:
        raise ValueError(
            f"exact=True: {name} has a gradient hook, which is not supported: FSDP2 calls it with "
            "the sum over the microbatches or not at all, and a single rank calls it in each "
            "microbatch. Modify gradients, and call the optimizer, after the loop over "
            "microbatches()."
        )


def check_wrappers(sync: GradientSync, ranks: Ranks) -> None:
    """Check that the reductions of a model's wrappers can be ordered.

    Raises:
        ValueError: one cannot; names the wrapper, and the way out.
    """
    for module in sync.ddp:
        if module.static_graph:
            raise ValueError(
                "exact=True: DistributedDataParallel(static_graph=True) reduces gradients in its "
                "first backward in its own order. Build it with static_graph=False."
            )
        if module._comm_hooks:  # pyright: ignore[reportPrivateUsage]
            raise ValueError(
                "exact=True: a communication hook is registered on DistributedDataParallel, and "
                "would not be called. Build it without register_comm_hook."
            )
        if set(dist.get_process_group_ranks(module.process_group)) != set(ranks.ranks):
            raise ValueError(
                "exact=True: DistributedDataParallel reduces over different ranks than those of "
                f"the data, {ranks.ranks}. Pass its process_group to the loader."
            )


# -- changes of a model in the loop over microbatches, which would differ between ranks -----------
#
# A forward pass may update buffers (running statistics, counters) and parameters
# (`Embedding(max_norm=...)`), and an optimizer may step in a gradient hook: all are rejected.


class ChangeWatch:
    """The parameters and buffers of a model when a pass over the microbatches starts.

    Args:
        modules: the modules of the model, by name.
        parameters: the parameters of the model, by name.
        is_first: this is the model's first pass: check whole buffers, and writes through `.data`.
            Later passes sample buffers, because an update may restore them (DDP's broadcast).
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        is_first: bool,
    ) -> None:
        self.modules, self.is_first = modules, is_first
        # FSDP2's forward works on copies, and its hooks are rejected.
        self.versions = {
            name: (parameter, version_of(parameter))
            for name, parameter in parameters.items()
            if not is_dtensor(parameter)
        }
        self.before = {
            name: (buffer, version_of(buffer), self.sample(buffer).clone())
            for name, buffer in self.buffers()
        }

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of the modules, by name."""
        for prefix, module in self.modules.items():
            yield from module.named_buffers(prefix, recurse=False)

    def sample(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a buffer, or in later passes elements spread over a large one."""
        if self.is_first or buffer.numel() <= SAMPLED:
            return buffer
        return buffer.reshape(-1)[:: 1 + buffer.numel() // SAMPLED]

    def changed(self) -> list[str]:
        """Return the names of changed parameters and buffers, and forget the samples."""
        before, self.before = self.before, {}
        parameters = [n for n, (tensor, old) in self.versions.items() if version_of(tensor) != old]
        buffers = [
            name
            for name, buffer in self.buffers()
            if name in before and self.is_changed(buffer, *before[name])
        ]
        modules = self.modules.items()
        statistics = [f"{name}.running_mean" for name, m in modules if _updates_statistics(m)]
        return parameters + buffers + statistics

    def is_changed(
        self, buffer: torch.Tensor, same: torch.Tensor, version: int, copy: torch.Tensor
    ) -> bool:
        """Return True if the values of a buffer differ from its sample."""
        if buffer is same and version_of(buffer) == version and not self.is_first:
            return False
        if buffer.shape != same.shape or buffer.dtype != same.dtype:  # a different buffer
            return False
        now = self.sample(buffer)
        return not torch.isclose(copy, now, rtol=0, atol=0, equal_nan=True).all()
