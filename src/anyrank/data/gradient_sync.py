"""When gradients are exchanged in a step, and by what they are divided.

DDP and FSDP2 average over their ranks in every backward; here they do so in the step's last
microbatch only. Parameters that neither has are averaged once, after the last microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from anyrank.world.ranks import Ranks

ROUNDING = 1e-5  # between sums of the same float32 values, added up in another order


class GradientSync:
    """The wrappers of one model, and how to reach them.

    Args:
        model: wrapped or not, or a container of several.
        ranks: those with different data. Where a wrapper averages over more, some share their data,
            and each part of the data counts equally often.

    Raises:
        TypeError: FSDP1.
        ValueError: a wrapper that averages over fewer ranks; a tensor that is spread over ranks
            with different data.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        modules = list(model.modules())
        if any(isinstance(module, FullyShardedDataParallel) for module in modules):
            raise TypeError("the model holds FSDP1 modules: shard it with fully_shard (FSDP2)")
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.ddp = [one for one in modules if isinstance(one, DistributedDataParallel)]
        self.fsdp = [one for one in modules if isinstance(one, FSDPModule)]
        wrapped = {id(one) for module in self.ddp for one in module.parameters()}
        if self.fsdp:
            wrapped |= {id(one) for one in self.parameters if isinstance(one, DTensor)}
        # A forward that bypasses fully_shard meets DTensors, and raises; that of DDP does not.
        self.exchanged = {
            name: parameter
            for module in self.ddp
            for name, parameter in module.module.named_parameters()
            if parameter.requires_grad and name not in module.parameters_to_ignore
        }
        self.loose = [one for one in self.parameters if id(one) not in wrapped]
        for number in self.sizes():
            if number % ranks.size:
                raise ValueError(
                    f"the model averages gradients over {number} ranks, the data is cut over "
                    f"{ranks.size}: give the loader the model's data-parallel process_group"
                )
        for mesh in {one.device_mesh for one in self.loose if isinstance(one, DTensor)}:
            if len(set(mesh.mesh.flatten().tolist()).intersection(ranks.ranks)) > 1:
                raise ValueError(
                    f"parameters are spread over {mesh}, whose ranks need the same data, and "
                    f"ranks {ranks.ranks} get different data: give the loader the model's "
                    "data-parallel process_group"
                )

    def sizes(self) -> list[int]:
        """Over how many ranks each wrapper averages."""
        groups: list[Any] = [one.process_group for one in self.ddp]
        meshes = {group.mesh_info.mesh for module in self.fsdp for group in units(module)}
        return [group.size() for group in groups] + [mesh.size() for mesh in meshes]

    @contextmanager
    def on(self, is_last: bool) -> Generator[None, None, None]:
        """Let a forward and backward exchange gradients, or keep them from it."""
        with ExitStack() as stack:
            if not is_last:
                for module in self.ddp:
                    # With a static graph, DDP has to exchange in its first backward; to do so in
                    # all keeps a run that was resumed equal to one that was not.
                    if not module.static_graph:
                        stack.enter_context(module.no_sync())
            self.set_fsdp(is_last)
            stack.callback(self.set_fsdp, True)
            yield

    def set_fsdp(self, is_on: bool) -> None:
        """Tell every FSDP2 unit. There is no public way to ask what was set before."""
        for module in self.fsdp:
            module.set_requires_gradient_sync(is_on, recurse=False)

    def drop_unfinished(self) -> None:
        """Forget what FSDP2 has added up and not exchanged: `zero_grad` does not reach it."""
        for module in self.fsdp:
            for parameter in (one for group in units(module) for one in group.fsdp_params):
                parameter.unsharded_accumulated_grad = None
                whole = getattr(parameter, "unsharded_param", None)
                if whole is not None:
                    whole.grad = None

    def scale(self, factor: float) -> None:
        """Multiply the gradients that there are."""
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def average_loose(self, ranks: Ranks, group: Any, is_first: bool) -> None:
        """Average the gradients that no wrapper exchanges. All data-parallel ranks.

        Args:
            ranks: those of the data-parallel group.
            group: the user's group, whose backend moves tensors of the model's device.
            is_first: look whether somebody else has exchanged them already.

        Raises:
            ValueError: the gradients are those of all ranks already.
        """
        if not self.loose or ranks.size == 1:
            return
        has = [one.grad is not None for one in self.loose]
        norm = sum(map(squares, self.loose)) if is_first else 0.0
        rows = ranks.gather((has, norm))
        if norm and len({row[1] for row in rows}) == 1:
            raise ValueError(
                "gradients are equal on all ranks before they were exchanged, so a wrapper has "
                "done it: give microbatches() the wrapped model (DistributedDataParallel)"
            )
        for parameter, *there in zip(self.loose, *(row[0] for row in rows), strict=True):
            if any(there):  # a gradient that no rank has stays None, as on one rank
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                part = local(parameter.grad)
                dist.all_reduce(part, group=group)
                part.div_(ranks.size)

    def has_gradients(self) -> bool:
        """Whether any gradient on this rank is not zero."""
        return any(squares(one) for one in self.parameters)

    def check_exchanged(self, ranks: Ranks) -> bool:
        """Look whether DDP has exchanged its gradients, after the last microbatch. All ranks.

        Returns:
            Whether that could be told: not from gradients that are all zero, or not finite.

        Raises:
            ValueError: it has not; on all ranks.
        """
        rows = ranks.gather([squares(one) for one in self.exchanged.values()])
        flat = [value for row in rows for value in row]
        if not all(map(math.isfinite, flat)):
            return False
        for name, *values in zip(self.exchanged, *rows, strict=True):
            if max(values) - min(values) > ROUNDING * max(values):
                raise ValueError(
                    f"the gradients of {name} differ between ranks after the step's last "
                    "microbatch, so DistributedDataParallel has not exchanged them: call the "
                    "wrapped model itself in the loop, not model.module or a part of it, and not "
                    "under no_sync()"
                )
        return any(flat) or not self.exchanged


def units(module: Any) -> Sequence[Any]:
    """FSDP2's own view of a module: the groups of parameters that it exchanges together."""
    state = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13
        groups = [state._fsdp_param_group]  # pyright: ignore[reportPrivateUsage]
    return [group for group in groups if group]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def squares(parameter: nn.Parameter) -> float:
    """Sum of the squares of a parameter's gradient on this rank; 0 where there is none."""
    if parameter.grad is None:
        return 0.0
    grad = local(parameter.grad)
    return float((grad.coalesce() if grad.is_sparse else grad).float().square().sum())
