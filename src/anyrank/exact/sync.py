"""The exchange of gradients with exact=True: the same bits on any number of ranks.

A microbatch's gradient depends on the weights, the microbatch and its random stream. Wrappers keep
theirs unreduced; the terms are added up in the order of `tree_sum`, which depends on the number of
microbatches alone. Parameters sharded by FSDP2 are summed by the unit (`fsdp`), all others by
groups (`groups`), in the rounds that `rounds` says.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from anyrank.data.schedule import MicrobatchSlot
from anyrank.exact.checks import check_wrappers
from anyrank.exact.fsdp import (
    OrderedReduceScatter,
    exchanging,
    installed,
    unit_groups,
    watched,
)
from anyrank.exact.groups import ExactGroups
from anyrank.exact.ordered_reduce import OrderedGroup
from anyrank.exact.rounds import Rounds
from anyrank.exact.watch import ChangeWatch
from anyrank.steps.fsdp_groups import check_names, parameter_groups, reduction_dtype
from anyrank.steps.gradient_sync import GRADIENT, GradientSync, check_trainable
from anyrank.world.ranks import Ranks


class PassRecord(NamedTuple):
    """What a rank has seen in a pass, for comparison over the ranks.

    Attributes:
        states: of each parameter that `ExactGroups` adds up.
        used: of each FSDP2 unit, the parameters that a microbatch has used.
        refusal: why this rank's sums are not exact, if they are not.
    """

    states: bytes
    used: list[set[int]]
    refusal: str | None


class ExactSync(GradientSync):
    """The exchange of one model's gradients in one pass over a step's microbatches.

    Args:
        model: wrapped or not, or a container of several.
        ranks: the ranks with different data.
        group: the user's group of these ranks.
        rounds: of the step.
        is_first: exchange after the backward: what fails in a first step is told before.

    Raises:
        TypeError, ValueError: as `GradientSync`; a model whose sums cannot be ordered.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, group: Any, rounds: Rounds, is_first: bool
    ) -> None:
        super().__init__(model, ranks)
        check_names(self.fsdp, is_exact=True)
        check_wrappers(self, ranks)
        self.ranks, self.rounds = ranks, rounds
        self.watch = ChangeWatch(model, is_first)
        reduced: set[int] = set()
        self.reductions: list[tuple[Any, Any, OrderedReduceScatter]] = []
        if ranks.size > 1:  # FSDP2 reduces nothing on one rank
            for unit, unit_group in self.trainable_units():
                parameter = unit_group.fsdp_params[0].sharded_param
                groups = unit_groups(parameter, rounds.count, ranks)
                self.reductions.append((unit, unit_group, OrderedReduceScatter(rounds, *groups)))
                reduced |= {id(param.sharded_param) for param in unit_group.fsdp_params}
        # Frozen ones too: ranks that freeze different parameters must still meet, and compare.
        summed = {
            name: parameter
            for name, parameter in self.named.items()
            if id(parameter) not in reduced
        }
        everybody = OrderedGroup(group, rounds.count, [[index] for index in range(ranks.size)])
        self.sums = ExactGroups(summed, rounds, everybody, self.rounded(summed))
        # FSDP2's own collectives in the backward may not come between those of the groups.
        self.is_early = ranks.size > 1 and not self.fsdp and not is_first
        self.is_unsynced = False

    def rounded(self, summed: Mapping[str, nn.Parameter]) -> dict[str, torch.dtype]:
        """To what FSDP2 would round the sums of parameters that are summed here instead."""
        dtypes = {
            id(parameter.sharded_param): reduction_dtype(parameter)
            for _, group in self.trainable_units()
            for parameter in group.fsdp_params
        }
        rounded = {name: dtypes.get(id(parameter)) for name, parameter in summed.items()}
        return {name: dtype for name, dtype in rounded.items() if dtype is not None}

    def trainable_units(self) -> Iterator[tuple[Any, Any]]:
        """The FSDP2 modules that train parameters, each with its group of parameters."""
        for unit in self.fsdp:
            for group in parameter_groups(unit):
                if any(param.sharded_param.requires_grad for param in group.fsdp_params):
                    yield unit, group

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Run the pass over the microbatches: wrappers reduce as this object says."""
        if self.ranks.size > 1 and (self.is_early or self.rounds.is_interleaved):
            # They are exchanged before `finish`: the groups are the same on all ranks.
            rows = self.ranks.gather(self.sums.states())
            check_trainable(list(self.sums.parameters), rows, self.ranks)
        with ExitStack() as stack:
            for module in self.ddp:
                # A forward outside of the pass has prepared DDP to exchange in the next backward,
                # whatever no_sync() says then.
                module.reducer._reset_state()  # pyright: ignore[reportPrivateUsage]
                stack.enter_context(module.no_sync())
            for module in self.fsdp:
                stack.enter_context(exchanging(module))
            for unit, group, reduction in self.reductions:
                stack.enter_context(installed(unit, group, reduction))
                stack.enter_context(watched(unit, group, reduction))
            self.sums.set_earlier_aside()
            stack.enter_context(self.sums.taking())
            yield

    @contextmanager
    def on(self, slot: MicrobatchSlot, is_last: bool) -> Generator[None, None, None]:
        """Run forward and backward of a microbatch, whose gradient becomes a term of the sum."""
        self.rounds.number += 1
        exchanges = self.ranks.size > 1 and self.rounds.exchanges
        self.sums.begin(exchanges and self.is_early)
        yield
        groups = [group for _, group, _ in self.reductions]
        self.is_unsynced |= not all(g.reduce_grads and g.all_reduce_grads for g in groups)
        self.sums.end()
        if exchanges and (self.is_early or not is_last):
            self.sums.exchange()

    def drop_unfinished(self) -> None:
        """Drop the terms, and restore the gradients from before the pass, which was not ended."""
        for parameter in self.sums.parameters.values():
            parameter.grad = None
        self.sums.restore()

    def has_gradients(self) -> bool:
        return bool(self.sums.used) or super().has_gradients()

    def finish(
        self,
        ranks: Ranks,
        group: Any,
        factor: float | None,
        is_first: bool,
        losses: Sequence[float],
    ) -> bool:
        """Exchange the sums, then scale them. All data-parallel ranks, after the last microbatch.

        Arguments, result and errors are those of `GradientSync.finish`.

        Raises:
            ValueError: an FSDP2 module was not part of the last microbatch, or got gradients
                several times in one.
        """
        self.exchange_sums()
        if factor is not None:
            self.scale(factor)
        return True

    def refusal(self) -> str | None:
        """Why this rank's sums of the pass are not exact, and the way out; None if they are."""
        if changed := self.watch.changed():
            return (
                f"the loop over microbatches() changes {sorted(changed)[:8]}, and each rank has "
                "the changes of its own microbatches: use a module without such state, as "
                "LayerNorm for BatchNorm, and update it, or step the optimizer, after the loop"
            )
        if self.is_unsynced:
            return (
                "set_requires_gradient_sync(False) was called in the loop over microbatches(), so "
                "FSDP2 adds up gradients in an order of its own: remove the call, the loop "
                "exchanges gradients when it has to"
            )
        if not all(reduction.is_complete for _, _, reduction in self.reductions):
            return (
                "an FSDP2 module has gradients in some microbatches, and was not part of the last "
                "one: run the same modules in every microbatch"
            )
        if any(reduction.is_repeated for _, _, reduction in self.reductions):
            return (
                "an FSDP2 module got gradients more than once in a microbatch: add up the losses "
                "for one step.backward, and run each module that fully_shard wraps inside of "
                "another once in it, or wrap the outermost module alone"
            )
        if self.sums.repeated:
            return (
                f"{sorted(self.sums.repeated)[:8]} got gradients more than once in a microbatch, "
                "and the first is exchanged as it comes: add up the losses for one step.backward, "
                "and recompute with use_reentrant=False"
            )
        if late := self.sums.used - self.sums.place.keys():
            return (
                f"{sorted(late)[:8]} were frozen when the loop over microbatches() began, and have "
                "gradients now: call requires_grad_() before the loop"
            )
        return None

    def exchange_sums(self) -> None:
        """Deliver the sum of each parameter's terms. All ranks."""
        reductions = [reduction for _, _, reduction in self.reductions]
        own = PassRecord(self.sums.states(), [r.used for r in reductions], self.refusal())
        rows = self.ranks.gather(own)
        if refusal := next((row.refusal for row in rows if row.refusal), None):
            raise ValueError(f"exact=True: {refusal}")
        names = list(self.sums.parameters)
        check_trainable(names, [row.states for row in rows], self.ranks)
        every = zip(names, *(row.states for row in rows), strict=True)
        used = {name for name, *there in every if GRADIENT in there}
        self.sums.exchange()
        self.sums.deliver(used)
        self.sums.restore()
        for (_, group, reduction), *there in zip(
            self.reductions, *(row.used for row in rows), strict=True
        ):
            # FSDP2 gave zeros to parameters that no microbatch used: as without it, they have none.
            for number, param in enumerate(group.fsdp_params):
                if number in reduction.without and not any(number in used for used in there):
                    param.sharded_param.grad = None
