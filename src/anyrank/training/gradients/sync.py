"""The exchange of gradients in a step: when it happens, and by what they are divided.

DDP and FSDP2 average over their ranks in every backward; here they do so in the step's last
microbatch only. Parameters without a wrapper are averaged once, after the last microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anyrank.files.content_hash import content_hash
from anyrank.tensors.torch_classes import is_dtensor, is_fsdp1, is_fsdp2
from anyrank.training.data.schedule import MicrobatchSlot
from anyrank.training.gradients.buckets import average, local
from anyrank.training.gradients.fsdp2 import check_names, drop_accumulated, parameter_groups
from anyrank.training.steps.step_record import FROZEN, GRADIENT, NO_GRADIENT, StepRecord
from anyrank.wording import count
from anyrank.world.alike import Compared
from anyrank.world.ranks import Ranks


class GradientSync:
    """The gradient exchange of one model's wrappers, in one pass over a step's microbatches.

    Args:
        model: wrapped or not, or a container of several.
        ranks: the ranks with different data. A wrapper may average over more ranks, some with the
            same data, if each part of the data is on the same number of them.
        group: the user's group of these ranks, whose backend supports the model's device.

    Attributes:
        modules: the model's modules by name; looked up in each pass, because they may change.
        named: the model's parameters by name.
        summed: parameters whose gradients are summed here, not by a wrapper; frozen ones too,
            because ranks that freeze different parameters must still meet, and compare.
        exchanged: parameters whose gradients DDP averages.
        meets: whether the ranks meet at the end of each step; otherwise their wrappers do, in
            backward.
        is_whole_in_last: whether gradients of losses without weights are the step's as soon as the
            last microbatch's backward has run.
        divides_by: divisor that the exchange applies to the sum of the ranks' gradients.

    Raises:
        TypeError: FSDP1.
        ValueError: a wrapper that averages over fewer ranks; a tensor that is sharded over ranks
            with different data.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, group: Any) -> None:
        self.ranks, self.group, self.divides_by = ranks, group, ranks.size
        self.modules = dict(model.named_modules())
        kinds = [*self.modules.values()]
        if any(is_fsdp1(module) for module in kinds):
            raise TypeError("the model has FSDP1 modules. Shard it with fully_shard (FSDP2).")
        self.ddp = [module for module in kinds if isinstance(module, DistributedDataParallel)]
        self.fsdp = [module for module in kinds if is_fsdp2(module)]
        if self.fsdp:
            check_names(self.fsdp, is_exact=False)
        reshard(self.fsdp)
        self.named = _parameters_of(self.modules)
        self.parameters = [param for param in self.named.values() if param.requires_grad]
        # By its own names: a container may also hold a wrapped module under another name.
        inner = [(module, dict(module.module.named_parameters())) for module in self.ddp]
        wrapped = {id(param) for _, named in inner for param in named.values()}
        if self.fsdp:
            wrapped |= {id(param) for param in self.named.values() if is_dtensor(param)}
        # Without the wrapper's forward, FSDP2 parameters are DTensors and raise; DDP's do not.
        self.exchanged = {
            name: parameter
            for module, named in inner
            for name, parameter in named.items()
            if parameter.requires_grad and name not in module.parameters_to_ignore
        }
        self.summed = {n: param for n, param in self.named.items() if id(param) not in wrapped}
        self.meets = bool(self.summed)
        is_trained = any(parameter.requires_grad for parameter in self.summed.values())
        self.is_whole_in_last = ranks.size == 1 or not is_trained
        self._check_sizes()
        self._check_meshes()

    def _check_sizes(self) -> None:
        groups: list[Any] = [module.process_group for module in self.ddp]
        if self.fsdp:
            units = [group for module in self.fsdp for group in parameter_groups(module)]
            groups += {unit.mesh_info.mesh for unit in units}
        for number in [group.size() for group in groups]:
            if number % self.ranks.size:
                raise ValueError(
                    f"the model averages gradients over {count(number, 'rank')}, but the loader "
                    f"divides the data among {self.ranks.size}. Pass the model's data-parallel "
                    "group to the loader: ElasticLoader(process_group=...)."
                )

    def _check_meshes(self) -> None:
        trainable = [param for param in self.summed.values() if param.requires_grad]
        for mesh in {param.device_mesh for param in trainable if is_dtensor(param)}:
            if len(set(mesh.mesh.flatten().tolist()).intersection(self.ranks.ranks)) > 1:
                raise ValueError(
                    f"parameters are sharded over {mesh}, whose ranks need the same data, but "
                    f"ranks {self.ranks.ranks} get different data. Pass the model's data-parallel "
                    "group to the loader: ElasticLoader(process_group=...)."
                )

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Run the pass over the microbatches."""
        yield

    def on(self, slot: MicrobatchSlot, is_last: bool) -> AbstractContextManager[None]:
        """Run forward and backward of a microbatch; exchange gradients only if `is_last`."""
        return self._exchanging(is_last) if self.ddp or self.fsdp else nullcontext()

    @contextmanager
    def _exchanging(self, is_last: bool) -> Generator[None, None, None]:
        with ExitStack() as stack:
            if not is_last:
                for module in self.ddp:
                    # With a static graph, DDP must exchange in its first backward; exchanging in
                    # all keeps a resumed run equal to one that was not interrupted.
                    if not module.static_graph:
                        stack.enter_context(module.no_sync())
            self._set_fsdp(is_last)
            stack.callback(self._set_fsdp, True)
            yield

    def _set_fsdp(self, is_on: bool) -> None:
        """Set it for every FSDP2 unit. There is no public way to read the former value."""
        for module in self.fsdp:
            module.set_requires_gradient_sync(is_on, recurse=False)

    def drop_gradients(self) -> None:
        """Drop the remains of an earlier attempt at the step."""
        for parameter in self.parameters:
            parameter.grad = None

    def drop_unfinished(self) -> None:
        """Drop gradients that FSDP2 has not exchanged yet, which `zero_grad` does not reset."""
        if self.fsdp:
            for module in self.fsdp:
                drop_accumulated(module)

    def values(self) -> dict[str, str]:
        """Return the shape and hash of each parameter that no wrapper keeps the same."""
        alone = {
            name: parameter
            for name, parameter in self.summed.items()
            if not (self.fsdp and is_dtensor(parameter))
        }
        return {n: f"{list(p.shape)} {content_hash(local(p))}" for n, p in alone.items()}

    def has_gradients(self) -> bool:
        """Return True if any gradient on this rank is not zero."""
        return any(map(squares, self.parameters))

    def complete(self, record: StepRecord, is_first: bool) -> StepRecord:
        """Complete this rank's record with the state of its gradients, after its microbatches.

        Args:
            record: record of the microbatches.
            is_first: measure the gradients too, so that the ranks see whether each is exchanged.
        """
        record = replace(record, states=self.states())
        if not is_first:
            return record
        norm = sum(map(squares, self.summed.values()))
        exchanged = [*map(squares, self.exchanged.values())]
        return replace(
            record,
            squared_norm=norm,
            norm=Compared(repr(norm), self.ranks.rank),
            least=exchanged,
            most=exchanged,
            is_finite=all(map(math.isfinite, exchanged)),
        )

    def states(self) -> bytes:
        """Return the state of each parameter summed here: frozen, without a gradient, or with
        it."""
        return bytes(map(_state_of, self.summed.values()))

    def finish(self, record: StepRecord, factor: float | None) -> None:
        """Scale all gradients, and average those that no wrapper averages. Collective over the
        data-parallel ranks.

        Args:
            record: record of all ranks.
            factor: multiplies all gradients; None for 1.
        """
        if factor is not None:
            self.scale(factor)
        if self.ranks.size == 1:
            return
        used = used_on_any_rank(self.summed, record)
        for parameter in used.values():  # a gradient that no rank has stays None, as on one rank
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        if used:
            average(used, self.ranks.size, self.group)

    def check_norm_type(self, norm_type: float) -> None:
        """Check that gradients can be clipped by a norm; raise ValueError otherwise."""
        if not norm_type >= 1:
            raise ValueError(f"norm_type={norm_type}: must be at least 1, or inf")

    @contextmanager
    def clipping(self) -> Generator[None, None, None]:
        """A context in which the gradients of this exchange may be clipped."""
        yield

    def scale(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)


def _parameters_of(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of known modules like `named_parameters`: each by its first name."""
    names: dict[nn.Parameter, str] = {}
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            names.setdefault(parameter, name)
    return {name: parameter for parameter, name in names.items()}


def used_on_any_rank(
    summed: Mapping[str, nn.Parameter], record: StepRecord
) -> dict[str, nn.Parameter]:
    """Return the parameters that have a gradient on some rank."""
    assert record.states is not None  # otherwise `judge` has raised
    rows = zip(summed.items(), record.states, strict=True)
    return {name: parameter for (name, parameter), state in rows if state == GRADIENT}


def _state_of(parameter: nn.Parameter) -> int:
    if not parameter.requires_grad:
        return FROZEN
    return NO_GRADIENT if parameter.grad is None else GRADIENT


def squares(parameter: nn.Parameter) -> float:
    """Return the sum of the squares of a parameter's gradient on this rank; 0 if there is none."""
    if parameter.grad is None:
        return 0.0
    grad = local(parameter.grad)
    return float((grad.coalesce() if grad.is_sparse else grad).float().square().sum())


def reshard(units: Iterable[Any]) -> None:
    """Make the sharded parameters of FSDP2's units current, because they have the gradients.

    Its root keeps its parameters whole after a forward that had no backward.
    """
    for unit in units:
        unit.reshard()
