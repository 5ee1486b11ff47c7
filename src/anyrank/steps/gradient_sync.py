"""The exchange of gradients in a step: when, and by what they are divided.

DDP and FSDP2 average over their ranks in every backward; here they do so in the step's last
microbatch only. Parameters without a wrapper are averaged once, after the last microbatch.
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

from anyrank.data.schedule import MicrobatchSlot
from anyrank.steps.fsdp_groups import check_names, drop_accumulated, parameter_groups
from anyrank.wording import count
from anyrank.world.failures import different
from anyrank.world.ranks import Ranks

FROZEN, NO_GRADIENT, GRADIENT = range(3)  # states of a parameter
ROUNDING = 1e-5  # of sums of the same float32 values in different orders


class GradientSync:
    """The gradient exchange of one model's wrappers.

    Args:
        model: wrapped or not, or a container of several.
        ranks: the ranks with different data. A wrapper may average over more ranks, some with the
            same data, if each part of the data is on the same number of them.

    Raises:
        TypeError: FSDP1.
        ValueError: a wrapper that averages over fewer ranks; a tensor that is sharded over ranks
            with different data.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        # In every step, as modules may change between two: so the model is walked rarely.
        modules = list(model.modules())
        if any(isinstance(module, FullyShardedDataParallel) for module in modules):
            raise TypeError("the model holds FSDP1 modules: shard it with fully_shard (FSDP2)")
        self.ddp = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self.fsdp = [module for module in modules if isinstance(module, FSDPModule)]
        check_names(self.fsdp, is_exact=False)
        for module in self.fsdp:
            module.reshard()
        self.named = dict(model.named_parameters())
        self.parameters = [param for param in self.named.values() if param.requires_grad]
        inner = [(module, dict(module.module.named_parameters())) for module in self.ddp]
        wrapped = {id(param) for _, named in inner for param in named.values()}
        if self.fsdp:
            wrapped |= {id(param) for param in self.named.values() if isinstance(param, DTensor)}
        # Without the wrapper's forward, FSDP2 parameters are DTensors and raise; DDP's do not.
        self.exchanged = {
            name: parameter
            for module, named in inner
            for name, parameter in named.items()
            if parameter.requires_grad and name not in module.parameters_to_ignore
        }
        # Frozen ones too: ranks that freeze different parameters must still meet, and compare.
        self.unwrapped = {
            name: parameter
            for name, parameter in self.named.items()
            if id(parameter) not in wrapped
        }
        for number in self.sizes():
            if number % ranks.size:
                raise ValueError(
                    f"the model averages gradients over {count(number, 'rank')}, and the data is "
                    f"divided among {ranks.size}: give the loader the model's data-parallel "
                    "process_group"
                )
        trainable = [param for param in self.unwrapped.values() if param.requires_grad]
        for mesh in {param.device_mesh for param in trainable if isinstance(param, DTensor)}:
            if len(set(mesh.mesh.flatten().tolist()).intersection(ranks.ranks)) > 1:
                raise ValueError(
                    f"parameters are sharded over {mesh}, whose ranks need the same data, and "
                    f"ranks {ranks.ranks} get different data: give the loader the model's "
                    "data-parallel process_group"
                )

    def sizes(self) -> list[int]:
        """The number of ranks over which each wrapper averages."""
        groups: list[Any] = [module.process_group for module in self.ddp]
        meshes = {
            group.mesh_info.mesh for module in self.fsdp for group in parameter_groups(module)
        }
        return [group.size() for group in groups] + [mesh.size() for mesh in meshes]

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Run the pass over the microbatches."""
        yield

    @contextmanager
    def on(self, slot: MicrobatchSlot, is_last: bool) -> Generator[None, None, None]:
        """Run forward and backward of a microbatch; exchange gradients only if `is_last`."""
        with ExitStack() as stack:
            if not is_last:
                for module in self.ddp:
                    # With a static graph, DDP must exchange in its first backward; exchanging in
                    # all keeps a resumed run equal to one that was not interrupted.
                    if not module.static_graph:
                        stack.enter_context(module.no_sync())
            self.set_fsdp(is_last)
            stack.callback(self.set_fsdp, True)
            yield

    def set_fsdp(self, is_on: bool) -> None:
        """Set it for every FSDP2 unit. There is no public way to read the former value."""
        for module in self.fsdp:
            module.set_requires_gradient_sync(is_on, recurse=False)

    def drop_gradients(self) -> None:
        """Drop what an earlier try at the step has left."""
        for parameter in self.parameters:
            parameter.grad = None

    def drop_unfinished(self) -> None:
        """Drop gradients that FSDP2 has not exchanged yet, which `zero_grad` does not reset."""
        for module in self.fsdp:
            drop_accumulated(module)

    def finish(
        self,
        ranks: Ranks,
        group: Any,
        factor: float | None,
        is_first: bool,
        losses: Sequence[float],
    ) -> bool:
        """Scale and exchange what the wrappers have not. All data-parallel ranks.

        Args:
            ranks: the data-parallel ranks.
            group: the user's group, whose backend supports the model's device.
            factor: multiplies all gradients; None for 1.
            is_first: check that each gradient is exchanged once.
            losses: of this rank's microbatches, where `is_first`.

        Returns:
            Whether it was checked.

        Raises:
            ValueError: on all ranks, as `average_unwrapped` and `check_exchanged`.
        """
        if factor is not None:
            self.scale(factor)
        is_judged = self.average_unwrapped(ranks, group, is_first, losses)
        return is_first and self.check_exchanged(ranks) and is_judged

    def scale(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def average_unwrapped(
        self, ranks: Ranks, group: Any, is_first: bool, losses: Sequence[float]
    ) -> bool:
        """Average the gradients of parameters without a wrapper. All data-parallel ranks.

        Args:
            ranks: the data-parallel ranks.
            group: the user's group, whose backend supports the model's device.
            is_first: check that the gradients were not exchanged already.
            losses: of this rank's microbatches, where `is_first`.

        Returns:
            Whether that could be determined.

        Raises:
            ValueError: the gradients were exchanged already, or ranks have different parameters or
                freeze different ones; on all ranks.
        """
        if not self.unwrapped or ranks.size == 1:
            return True
        states = bytes(map(state_of, self.unwrapped.values()))
        norm = sum(map(squares, self.unwrapped.values())) if is_first else 0.0
        rows = ranks.gather((states, norm, losses))
        check_trainable(list(self.unwrapped), [row[0] for row in rows], ranks)
        is_judged = _check_not_exchanged([row[1] for row in rows], [row[2] for row in rows])
        every = zip(self.unwrapped.values(), *(row[0] for row in rows), strict=True)
        for parameter, *there in every:
            if GRADIENT in there:  # a gradient that no rank has stays None, as on one rank
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                part = local(parameter.grad)
                dist.all_reduce(part, group=group)
                part.div_(ranks.size)
        return is_judged

    def has_gradients(self) -> bool:
        """Whether any gradient on this rank is not zero."""
        return any(squares(param) for param in self.parameters)

    def check_exchanged(self, ranks: Ranks) -> bool:
        """Check that DDP has exchanged its gradients, after the last microbatch. All ranks.

        Returns:
            Whether this could be determined: not from gradients that are all zero, or not finite.

        Raises:
            ValueError: DDP has not exchanged them; on all ranks.
        """
        rows = ranks.gather([squares(param) for param in self.exchanged.values()])
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


def state_of(parameter: nn.Parameter) -> int:
    """Whether a parameter is frozen, has no gradient, or has a gradient."""
    if not parameter.requires_grad:
        return FROZEN
    return NO_GRADIENT if parameter.grad is None else GRADIENT


def check_trainable(names: Sequence[str], states: Sequence[bytes], ranks: Ranks) -> None:
    """Refuse parameters that are trained on some ranks only.

    Args:
        names: of this rank's parameters.
        states: for each rank, the `state_of` each of its parameters.
        ranks: the data-parallel ranks.

    Raises:
        ValueError: on all ranks; names the first such parameter.
    """
    if len(set(map(len, states))) > 1:
        counts = {rank: str(len(there)) for rank, there in zip(ranks.ranks, states, strict=True)}
        title = "the number of parameters without a wrapper differs between ranks"
        raise ValueError(
            f"{different(title, counts, ranks.named)}: build the same model on all ranks"
        )
    for name, *there in zip(names, *states, strict=True):
        trained = {rank: str(s != FROZEN) for rank, s in zip(ranks.ranks, there, strict=True)}
        if len(set(trained.values())) > 1:
            title = f"requires_grad of {name} differs between ranks"
            raise ValueError(
                f"{different(title, trained, ranks.named)}: freeze the same parameters on all ranks"
            )


def _check_not_exchanged(norms: Sequence[float], losses: Sequence[Sequence[float]]) -> bool:
    """Refuse gradients that a wrapper has exchanged already.

    Args:
        norms: of each rank's gradients before the exchange; 0 where nothing is to be checked.
        losses: of each rank's microbatches.

    Returns:
        Whether this could be determined: not where the losses are equal on all ranks, as in a run
        on dummy data, since the gradients may then be equal by themselves.

    Raises:
        ValueError: they are equal on all ranks, and the losses are not; on all ranks.
    """
    # Where all ranks overflow, as with the first scale of a GradScaler, all norms are inf.
    if len(norms) > 1 and norms[0] and math.isfinite(norms[0]) and len(set(norms)) == 1:
        if all(list(row) == list(losses[0]) for row in losses):
            return False
        raise ValueError(
            "gradients are equal on all ranks before the exchange, so a wrapper has exchanged "
            "them: give microbatches() the wrapped model (DistributedDataParallel)"
        )
    return True


def reshard(model: nn.Module) -> None:
    """Make a model's parameters the sharded ones, which have the gradients.

    FSDP2's root keeps its parameters whole after a forward that had no backward.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def put(parameter: Any, part: torch.Tensor) -> None:
    """Make a tensor this rank's part of the parameter's gradient."""
    if isinstance(parameter, DTensor):
        parameter.grad = DTensor.from_local(
            part,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    else:
        parameter.grad = part


def squares(parameter: nn.Parameter) -> float:
    """Sum of the squares of a parameter's gradient on this rank; 0 where there is none."""
    if parameter.grad is None:
        return 0.0
    grad = local(parameter.grad)
    return float((grad.coalesce() if grad.is_sparse else grad).float().square().sum())
