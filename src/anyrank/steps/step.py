"""One optimizer step: this rank's microbatches, and a backward that weights their losses.

A microbatch's random numbers depend on (seed, step, k) alone, not on the rank that runs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from anyrank.checks import check_model, check_type
from anyrank.data.fetch import request_for
from anyrank.data.schedule import MicrobatchSlot, Schedule
from anyrank.errors import CheckpointError
from anyrank.random_state.streams import accelerators_of, kept, reseed
from anyrank.steps.backwards import Backwards
from anyrank.steps.collective_result import one_ahead
from anyrank.steps.gradient_sync import GradientSync, reshard
from anyrank.steps.norm import clip_gradients
from anyrank.steps.step_state import LoaderPass, StepProgress
from anyrank.tensors.hashing import derive
from anyrank.world.arguments import same_arguments
from anyrank.world.ranks import Ranks, one_process


class Step:
    """One step of a run, created by iterating an `ElasticLoader`.

    Attributes:
        number: steps of the run before this one.
        epoch: from 0.
        samples: samples of the global batch, on all ranks together.

    Example::

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = anyrank.ElasticLoader(torch.randn(32, 4), global_batch=16, microbatch=4)
        for step in loader:
            for batch in step.microbatches(model):
                step.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            print(step.number, step.loss())
    """

    def __init__(self, progress: StepProgress, schedule: Schedule, loader_pass: LoaderPass) -> None:
        plan = progress.plan
        self.number, self.epoch, self.samples = plan.number, plan.epoch, plan.samples
        self._plan = plan
        self._progress = progress
        self._schedule = schedule
        self._pass = loader_pass
        self._slot: MicrobatchSlot | None = None  # the microbatch of the loop's current body
        self._num_calls = 0  # of `microbatches`
        self._model: nn.Module | None = None  # of the last call of `microbatches`
        self._backwards = Backwards(plan.number)  # of the last call of `microbatches`
        self._exponent: int | None = None  # with exact=True, as that of the pass

    @property
    def k(self) -> int:
        """Index of the current microbatch in the step, from 0, independent of the rank count.

        Raises:
            ValueError: not within `microbatches`.
        """
        return self._current_slot().k

    @property
    def is_copy(self) -> bool:
        """Whether the current microbatch runs with weight 0, as this rank has fewer than others.

        Raises:
            ValueError: not within `microbatches`.
        """
        return self._current_slot().is_copy

    def microbatches(self, model: nn.Module, *, own_backward: bool = False) -> Iterator[Any]:
        """This rank's batches; run forward and backward of each within the loop's body.

        Within the body, the random streams of Python, numpy and torch depend on (seed, step,
        microbatch) alone; afterwards they continue as before. DDP and FSDP2 exchange gradients in
        the last microbatch only. Ranks with fewer microbatches run one again with weight 0. All
        data-parallel ranks call, and run to the end.

        A batch is returned when all ranks have theirs: an error of the dataset on one rank is
        raised on all.

        Afterwards it can be called again for another pass over the same batches (for the generator,
        after the discriminator's step): with different random numbers in the body, and its own
        `loss()`. The batches are fetched again, in this process.

        Args:
            model: the wrapped model, or a container of several. Gradients of parameters without a
                wrapper are averaged over the ranks too.
            own_backward: allow backward passes without `backward` or `scale`. You weight the losses
                yourself then: the sum over a rank's microbatches is averaged over the ranks.

        Raises:
            CheckpointError: a worker returned samples that differ from the plan.
            RankError: the dataset raised on some of several ranks; names the sample and the cause.
                On a single rank the dataset's own exception is raised.
            ValueError: a second call before the first has ended; a model that averages over ranks
                other than the loader's; a backward without `step.backward`; a microbatch without
                one, where others have one; a forward without the wrapper, detected in the first
                step of a model.
        """
        check_model(model)
        progress = self._progress
        if progress.is_started and not progress.is_complete:
            raise ValueError(
                f"step {self.number}: microbatches() was called already, and has not ended"
            )
        sync = self._sync(model, own_backward)
        if progress.is_repeated and not self._num_calls:
            sync.drop_gradients()
        devices = accelerators_of(sync.named.values())
        slots = self._plan.slots(self._pass.index, self._pass.size, self._pass.is_interleaved)
        again = (self._num_calls,) if self._num_calls else ()
        self._num_calls += 1
        progress.is_started, progress.is_complete = True, False
        self._backwards = Backwards(self.number)
        self._exponent, self._model = None, model
        unknown = not own_backward and id(model) not in self._pass.checked
        watching = self._backwards.watching(sync.parameters if unknown else ())
        try:
            with kept(devices), sync.active(), watching:
                for number, (slot, batch) in enumerate(zip(slots, self._fetch(slots), strict=True)):
                    seed = self._schedule.order.seed
                    reseed(derive(seed, self.number, slot.k, "microbatch", *again), devices)
                    # Under an autocast around the loop, the gradient of a cast that was kept would
                    # come after FSDP2's reduction.
                    torch.clear_autocast_cache()
                    with sync.on(slot, number + 1 == len(slots)):
                        self._slot = slot
                        yield batch
                        self._slot = None
                    if not own_backward:
                        self._backwards.end(slot)
            self._finish(model, sync, own_backward)
            progress.is_complete = True
        finally:
            self._slot = None
            if not progress.is_complete:
                sync.drop_unfinished()

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Run backward of a microbatch's mean loss, weighted.

        After the loop, gradients are those of the mean over the global batch: over its samples, or
        over the units that `weight` counts. They must be zero or None before the step. The scale of
        a GradScaler's loss is kept.

        Args:
            loss: one value, the mean over this microbatch.
            weight: the number of units of that mean, for instance tokens; at least 0. Give it in
                all of a step's microbatches, on all ranks, or in none.

        Raises:
            ValueError: not within `microbatches`, a loss of several values, a wrong weight.

        Example::

            model = torch.nn.Linear(4, 1)
            texts = torch.randn(8, 5, 4)
            for step in anyrank.ElasticLoader(texts, global_batch=8, microbatch=2):
                for batch in step.microbatches(model):
                    counts = batch[..., 0] > -9  # not padding
                    loss = model(batch)[counts].square().mean()
                    step.backward(loss, weight=counts.sum())  # the mean over all tokens
        """
        before = self._backwards.is_expected  # as of a loss that is scaled, and waits
        self.scale(loss, weight).backward()
        self._backwards.is_expected = before

    def scale(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> torch.Tensor:
        """The weighted loss, for frameworks that run backward themselves.

        `accelerator.backward(step.scale(loss))` is equivalent to `step.backward(loss)`. Arguments
        and errors are those of `backward`. Run backward of each result once.

        Example::

            model = torch.nn.Linear(4, 1)
            for step in anyrank.ElasticLoader(torch.randn(8, 4), global_batch=8, microbatch=2):
                for batch in step.microbatches(model):
                    step.scale(model(batch).square().mean()).backward()
                    print(step.k, "repeated" if step.is_copy else "counts")
        """
        slot = self._current_slot()
        own = self._backwards.add(slot, loss, weight, self._plan.size(slot.k))
        whole = self._plan.samples if weight is None else self._provisional_total(own)
        # Wrappers average over the ranks. The exact sum adds up, so that nothing depends on them.
        ranks = 1 if self._is_exact else self._ranks.size
        return loss * (0.0 if slot.is_copy else own / whole * ranks)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm is at most `max_norm`. All data-parallel ranks.

        The gradients are those of the model that `microbatches` was given, as one vector: under
        DDP, FSDP2, tensor parallelism (DTensors), any mix of them, or none. With tensor
        parallelism, its ranks call too. The norm does not depend on how tensors are sharded: with
        exact=True it has the same bits on any number of ranks. With a GradScaler, call
        `scaler.unscale_(optimizer)` before.

        Args:
            max_norm: at least 0; inf only computes the norm.
            norm_type: at least 1, or inf; with exact=True one of 1, 2 and inf.
            error_if_nonfinite: raise for a norm that is inf or nan. Otherwise gradients are scaled
                as by `torch.nn.utils.clip_grad_norm_`: by 0 or nan.

        Returns:
            The norm before, 0-d, on the CPU; the same value on all ranks.

        Raises:
            CheckpointError: arguments differ between ranks.
            ValueError: a wrong argument, or a call before the end of `microbatches`.
            RuntimeError: the norm is not finite, with error_if_nonfinite; on all ranks.

        Example::

            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = anyrank.ElasticLoader(torch.randn(32, 4), global_batch=16, microbatch=4)
            for step in loader:
                for batch in step.microbatches(model):
                    step.backward(model(batch).square().mean())
                norm = step.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        """

        def check() -> None:
            if self._model is None or not self._progress.is_complete:
                raise ValueError(
                    f"step {self.number}: call clip_grad_norm_ after the loop over microbatches(), "
                    "which exchanges the gradients at its end"
                )
            for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
                check_type(name, value, (Real, torch.Tensor), "a number")
            if not float(max_norm) >= 0:
                raise ValueError(f"max_norm is {max_norm}: give at least 0")
            if not float(norm_type) >= 1 or (self._is_exact and norm_type not in (1, 2, math.inf)):
                kinds = "1, 2 or inf with exact=True" if self._is_exact else "at least 1, or inf"
                raise ValueError(f"norm_type is {norm_type}: give {kinds}")

        arguments = {
            "max_norm": max_norm,
            "norm_type": norm_type,
            "error_if_nonfinite": error_if_nonfinite,
        }
        same_arguments(self._ranks, "clip_grad_norm_", arguments, CheckpointError, check)
        assert self._model is not None
        reshard(self._model)
        exact, parameters = self._pass.exact, [*self._model.parameters()]
        if exact is not None:  # changes before cannot be seen after the scaling
            exact.compare(parameters, self._pass.notes)
        norm = clip_gradients(parameters, float(max_norm), float(norm_type), error_if_nonfinite)
        if exact is not None:
            exact.deliver(self._model)
        return norm

    def loss(self) -> float:
        """The mean loss over the microbatches of all ranks so far. All data-parallel ranks call.

        The same number on any rank count, for the same losses. The losses are those passed to
        `backward`: with a GradScaler they are scaled.

        Raises:
            ValueError: no rank has called `backward` yet.
        """
        return self._backwards.mean_loss(self._ranks)

    def _fetch(self, slots: Sequence[MicrobatchSlot]) -> Iterator[Any]:
        """The batches of slots, each once all ranks have theirs. All data-parallel ranks."""
        take = self._take if self._num_calls == 1 else self._take_again
        return one_ahead(self._ranks, "fetching a batch", take, slots)

    def _take(self, slot: MicrobatchSlot) -> Any:
        """The batch of a slot, compared with the plan."""
        ids = self._schedule.ids(self._plan, slot.k)
        fetched = next(self._pass.batches, None)
        found = None if fetched is None else (fetched.request.epoch, list(fetched.request.ids))
        if fetched is None or found != (self.epoch, ids):
            got = "no batch" if fetched is None else f"samples {list(fetched.request.ids)[:8]}"
            raise CheckpointError(
                f"step {self.number}, microbatch {slot.k}: the plan has samples {ids[:8]}, the "
                f"workers returned {got}: start a new iteration of the loader"
            )
        if not slot.is_copy:
            # Positions after the order's end pad the step, and are in no receipt.
            self._progress.seen += ids[: max(0, self._plan.n - self._plan.bounds(slot.k)[0])]
        return fetched.batch

    def _take_again(self, slot: MicrobatchSlot) -> Any:
        """The batch of a slot for a further pass: it is in the receipt already."""
        return self._pass.dataset[request_for(self._schedule, self._plan, slot.k)].batch

    def _current_slot(self) -> MicrobatchSlot:
        if self._slot is None:
            raise ValueError("call step.backward within `for batch in step.microbatches(model)`")
        return self._slot

    def _provisional_total(self, own: float) -> float:
        """The divisor of weights until the step's total is known: equal on all ranks.

        The number of microbatches times a power of two near an ordinary weight; which power it is
        does not change a bit of the result, unless gradients underflow. The first call of an
        iteration gathers; with exact=True the first of a step does, since the power must then be
        the same on any number of ranks, and after any resume.
        """
        if self._is_exact:
            if self._exponent is None:
                slot = self._current_slot()
                is_first = slot.k == 0 and not slot.is_copy
                self._exponent = exponent(max(self._ranks.gather(own if is_first else 0.0)))
            return math.ldexp(self._plan.num_microbatches, self._exponent)
        if self._pass.exponent is None:
            self._pass.exponent = exponent(max(self._ranks.gather(own)))
        return math.ldexp(self._plan.num_microbatches, self._pass.exponent)

    def _sync(self, model: nn.Module, own_backward: bool) -> GradientSync:
        """The exchange of a model's gradients in one pass over the microbatches."""
        exact = self._pass.exact
        if exact is None:
            return GradientSync(model, self._ranks)
        if own_backward:
            raise ValueError(
                "exact=True: own_backward=True weights losses by a rank's microbatches, so the sum "
                "depends on the number of ranks: call step.backward(loss), or run backward of "
                "step.scale(loss)"
            )
        return exact.open_sync(
            model,
            self._ranks,
            self._pass.group,
            self._plan,
            self._schedule.num_microbatches,
            id(model) not in self._pass.checked,
            self._pass.notes,
        )

    def _finish(self, model: nn.Module, sync: GradientSync, own_backward: bool) -> None:
        """Scale and exchange the gradients of the step. All data-parallel ranks."""
        is_weighted = self._backwards.is_weighted
        if not own_backward:
            self._backwards.check_given(sync.has_gradients)
        # Ranks whose wrappers exchange in the backward cannot come here by different ways.
        meets = is_weighted or self._is_exact or bool(sync.unwrapped)
        total = self._backwards.total(self._ranks if meets else one_process())
        if total is None and not own_backward:
            sync.drop_unfinished()
            return
        factor: float | None = None
        if is_weighted:
            factor = self._provisional_total(0.0) / total if total else 0.0
        is_new = id(model) not in self._pass.checked
        losses = [float(loss) for _, loss in self._backwards.losses] if is_new else []
        if sync.finish(self._ranks, self._pass.group, factor, is_new, losses) and is_new:
            self._pass.checked[id(model)] = model
        if self._pass.exact is not None:
            self._pass.exact.deliver(model)

    @property
    def _is_exact(self) -> bool:
        return self._pass.exact is not None

    @property
    def _ranks(self) -> Ranks:
        """The data-parallel ranks, available during the iteration of the loader."""
        if self._pass.ranks is None:
            raise ValueError(
                f"step {self.number}: the loop over the loader has ended; use the step within it"
            )
        return self._pass.ranks


def exponent(weight: float) -> int:
    """Of the power of two near a weight."""
    return round(math.log2(weight)) if weight else 0


def is_complete(step: Step) -> bool:
    """Whether all microbatches of a step were run. For `Checkpoints.steps`."""
    return step._progress.is_complete  # pyright: ignore[reportPrivateUsage]
