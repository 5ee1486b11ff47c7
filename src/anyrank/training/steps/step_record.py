"""The records that ranks exchange at the end of a step, and the one function that checks them.

Each rank makes a `StepRecord`; they are merged on their way, and every rank checks the result, so
that every rank comes to the same conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from anyrank.training.steps.exact_sum import ExactSum
from anyrank.world.alike import Compared, differing, unlike
from anyrank.world.failures import describe_texts
from anyrank.world.ranks import Ranks

FROZEN, NO_GRADIENT, GRADIENT = range(3)  # states of a parameter
ROUNDING = 1e-5  # of sums of the same float32 values in different orders
WHAT = "comparing the step"
UNMEASURED = Compared("0", 0)


@dataclass(frozen=True)
class StepRecord:
    """The events that one rank, or some ranks, saw in a pass over a step's microbatches.

    Attributes:
        ranks: number of ranks.
        weights: weights of the microbatches that had a backward, without copies.
        without: the first microbatch that had none; None if all had one.
        losses: digest of a rank's losses; only in a model's first passes, like `values`, `norm` and
            the squares. All digests are "" if those of the ranks differ.
        refusal: why a rank's gradients cannot be summed, and the way out; None if they can.
        values: digest of the parameters that no wrapper keeps the same.
        states: state of each parameter that no wrapper exchanges: frozen, without a gradient, or
            with one on any rank; None if ranks freeze different ones.
        squared_norm: sum of the squares of their gradients.
        norm: digest of it.
        least, most: squared norms of the gradient of each parameter that DDP reduces, on the ranks
            with the smallest and the largest.
        is_finite: whether all of these are finite.
        used: with exact=True, the parameters of each FSDP2 unit that a microbatch has used.
    """

    ranks: int
    weights: ExactSum
    without: int | None
    losses: Compared
    refusal: str | None
    values: Compared
    states: bytes | None = b""
    squared_norm: float = 0.0
    norm: Compared = UNMEASURED
    least: list[float] = field(default_factory=list[float])
    most: list[float] = field(default_factory=list[float])
    is_finite: bool = True
    used: list[set[int]] = field(default_factory=list[set[int]])

    def join(self, others: StepRecord) -> StepRecord:
        """Merge the observations of ranks."""
        without = [k for k in (self.without, others.without) if k is not None]
        return StepRecord(
            ranks=self.ranks + others.ranks,
            weights=self.weights + others.weights,
            without=min(without, default=None),
            losses=self.losses.join(others.losses),
            refusal=self.refusal or others.refusal,
            values=self.values.join(others.values),
            states=_join_states(self.states, others.states),
            squared_norm=self.squared_norm,
            norm=self.norm.join(others.norm),
            least=[*map(min, self.least, others.least)],
            most=[*map(max, self.most, others.most)],
            is_finite=self.is_finite and others.is_finite,
            used=[used | more for used, more in zip(self.used, others.used, strict=True)],
        )


def _join_states(states: bytes | None, others: bytes | None) -> bytes | None:
    if states is None or others is None or len(states) != len(others):
        return None
    if any((a == FROZEN) != (b == FROZEN) for a, b in zip(states, others, strict=True)):
        return None
    return bytes(map(max, states, others))


def judge(
    number: int,
    record: StepRecord,
    own_states: bytes,
    summed: Sequence[str],
    exchanged: Sequence[str],
    values: Mapping[str, str],
    ranks: Ranks,
) -> bool:
    """Check the observations of all ranks. Collective.

    Args:
        number: number of the step.
        record: record of all ranks.
        own_states: states of this rank.
        summed: names of the parameters that no wrapper reduces.
        exchanged: names of the parameters that DDP reduces.
        values: shape and hash of this rank's parameters, whose hash is in its record.
        ranks: the data-parallel ranks.

    Returns:
        True if the record shows that each gradient is reduced once. It does not if gradients are
        all zero or not finite, or equal because the losses are.

    Raises:
        ValueError: on every rank: a rank's gradients cannot be summed; some microbatches had a
            backward and some had none; ranks have different parameters, or freeze different ones;
            a gradient is reduced twice, or not at all; weights that no wrapper keeps the same
            differ.
    """
    if record.refusal:
        raise ValueError(record.refusal)
    without = [] if record.without is None else [record.without]
    check_backwards(number, range(record.weights.count), without)
    if record.states is None:
        _refuse_trainable(summed, own_states, ranks)
    is_once = _check_not_exchanged(record)
    is_exchanged = _check_exchanged(exchanged, record)
    _check_alike(values, record, ranks)
    return is_exchanged and is_once


def check_backwards(number: int, weights: Collection[object], without: Collection[int]) -> None:
    """Check that all microbatches of a step had a backward, or none.

    Raises:
        ValueError: names the first microbatch without.
    """
    if weights and without:
        raise ValueError(
            f"step {number}: step.backward() was not called for microbatch {min(without)}, but was "
            "for others. To skip a microbatch, call step.backward(loss, weight=0) and pass weight= "
            "(for example len(batch)) in all the others."
        )


def _refuse_trainable(names: Sequence[str], own_states: bytes, ranks: Ranks) -> None:
    """Raise an error for parameters that are trained only on some ranks. Collective.

    Args:
        names: names of this rank's parameters that no wrapper reduces.
        own_states: the state of each.
        ranks: the data-parallel ranks.

    Raises:
        ValueError: on every rank; names the first such parameter.
    """
    for by_text in unlike(ranks, WHAT, {"count": str(len(own_states))}).values():
        title = "the number of parameters without a wrapper differs between ranks"
        text = describe_texts(title, by_text, ranks.name_ranks)
        raise ValueError(f"{text}. Build the same model on every rank.")
    lines = {name: str(state != FROZEN) for name, state in zip(names, own_states, strict=True)}
    for name, by_text in unlike(ranks, WHAT, lines).items():
        title = f"requires_grad of {name} differs between ranks"
        text = describe_texts(title, by_text, ranks.name_ranks)
        raise ValueError(f"{text}. Freeze the same parameters on every rank.")


def _check_alike(values: Mapping[str, str], record: StepRecord, ranks: Ranks) -> None:
    """Check that a model without a wrapper is the same on every rank. Collective.

    Args:
        values: shape and hash of each of this rank's parameters, by name.
        record: record of all ranks, which has a digest of these.
        ranks: the data-parallel ranks.

    Raises:
        ValueError: on every rank; names the first parameter that differs, and the way out.
    """
    if record.values.digest:
        return
    wrong = differing({"weights": values}, {"weights": record.values}, ranks, limit=1)
    for name, by_text in wrong["weights"].items():
        title = f"{name} is not the same on every rank (shape and hash)"
        text = describe_texts(title, by_text, ranks.name_ranks)
        raise ValueError(
            f"{text}. Start from the same weights: call torch.manual_seed(0) before you build the "
            "model, use anyrank.load(), or wrap it in DistributedDataParallel, which broadcasts "
            "the first rank's."
        )


def _check_not_exchanged(record: StepRecord) -> bool:
    """Check that gradients without a wrapper have not been reduced already.

    Args:
        record: record of all ranks; the norm is that of a rank's gradients before the reduction,
            and 0 if nothing must be checked.

    Returns:
        True if this could be determined: not if the losses are the same on every rank, for example
        with dummy data, because the gradients may then be the same anyway.

    Raises:
        ValueError: the gradients are the same on every rank, but the losses differ; on every rank.
    """
    norm = record.squared_norm
    # If all ranks overflow, for example with the first scale of a GradScaler, all norms are inf.
    if record.ranks > 1 and norm and math.isfinite(norm) and record.norm.digest:
        if record.losses.digest:
            return False
        raise ValueError(
            "gradients are already the same on every rank, so a wrapper has reduced them. Pass the "
            "wrapped model (DistributedDataParallel) to microbatches()."
        )
    return True


def _check_exchanged(names: Sequence[str], record: StepRecord) -> bool:
    """Check that DDP has reduced its gradients, after the last microbatch.

    Args:
        names: names of the parameters that DDP reduces.
        record: record of all ranks; without squares if nothing must be checked.

    Returns:
        True if this could be determined: not from gradients that are all zero, or not finite.

    Raises:
        ValueError: DDP has not reduced them; on every rank.
    """
    if not record.is_finite:
        return False
    has_gradients = any(record.most)
    rows = zip(names, record.least, record.most, strict=True) if has_gradients else ()
    for name, least, most in rows:
        if most - least > ROUNDING * most:
            raise ValueError(
                f"the gradients of {name} differ between ranks after the step's last microbatch, "
                "so DistributedDataParallel did not reduce them. Call the DDP model itself, not "
                "model.module or a part of it, and not under no_sync(). If some parameters are "
                "unused or were frozen after wrapping, pass find_unused_parameters=True to "
                "DistributedDataParallel."
            )
    return has_gradients or not names
