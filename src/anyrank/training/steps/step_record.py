"""What the ranks tell each other at the end of a step, and the one function that judges it.

Each rank makes a `StepRecord`; all are gathered at once, and every rank judges all of them, so that
every rank comes to the same end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from anyrank.world.alike import differing, unlike
from anyrank.world.failures import describe_values
from anyrank.world.ranks import Ranks

FROZEN, NO_GRADIENT, GRADIENT = range(3)  # states of a parameter
ROUNDING = 1e-5  # of sums of the same float32 values in different orders


@dataclass(frozen=True)
class StepRecord:
    """What one rank has seen in a pass over a step's microbatches.

    Attributes:
        weights: of its microbatches that had a backward, without copies.
        without: its microbatches that had none.
        losses: of its microbatches; in a model's first passes alone, as `values`, `squared_norm`
            and `squares`.
        refusal: why this rank's gradients cannot be summed, and the way out; None if they can.
        values: hash of the parameters that no wrapper keeps equal.
        states: of each parameter that no wrapper exchanges: frozen, with a gradient, or without.
        squared_norm: sum of the squares of their gradients.
        squares: of each parameter that DDP exchanges, the same of its gradient.
        used: with exact=True, of each unit of FSDP2 the parameters that a microbatch has used.
    """

    weights: list[float]
    without: list[int]
    losses: list[float]
    refusal: str | None
    values: str = ""
    states: bytes = b""
    squared_norm: float = 0.0
    squares: list[float] = field(default_factory=list[float])
    used: list[set[int]] = field(default_factory=list[set[int]])


def judge(
    number: int,
    records: Sequence[StepRecord],
    summed: Sequence[str],
    exchanged: Sequence[str],
    values: Mapping[str, str],
    ranks: Ranks,
) -> bool:
    """Judge the records of all ranks. All ranks.

    Args:
        number: of the step.
        records: of each rank, in their order.
        summed: names of the parameters that no wrapper exchanges.
        exchanged: of those that DDP does.
        values: shape and hash of this rank's parameters, of which its record has the hash.
        ranks: the data-parallel ranks.

    Returns:
        Whether the records show that each gradient is exchanged once. They do not where gradients
        are all zero or not finite, or equal because the losses are.

    Raises:
        ValueError: on all ranks: a rank's gradients cannot be summed; some microbatches had a
            backward and some had none; ranks have different parameters, or freeze different ones;
            a gradient is exchanged twice, or not at all; weights that no wrapper keeps equal
            differ.
    """
    if refusal := next((record.refusal for record in records if record.refusal), None):
        raise ValueError(refusal)
    weights = [weight for record in records for weight in record.weights]
    check_backwards(number, weights, [k for record in records for k in record.without])
    _check_trainable(summed, [record.states for record in records], ranks)
    is_once = _check_not_exchanged(
        [record.squared_norm for record in records], [record.losses for record in records]
    )
    is_exchanged = _check_exchanged(exchanged, [record.squares for record in records])
    _check_alike(values, records, ranks)
    return is_exchanged and is_once


def check_backwards(number: int, weights: Collection[object], without: Collection[int]) -> None:
    """Refuse a step in which some microbatches had a backward and some had none.

    Raises:
        ValueError: names the first without.
    """
    if weights and without:
        raise ValueError(
            f"step {number}: microbatch {min(without)} had no step.backward, and others "
            "had one: to leave it out, call step.backward(loss, weight=0) in it, and give the "
            "others their weight= too, as len(batch)"
        )


def _check_trainable(names: Sequence[str], states: Sequence[bytes], ranks: Ranks) -> None:
    """Refuse parameters that are trained on some ranks only.

    Args:
        names: of this rank's parameters that no wrapper exchanges.
        states: for each rank, the state of each of its parameters.
        ranks: the data-parallel ranks.

    Raises:
        ValueError: on all ranks; names the first such parameter.
    """
    trained = [row.replace(bytes([NO_GRADIENT]), bytes([GRADIENT])) for row in states]
    if len({*trained}) == 1:  # also where no records were gathered
        return
    by_rank = dict(zip(ranks.ranks, trained, strict=True))
    if len({*map(len, trained)}) > 1:
        counts = {rank: str(len(own_states)) for rank, own_states in by_rank.items()}
        title = "the number of parameters without a wrapper differs between ranks"
        text = describe_values(title, counts, ranks.name_ranks)
        raise ValueError(f"{text}: build the same model on all ranks")
    lines = {
        rank: {name: str(state != FROZEN) for name, state in zip(names, own_states, strict=True)}
        for rank, own_states in by_rank.items()
    }
    for name, values in unlike(lines).items():
        title = f"requires_grad of {name} differs between ranks"
        text = describe_values(title, values, ranks.name_ranks)
        raise ValueError(f"{text}: freeze the same parameters on all ranks")


def _check_alike(values: Mapping[str, str], records: Sequence[StepRecord], ranks: Ranks) -> None:
    """Refuse a model without a wrapper that differs between the ranks. All ranks.

    Args:
        values: shape and hash of each of this rank's parameters, by name.
        records: of each rank, made of these.
        ranks: the data-parallel ranks.

    Raises:
        ValueError: on all ranks; names the first parameter that differs, and the way out.
    """
    if len({record.values for record in records}) == 1:  # also where no records were gathered
        return
    digests = [{"weights": record.values} for record in records]
    wrong = differing({"weights": values}, digests, ranks, limit=1).get("weights", {})
    for name, by_rank in wrong.items():
        title = f"{name} differs between ranks, as shape and hash"
        text = describe_values(title, by_rank, ranks.name_ranks)
        raise ValueError(
            f"{text}: begin with the same weights on all ranks, by torch.manual_seed(0) "
            "before the model is made, by anyrank.load(), or by DistributedDataParallel, "
            "which takes the first rank's"
        )


def _check_not_exchanged(norms: Sequence[float], losses: Sequence[Sequence[float]]) -> bool:
    """Refuse gradients without a wrapper that one has exchanged all the same.

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


def _check_exchanged(names: Sequence[str], squares: Sequence[Sequence[float]]) -> bool:
    """Check that DDP has exchanged its gradients, after the last microbatch.

    Args:
        names: of the parameters that DDP exchanges.
        squares: for each rank, of each one's gradient the sum of squares; none to check nothing.

    Returns:
        Whether this could be determined: not from gradients that are all zero, or not finite.

    Raises:
        ValueError: DDP has not exchanged them; on all ranks.
    """
    flat = [value for row in squares for value in row]
    if not all(map(math.isfinite, flat)):
        return False
    for name, *values in zip(names, *squares, strict=True) if flat else ():
        if max(values) - min(values) > ROUNDING * max(values):
            raise ValueError(
                f"the gradients of {name} differ between ranks after the step's last "
                "microbatch, so DistributedDataParallel has not exchanged them: call the "
                "wrapped model itself in the loop, not model.module or a part of it, and not "
                "under no_sync(); if the forward leaves parameters out, or some are frozen since "
                "it was wrapped, DistributedDataParallel(find_unused_parameters=True)"
            )
    return any(flat) or not names
