"""One optimizer step: this rank's microbatches, and a backward that weights their losses.

Between two steps of the optimizer, the following happens in this order:

1. The loader yields a `Step`, and the loop calls `Step.microbatches`: it inspects the model's
   wrappers (`GradientSync`, or `ExactSync` with exact=True). Gradients of an earlier, abandoned
   attempt at the same step are dropped.
2. This rank's first two batches are fetched, or are ready since the end of the previous step (5).
   From then on batch i + 1 is fetched before the loop's body gets batch i, and the ranks agree that
   all could fetch theirs while that body runs. Every rank has the same number of batches: a rank
   for which the step has fewer repeats one, as a copy of weight 0.
3. For each microbatch of this rank, the random generators are seeded by (seed, step, k). The loop's
   body runs forward, and `Step.backward` of the mean loss, times its share of the step.
4. Within the last backward, wrappers exchange the gradients: they average over the ranks. With
   exact=True DDP exchanges nothing, and FSDP2's units exchange theirs in each backward, for an
   ordered sum.
5. With workers, the first two batches of the epoch's next step are taken from them. Whether all
   ranks have theirs is known at the end of this step in a run (9), otherwise when the next one
   starts; an error is raised when the next one starts, so that this one counts. The random
   generators continue as before the loop.
6. In `Pass.end` the ranks gather each rank's observations (`StepRecord`), and every rank checks all
   of them (`judge`). They skip the gather if wrappers reduce all gradients of a model, no weights
   are passed, and an earlier step has shown that each gradient is reduced once.
7. The rest: with weights, gradients are scaled by the step's total, and averaged if no wrapper has
   done so; with exact=True the other ordered sums are exchanged, scaled, and become `.grad`.
8. The user clips, and steps the optimizer.
9. The step counts: `Position.commit`, when the next one is requested or `commit` is called. In a
   run the end of the body calls `Checkpoints.step_done`: the ranks agree, which also tells them of
   signals; the step counts; replicas are compared; listeners are called; and a save is made if one
   is due.

So the ranks of a run agree once per step, just before it counts (9); once more when it starts, if
the loader has no workers (2); once for each batch of a rank after its second (2); once in 6, unless
it is skipped; and once in each call of `clip_grad_norm_` and `loss`. A model's first steps, and the
first step of an epoch, have more.

If a loop is left within its microbatches, by an exception or `break`, no exchange is finished; what
a backward has exchanged is dropped when the loader yields the same step again. The generators
continue as before: at once, or, if the loop's iterator is kept, when the loader's iterator is left
or restarted (`StepRun.leave`). The other ranks wait for this one: in an agreement, until this
process ends and so closes its connections, and an exception that leaves `Checkpoints` also tells
them why; in an exchange of DDP or FSDP2, until their own process group's timeout.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import replace
from numbers import Real
from typing import Any, Never
from weakref import ref

import torch
from torch import nn

from anyrank.checks import check_model, check_type
from anyrank.errors import CheckpointError
from anyrank.tensors.hashing import derive
from anyrank.tensors.torch_classes import is_fsdp2
from anyrank.training.data.schedule import MicrobatchSlot
from anyrank.training.gradients.norm import clip_gradients
from anyrank.training.gradients.sync import GradientSync, reshard
from anyrank.training.random_state.generators import accelerators_of, kept, reseed
from anyrank.training.steps.agreed_batches import one_ahead
from anyrank.training.steps.exact_sum import ExactSum
from anyrank.training.steps.position import Position
from anyrank.training.steps.step_run import Pass, StepRun
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks


class Step:
    """One step of a run, created by iterating an `ElasticLoader`.

    Attributes:
        number: number of the step in the run, from 0, over all epochs and processes.
        epoch: number of the epoch, from 0.

    Example::

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = anyrank.ElasticLoader(torch.randn(32, 4), global_batch=16, microbatch=4)
        for step in loader:
            for batch in step.microbatches(model):
                loss = model(batch).square().mean()
                step.backward(loss, weight=len(batch))  # or step.scale(loss, weight).backward()
                print(step.k, step.is_last, "repeated" if step.is_copy else "counts")
                assert step.ends_epoch == (step.number == 1)
            norm = step.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(step.number, step.samples, step.loss(), step.rank_loss().item())
    """

    def __init__(self, run: StepRun, position: Position) -> None:
        self.number, self.epoch = run.plan.number, run.plan.epoch
        self._run, self._position = run, position
        self._trained: GradientSync | None = None  # exchange of the last pass that trained
        self._divisor: float | None = None  # for weights, until their total is known

    # Not __iter__: frameworks iterate over anything that has it, to find the size of a batch.
    def __getitem__(self, _: object) -> Never:
        """Raise TypeError: `for batch in step` and `step[0]` mean `step.microbatches(model)`."""
        raise TypeError("a Step cannot be iterated: use step.microbatches(model)")

    @property
    def samples(self) -> int:
        """Samples of the global batch, on every rank together.

        Raises:
            ValueError: rows are counted as they are read, and the last microbatch of this rank has
                not arrived yet.
        """
        return self._run.plan.samples

    @property
    def ends_epoch(self) -> bool:
        """True if no step of its epoch follows.

        Raises:
            ValueError: as for `samples`.
        """
        return self._position.following(self._run.plan) is None

    @property
    def is_last(self) -> bool:
        """True if the current microbatch is the last of this rank in the step.

        Raises:
            ValueError: outside `microbatches`.
        """
        this, _ = self._current("is_last")
        return this.is_last

    @property
    def k(self) -> int:
        """Index of the current microbatch in the step, from 0, independent of the rank count.

        Raises:
            ValueError: outside `microbatches`.
        """
        return self._current("k")[1].k

    @property
    def is_copy(self) -> bool:
        """True if the current microbatch runs with weight 0: this rank has fewer than others.

        Raises:
            ValueError: outside `microbatches`.
        """
        return self._current("is_copy")[1].is_copy

    def microbatches(self, model: nn.Module, *, own_backward: bool = False) -> Iterator[Any]:
        """Iterate over this rank's batches; run forward and backward of each in the loop's body.

        Within the body, the random generators of Python, numpy and torch depend only on (seed,
        step, microbatch); afterwards they continue as before. DDP and FSDP2 reduce gradients only
        in the last microbatch. Ranks with fewer microbatches run one again with weight 0.
        Collective: every data-parallel rank must call it, and run it to the end.

        Under `torch.no_grad()` it is an evaluation: gradients, and the sums of a training step of
        the same model, are not changed.

        Batches are yielded once every rank has fetched its own, so an error of the dataset on one
        rank is raised on every rank.

        Afterwards it can be called again for another pass over the same batches (for the generator,
        after the discriminator's step): with different random numbers in the body, and its own
        `loss()`. The batches are fetched again, in this process.

        Args:
            model: the wrapped model, or a container of several. Gradients of parameters without a
                wrapper are also averaged over the ranks.
            own_backward: allow backward passes without `backward` or `scale`. You then weight the
                losses yourself: the sum over a rank's microbatches is averaged over the ranks.

        Raises:
            CheckpointError: a worker returned samples that differ from the plan.
            RankError: the dataset raised on some of several ranks; names the sample and the cause.
                On a single rank the dataset's own exception is raised.
            ValueError: a second call before the first has ended.
            ValueError: a model that averages over other ranks than the loader's.
            ValueError: a backward without `step.backward`, or only in some microbatches.
            ValueError: an optimizer's step, or reset gradients, before all microbatches have run.
            ValueError: a forward without the wrapper, detected in the first step of a model.
        """
        batches = self._run_pass(model, own_backward)
        if self._run.is_complete or not self._run.passes:
            self._run.batches = ref(batches)
        return batches

    def _run_pass(self, model: nn.Module, own_backward: bool) -> Generator[Any]:
        """Yield a pass over the batches; arguments and errors are those of `microbatches`."""
        check_model(model)
        run, position = self._run, self._position
        if run.passes and not run.is_complete:
            raise ValueError(
                f"step {self.number}: the previous microbatches() loop of this step is still open"
            )
        is_first, pass_seed = not run.passes, (len(run.passes),) if run.passes else ()
        # Without gradients nothing is exchanged, and the sums of a training step of the same model
        # must not change: the pass has no parameters.
        evaluates = not torch.is_grad_enabled()
        is_new = not evaluates and id(model) not in position.checked
        trained = nn.Identity() if evaluates else model
        sync = self._open_sync(trained, own_backward, not evaluates, is_new)
        this = Pass(run.plan, sync, self._ranks, is_new, own_backward)
        if is_first:
            position.drop_begun()
        computing = model.parameters() if evaluates else sync.named.values()
        devices = accelerators_of(computing)
        slots = position.slots(run.plan)
        fetcher = position.fetcher(run.plan, is_first)
        first = position.take_ahead() if is_first else None
        # A generator: a fetch seeds the generators, so it must run where they are kept.
        batches = one_ahead(self._ranks, fetcher, slots, first)
        run.passes.append(this)
        position.begun.append(sync)
        # Clipping after an evaluation applies to the gradients from before it.
        self._trained = sync if not evaluates or self._trained is None else self._trained
        seed = position.schedule.order.seed
        try:
            with kept(devices), this.running():
                for slot, fetched, is_last in batches:
                    reseed(derive(seed, self.number, slot.k, "microbatch", *pass_seed), devices)
                    # Under an autocast around the loop, the gradient of a cached cast would come
                    # after FSDP2's reduction.
                    torch.clear_autocast_cache()
                    if is_first and not slot.is_copy:
                        run.seen += fetched.request.ids
                    if fetched.request.is_empty:
                        slot = replace(slot, is_copy=True)
                    with this.microbatch(slot, is_last):
                        yield fetched.batch
            if is_first:
                position.fetch_ahead(run.plan)
            if evaluates:
                self._check_evaluated(this)
                reshard(filter(is_fsdp2, model.modules()))
            if this.end(self._divisor):
                position.checked[id(model)] = model
            this.is_complete = True
        finally:
            if not this.is_complete:
                sync.drop_unfinished()

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Run backward of a microbatch's mean loss, weighted.

        After the loop, gradients are those of the mean over the global batch: over its samples, or
        over the units that `weight` counts. They must be zero or None before the step. The scale of
        a GradScaler's loss is kept.

        Args:
            loss: a scalar, the mean over this microbatch.
            weight: the number of units of that mean, for example tokens; at least 0. Pass it in
                all of a step's microbatches, on every rank, or in none.

        Raises:
            ValueError: outside `microbatches`, a loss that is not a scalar, a wrong weight.
        """
        this, _ = self._current("backward()")
        before = this.in_own_backward  # for a scaled loss whose backward is still to come
        self.scale(loss, weight).backward()
        this.in_own_backward = before

    def scale(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> torch.Tensor:
        """Return the weighted loss, for frameworks that run backward themselves.

        `accelerator.backward(step.scale(loss))` is equivalent to `step.backward(loss)`. Arguments
        and errors are those of `backward`. Run backward of each result once.
        """
        this, slot = self._current("scale()")
        units = this.add_loss(slot, loss, weight)
        plan = self._run.plan
        whole = plan.assumed_samples if weight is None else self._divisor_of(units, slot)
        return loss * (0.0 if slot.is_copy else units / whole * this.sync.divides_by)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm is at most `max_norm`. Collective: every
        data-parallel rank must call it.

        The gradients are those of the model that was passed to `microbatches`, as one vector: under
        DDP, FSDP2, tensor parallelism (DTensors), any mix of them, or none. With tensor
        parallelism, all ranks of the tensor-parallel group must call too. The norm does not depend
        on how tensors are sharded: with exact=True it has the same bits on any number of ranks.
        With a GradScaler, first call `scaler.unscale_(optimizer)`.

        Args:
            max_norm: at least 0; inf only computes the norm.
            norm_type: at least 1, or inf; with exact=True one of 1, 2 and inf.
            error_if_nonfinite: raise for a norm that is inf or nan. Otherwise gradients are scaled
                by 0 or nan, like in `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm before scaling, 0-d, on the CPU; the same value on every rank.

        Raises:
            CheckpointError: arguments differ between ranks.
            ValueError: a wrong argument, or a call before the end of `microbatches`.
            RuntimeError: the norm is not finite, with error_if_nonfinite; on every rank.
        """
        sync = self._trained

        def check() -> None:
            if sync is None or not self._run.is_complete:
                raise ValueError(
                    f"step {self.number}: call clip_grad_norm_ after the loop over microbatches(), "
                    "which reduces the gradients at its end"
                )
            for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
                check_type(name, value, (Real, torch.Tensor), "a number")
            if not float(max_norm) >= 0:
                raise ValueError(f"max_norm={max_norm}: must be at least 0")
            sync.check_norm_type(float(norm_type))

        arguments = {"max_norm": max_norm, "norm_type": norm_type}
        arguments |= {"error_if_nonfinite": error_if_nonfinite}
        compare_arguments(self._ranks, "clip_grad_norm_", arguments, CheckpointError, check)
        assert sync is not None
        reshard(sync.fsdp)
        with sync.clipping():
            parameters = [*sync.named.values()]
            return clip_gradients(parameters, float(max_norm), float(norm_type), error_if_nonfinite)

    def loss(self) -> float:
        """Return the mean loss over the microbatches of all ranks so far. Collective: every
        data-parallel rank must call it.

        The same value for any number of ranks, given the same losses. The losses are those passed
        to
        `backward`: with a GradScaler they are scaled.

        Raises:
            ValueError: no rank has called `backward` yet.
        """
        last = self._run.passes[-1:]
        own_terms = (w * float(loss) for this in last for w, loss in this.losses if w)
        own_weights = (weight for this in last for weight in this.weights.values())
        terms, weights = self._ranks.reduce(
            "step.loss()",
            (ExactSum.of_values(own_terms), ExactSum.of_values(own_weights)),
            lambda some, others: (some[0] + others[0], some[1] + others[1]),
        )
        if not (weights.count or any(this.losses for this in last)):
            raise ValueError(f"step {self.number}: loss() needs at least one step.backward()")
        total = float(weights)
        return float(terms) / total if total else 0.0

    def rank_loss(self) -> torch.Tensor:
        """Return this rank's part of `loss()`, without communication and without synchronizing the
        device. Any rank may call it.

        For a log that averages over the ranks when it is written, not in each step: the mean of the
        ranks' parts is `loss()`, up to rounding.

        Returns:
            One value, at least float32, on the losses' device.

        Raises:
            ValueError: before the end of the loop over `microbatches`, without `backward` in it, or
                with own_backward=True.
        """
        last = self._run.passes[-1] if self._run.is_complete else None
        if last is None or last.total is None:
            raise ValueError(
                f"step {self.number}: call rank_loss() after the loop over microbatches(), with "
                "step.backward in every microbatch, and without own_backward=True"
            )
        _, first = last.losses[0]
        # In at least float32, so that a sum of many losses is accurate.
        total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
        for weight, loss in last.losses:
            if weight:
                total += weight * self._ranks.size / last.total * loss
        return total.reshape(())

    def _current(self, what: str) -> tuple[Pass, MicrobatchSlot]:
        """Return the running pass, and the microbatch of its body.

        Args:
            what: the attribute or method of the caller, for the error.
        """
        this = self._run.passes[-1] if self._run.passes else None
        if this is None or this.slot is None:
            raise ValueError(
                f"step.{what} is only available inside `for batch in step.microbatches(model)`"
            )
        return this, this.slot

    def _divisor_of(self, units: float, slot: MicrobatchSlot) -> float:
        """Return the divisor of weights until the step's total is known: one for all losses of it.

        It is the number of microbatches times a power of two near an ordinary weight, namely that
        of the first microbatch of the first step in which it is not 0. The choice of the power does
        not change a bit of the result, unless gradients underflow. Collective over the
        data-parallel ranks in a step's first call, until the power is known.

        Args:
            units: weight of the current microbatch.
            slot: the microbatch.
        """
        position = self._position
        if self._divisor is None:
            if position.exponent is None:
                is_first = slot.k == 0 and not slot.is_copy
                weight = self._ranks.reduce("comparing weights", units if is_first else 0.0, max)
                position.exponent = round(math.log2(weight)) if weight else None
            self._divisor = math.ldexp(self._run.plan.num_microbatches, position.exponent or 0)
        return self._divisor

    def _check_evaluated(self, this: Pass) -> None:
        """Check that a pass that started without gradients had no backward."""
        if this.losses:
            raise ValueError(
                f"step {self.number}: step.backward was called in a pass that started under "
                "torch.no_grad(), which reduces no gradients. Start the loop over microbatches() "
                "outside it."
            )

    def _open_sync(
        self, model: nn.Module, own_backward: bool, trains: bool, is_new: bool
    ) -> GradientSync:
        """Return the exchange of a model's gradients in one pass over the microbatches."""
        ranks, position = self._ranks, self._position
        if position.exact is None or not trains:
            return GradientSync(model, ranks, position.group)
        if own_backward:
            raise ValueError(
                "exact=True: own_backward=True weights losses by a rank's microbatches, so the sum "
                "depends on the number of ranks. Call step.backward(loss), or "
                "step.scale(loss).backward()."
            )
        plan = self._run.plan
        return position.exact.open_sync(model, ranks, position.group, plan, is_new, position.notes)

    @property
    def _ranks(self) -> Ranks:
        """The data-parallel ranks, available during the iteration of the loader."""
        if self._position.ranks is None:
            raise ValueError(
                f"step {self.number}: this step is over: use it only inside the loop over the "
                "loader"
            )
        return self._position.ranks
