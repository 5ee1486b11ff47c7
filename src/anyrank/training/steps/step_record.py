"""The records that ranks exchange at the end of a step, and the one function that judges them.

Each rank makes a `StepRecord`; they are merged on their way, and every rank judges what they come
to, so that every rank comes to the same end.
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
        ranks: how many.
        weights: weights of the microbatches that had a backward, without copies.
        without: the first microbatch that had none; None where all had one.
        losses: digest of a rank's losses; in a model's first passes alone, as `values`, `norm` and
            the squares. All digests are "" where those of the ranks differ.
        refusal: why a rank's gradients cannot be summed, and the way out; None if they can.
        values: digest of the parameters that no wrapper keeps equal.
        states: state of each parameter that no wrapper exchanges: frozen, without a gradient, or
            with one on any rank; None where ranks freeze different ones.
        squared_norm: sum of the squares of their gradients.
        norm: digest of it.
        least, most: those of each parameter that DDP exchanges, the same of its gradient, on the
            ranks with the least and the most.
        is_finite: whether all of these are.
        used: with exact=True, of each unit of FSDP2 the parameters that a microbatch has used.
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
        """Merge what ranks have seen."""
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
    """Judge what the ranks have seen. All ranks.

    Args:
        number: number of the step.
        record: record of all ranks.
        own_states: states of this rank.
        summed: names of the parameters that no wrapper exchanges.
        exchanged: names of the parameters that DDP exchanges.
        values: shape and hash of this rank's parameters, whose hash is in its record.
        ranks: the data-parallel ranks.

    Returns:
        Whether the record shows that each gradient is exchanged once. It does not where gradients
        are all zero or not finite, or equal because the losses are.

    Raises:
        ValueError: on all ranks: a rank's gradients cannot be summed; some microbatches had a
            backward and some had none; ranks have different parameters, or freeze different ones;
            a gradient is exchanged twice, or not at all; weights that no wrapper keeps equal
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
    """Refuse a step in which some microbatches had a backward and some had none.

    Raises:
        ValueError: names the first microbatch without.
    """
    if weights and without:
        raise ValueError(
            f"step {number}: microbatch {min(without)} had no step.backward, and others "
            "had one: to leave it out, call step.backward(loss, weight=0) in it, and give the "
            "others their weight= too, as len(batch)"
        )


def _refuse_trainable(names: Sequence[str], own_states: bytes, ranks: Ranks) -> None:
    """Refuse parameters that are trained on some ranks only. All ranks.

    Args:
        names: names of this rank's parameters that no wrapper exchanges.
        own_states: the state of each.
        ranks: the data-parallel ranks.

    Raises:
        ValueError: on all ranks; names the first such parameter.
    """
    for by_text in unlike(ranks, WHAT, {"count": str(len(own_states))}).values():
        title = "the number of parameters without a wrapper differs between ranks"
        text = describe_texts(title, by_text, ranks.name_ranks)
        raise ValueError(f"{text}: build the same model on all ranks")
    lines = {name: str(state != FROZEN) for name, state in zip(names, own_states, strict=True)}
    for name, by_text in unlike(ranks, WHAT, lines).items():
        title = f"requires_grad of {name} differs between ranks"
        text = describe_texts(title, by_text, ranks.name_ranks)
        raise ValueError(f"{text}: freeze the same parameters on all ranks")


def _check_alike(values: Mapping[str, str], record: StepRecord, ranks: Ranks) -> None:
    """Refuse a model without a wrapper that differs between the ranks. All ranks.

    Args:
        values: shape and hash of each of this rank's parameters, by name.
        record: record of all ranks, which has a digest of these.
        ranks: the data-parallel ranks.

    Raises:
        ValueError: on all ranks; names the first parameter that differs, and the way out.
    """
    if record.values.digest:
        return
    wrong = differing({"weights": values}, {"weights": record.values}, ranks, limit=1)
    for name, by_text in wrong["weights"].items():
        title = f"{name} differs between ranks, as shape and hash"
        text = describe_texts(title, by_text, ranks.name_ranks)
        raise ValueError(
            f"{text}: begin with the same weights on all ranks, by torch.manual_seed(0) "
            "before the model is made, by anyrank.load(), or by DistributedDataParallel, "
            "which takes the first rank's"
        )


def _check_not_exchanged(record: StepRecord) -> bool:
    """Refuse gradients that something exchanged although there is no wrapper.

    Args:
        record: record of all ranks; the norm is that of a rank's gradients before the exchange, and
            0 where nothing is to be checked.

    Returns:
        Whether this could be determined: not if the losses are equal on all ranks, as in a run on
        dummy data, because the gradients may then be equal by themselves.

    Raises:
        ValueError: the gradients are equal on all ranks, and the losses are not; on all ranks.
    """
    norm = record.squared_norm
    # Where all ranks overflow, as with the first scale of a GradScaler, all norms are inf.
    if record.ranks > 1 and norm and math.isfinite(norm) and record.norm.digest:
        if record.losses.digest:
            return False
        raise ValueError(
            "gradients are equal on all ranks before the exchange, so a wrapper has exchanged "
            "them: give microbatches() the wrapped model (DistributedDataParallel)"
        )
    return True


def _check_exchanged(names: Sequence[str], record: StepRecord) -> bool:
    """Check that DDP has exchanged its gradients, after the last microbatch.

    Args:
        names: names of the parameters that DDP exchanges.
        record: record of all ranks; without squares where nothing is to be checked.

    Returns:
        Whether this could be determined: not from gradients that are all zero, or not finite.

    Raises:
        ValueError: DDP has not exchanged them; on all ranks.
    """
    if not record.is_finite:
        return False
    has_gradients = any(record.most)
    rows = zip(names, record.least, record.most, strict=True) if has_gradients else ()
    for name, least, most in rows:
        if most - least > ROUNDING * most:
            raise ValueError(
                f"the gradients of {name} differ between ranks after the step's last "
                "microbatch, so DistributedDataParallel has not exchanged them: call the "
                "wrapped model itself in the loop, not model.module or a part of it, and not "
                "under no_sync(); if the forward leaves parameters out, or some are frozen since "
                "it was wrapped, DistributedDataParallel(find_unused_parameters=True)"
            )
    return has_gradients or not names
