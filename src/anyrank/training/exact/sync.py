"""The exchange of gradients with exact=True: the same bits on any number of ranks.

A microbatch's gradient depends on the weights, the microbatch and its random numbers. Wrappers
leave it unreduced; the terms are added up in the order of `tree_sum`, which depends only on the
number of microbatches. Parameters sharded by FSDP2 are summed by the unit (`fsdp`), all others
in buckets (`groups`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from anyrank.training.data.schedule import MicrobatchSlot
from anyrank.training.exact.checks import ChangeWatch, check_wrappers
from anyrank.training.exact.fsdp import (
    OrderedReduceScatter,
    exchanging,
    installed,
    reduction_dtype,
    unit_groups,
    watched,
)
from anyrank.training.exact.groups import GradientSums
from anyrank.training.exact.ordered_reduce import OrderedGroup
from anyrank.training.exact.rounds import Rounds
from anyrank.training.gradients.fsdp2 import check_names, parameter_groups
from anyrank.training.gradients.sync import GradientSync, used_on_any_rank
from anyrank.training.steps.step_record import StepRecord
from anyrank.world.ranks import Ranks


class ExactSync(GradientSync):
    """The exchange of one model's gradients in one pass over a step's microbatches.

    Args:
        model: wrapped or not, or a container of several.
        ranks: the ranks with different data.
        group: the user's group of these ranks.
        rounds: the rounds of the step.
        is_first: this is the model's first pass: compare whole buffers.
        compare: checks that the gradients of parameters are those that were remembered.
        remember: remembers them.

    Raises:
        TypeError, ValueError: as for `GradientSync`; a model whose sums cannot be ordered; FSDP2
            units after a first model without any.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        group: Any,
        rounds: Rounds,
        is_first: bool,
        compare: Callable[[Sequence[nn.Parameter]], None],
        remember: Callable[[Sequence[nn.Parameter]], None],
    ) -> None:
        super().__init__(model, ranks, group)
        self.divides_by = 1  # so that no bit of a term depends on the number of ranks
        self.compare, self.remember = compare, remember
        check_names(self.fsdp, is_exact=True)
        check_wrappers(self, ranks)
        self.rounds = rounds
        self.watch = ChangeWatch(self.modules, self.named, is_first)
        reduced: set[int] = set()
        self.reductions: list[tuple[Any, Any, OrderedReduceScatter]] = []
        if ranks.size > 1:  # FSDP2 reduces nothing on one rank
            for unit, unit_group in self.trainable_units():
                if not rounds.takes_turns:
                    raise ValueError(
                        "exact=True: the first model of this pass over the data has no FSDP2 "
                        "units, but this one has. Call microbatches() of the FSDP2 model first, "
                        "or shard both."
                    )
                parameter = unit_group.fsdp_params[0].sharded_param
                groups = unit_groups(parameter, rounds.count, ranks)
                self.reductions.append((unit, unit_group, OrderedReduceScatter(rounds, *groups)))
                reduced |= {id(param.sharded_param) for param in unit_group.fsdp_params}
        # DDP reduces nothing here.
        self.exchanged, self.meets, self.is_whole_in_last = {}, True, False
        self.summed = {n: param for n, param in self.named.items() if id(param) not in reduced}
        everybody = OrderedGroup(group, rounds.count, [[index] for index in range(ranks.size)])
        self.sums = GradientSums(self.summed, rounds, everybody, self.rounded(self.summed))
        self.is_unsynced = False

    def rounded(self, summed: Mapping[str, nn.Parameter]) -> dict[str, torch.dtype]:
        """Return the dtypes to which FSDP2 would round the sums of these parameters."""
        dtypes = {
            id(parameter.sharded_param): reduction_dtype(parameter)
            for _, group in self.trainable_units()
            for parameter in group.fsdp_params
        }
        rounded = {name: dtypes.get(id(parameter)) for name, parameter in summed.items()}
        return {name: dtype for name, dtype in rounded.items() if dtype is not None}

    def trainable_units(self) -> Iterator[tuple[Any, Any]]:
        """Yield the FSDP2 modules that train parameters, each with its group of parameters."""
        for unit in self.fsdp:
            for group in parameter_groups(unit):
                if any(param.sharded_param.requires_grad for param in group.fsdp_params):
                    yield unit, group

    @contextmanager
    def active(self) -> Generator[None, None, None]:
        """Run the pass over the microbatches: wrappers reduce in the order of this object."""
        with ExitStack() as stack:
            for module in self.ddp:
                # A forward outside the pass has prepared DDP to reduce in the next backward, even
                # under no_sync().
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
        self.rounds.begin(slot.k, is_last)
        self.sums.begin_microbatch()
        yield
        groups = [group for _, group, _ in self.reductions]
        self.is_unsynced |= not all(g.reduce_grads and g.all_reduce_grads for g in groups)
        self.sums.end_microbatch()

    def drop_unfinished(self) -> None:
        """Drop the terms of a pass that was not ended, and restore the gradients from before it."""
        for parameter in self.sums.parameters.values():
            parameter.grad = None
        self.sums.restore()

    def has_gradients(self) -> bool:
        return bool(self.sums.used or self.sums.late) or super().has_gradients()

    def complete(self, record: StepRecord, is_first: bool) -> StepRecord:
        used = [reduction.used for _, _, reduction in self.reductions]
        reason = self.refusal()
        refusal = record.refusal or (reason and f"exact=True: {reason}")
        return replace(record, states=self.sums.states(), used=used, refusal=refusal)

    def finish(self, record: StepRecord, factor: float | None) -> None:
        """Exchange the sums and set them as gradients, then scale all gradients. Collective."""
        self.sums.exchange(used_on_any_rank(self.summed, record))
        for (_, group, reduction), used in zip(self.reductions, record.used, strict=True):
            # FSDP2 set zeros for parameters that no microbatch used: without it they have none.
            for number, param in enumerate(group.fsdp_params):
                if number in reduction.without and number not in used:
                    param.sharded_param.grad = None
        if factor is not None:
            self.scale(factor)
        self.remember([*self.named.values()])

    def check_norm_type(self, norm_type: float) -> None:
        if norm_type not in (1, 2, math.inf):
            raise ValueError(f"norm_type={norm_type}: must be 1, 2 or inf with exact=True")

    @contextmanager
    def clipping(self) -> Generator[None, None, None]:
        parameters = [*self.named.values()]
        self.compare(parameters)  # now, because clipping hides earlier changes
        yield
        self.remember(parameters)

    def refusal(self) -> str | None:
        """The reason why this rank's sums are not exact, with the way out; None if they are."""
        if changed := self.watch.changed():
            return (
                f"the loop over microbatches() changed {sorted(changed)[:8]} on each rank "
                "differently. Use a module without such state (LayerNorm in place of BatchNorm), "
                "or update the state, or step the optimizer, after the loop."
            )
        if self.is_unsynced:
            return (
                "set_requires_gradient_sync(False) was called in the loop over microbatches(), so "
                "FSDP2 reduces gradients in its own order. Remove the call: the loop reduces "
                "gradients itself."
            )
        if not all(reduction.is_complete for _, _, reduction in self.reductions):
            return (
                "an FSDP2 module has gradients in some microbatches, but was not used in the last "
                "one. Run the same modules in every microbatch."
            )
        if any(reduction.is_repeated for _, _, reduction in self.reductions):
            return (
                "an FSDP2 module got gradients more than once in a microbatch. Sum the losses and "
                "call step.backward once, and call each nested FSDP2 module once per microbatch; "
                "or apply fully_shard only to the outermost module."
            )
        if self.sums.repeated:
            return (
                f"{sorted(self.sums.repeated)[:8]} got gradients more than once in a microbatch, "
                "which is one term of the sum. Sum the losses and call step.backward once, and "
                "recompute with use_reentrant=False."
            )
        if self.sums.late:
            return (
                f"{sorted(self.sums.late)[:8]} were frozen when the loop over microbatches() "
                "started, and have gradients now. Call requires_grad_() before the loop."
            )
        return None
