"""Compare by digest, before a save writes anything, what several ranks should hold equal.

A save takes each element from one rank. If replicas differ, the run has no single value: for what
is trained that is an error, for anything else the first rank's value is saved. Each save compares a
ninth of every tensor, in turns, so that nine saves have compared all; a run may ask for more
comparisons between its saves, of everything.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from anyrank.errors import CheckpointError
from anyrank.models.alike import (
    Inventory,
    check_alike,
    differing_replicas,
    find_coordinates,
    inventory_of,
)
from anyrank.models.digests import digests_of
from anyrank.models.spreads import replicas_here, spreads_of
from anyrank.runs.state.part_types import SHOWN, PartState, shared_tensors
from anyrank.runs.state.train_state import TrainState
from anyrank.tensors.sharded_tensor import Members, ShardedTensor
from anyrank.tensors.spread import Spread
from anyrank.wording import first_few
from anyrank.world.alike import RanksByText, join_digests
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.state")

TURNS = 9  # saves that together compare all of every tensor


def find_differing_replicas(
    parts: Mapping[str, PartState],
    spreads: Sequence[Spread],
    turn: int,
    step: int,
    ranks: Ranks,
) -> list[str]:
    """Find the names of tensors that differ and may; the first rank's are saved. All ranks.

    Args:
        parts: parts of the state.
        spreads: how each of their tensors lies on the ranks.
        turn: how many saves were before, equal on all ranks.
        step: step that is saved, for the error.
        ranks: ranks that save together.

    Raises:
        CheckpointError: a tensor of the model or an optimizer differs; the error names it and the
            ranks.
    """
    replicas = replicas_here(shared_tensors(parts), spreads, ranks)
    differing = _differing_tensors(replicas, turn, ranks)
    if not differing:
        return []
    may_differ = {name for saved in parts.values() for name in saved.may_differ}
    wrong = {name: by_text for name, by_text in differing.items() if name not in may_differ}
    if wrong:
        others = sorted(differing.keys() - wrong.keys())
        raise CheckpointError(
            _describe(f"step {step}: nothing was saved, as", wrong, parts, others)
            + "\na ninth of each tensor was compared, so the rest may differ on other ranks: "
            "Checkpoints(replicas_every=1) compares all, and names the first step"
        )
    if ranks.index == 0:
        log.warning(
            "%d tensors differ between the ranks; the first rank's are saved: %s",
            len(differing),
            ", ".join(sorted(differing)[:SHOWN]),
        )
    return sorted(differing)


def find_alike(
    parts: Mapping[str, PartState], known: Mapping[str, Collection[str]], ranks: Ranks
) -> dict[str, list[str]]:
    """Find the optimizer state that all ranks hold equal beside shares of parameters, by part.

    It is, say, a preconditioner that each computes from whole gradients. Any number of ranks can
    resume it.

    Whole values are compared in each save, because a save by the first rank alone would lose any
    others that differ. All ranks.

    Args:
        parts: parts of the state, with records that are equal on the ranks.
        known: names that were equal when this run was sharded, by part; a whole parameter's state
            does not show it.
        ranks: ranks that save together.
    """
    alike = {
        part: sorted({tensor.name for tensor in parts[part].tensors}.intersection(names))
        for part, names in known.items()
        if part in parts
    }
    beside = {part: saved for part, saved in parts.items() if saved.agreement == "equal"}
    if any(saved.own_tensors for saved in beside.values()):  # on all ranks, as records are equal
        named = [
            (replace(tensor, name=name), ranks.ranks)
            for saved in beside.values()
            for name, tensor in saved.beside_shards.items()
        ]
        wrong = differing_replicas(named, ranks, _digests_with_shapes)
        for part, saved in beside.items():
            names = [name for name in saved.beside_shards if name not in wrong]
            alike[part] = sorted({*alike.get(part, ()), *names})
    return {part: names for part, names in alike.items() if names}


def _digests_with_shapes(tensors: Iterable[ShardedTensor]) -> list[str]:
    rows = [*tensors]
    digests = digests_of((tensor.name, tensor.local()) for tensor in rows)
    pairs = zip(digests, rows, strict=True)
    return [f"{digest} {list(row.shape)} {row.dtype}" for digest, row in pairs]


def check_replicas(state: TrainState, ranks: Ranks) -> None:
    """Compare all of the model and the optimizers, and save nothing. All ranks.

    Raises:
        CheckpointError: a tensor differs that must not; the error names it, the ranks and the step.
    """

    def list_own() -> tuple[dict[str, PartState], Inventory]:
        parts = state.parts.save_tensors(ranks.index)
        return parts, inventory_of(shared_tensors(parts), ranks)

    parts, inventory = ranks.run_and_reduce("looking at the replicas", list_own, join_digests)
    tensors = shared_tensors(parts)
    title = f"step {state.step}: the ranks' states differ"
    check_alike(title, tensors, inventory, ranks, CheckpointError)
    coordinates = find_coordinates(tensors, inventory, ranks)
    may_differ = {name for saved in parts.values() for name in saved.may_differ}
    replicas = [*replicas_here(tensors, spreads_of(tensors, coordinates), ranks)]
    differing = _differing_tensors(
        [r for r in replicas if r[0].name not in may_differ], None, ranks
    )
    if differing:  # the same on all ranks, so that all of them gather once more
        others = _differing_tensors([r for r in replicas if r[0].name in may_differ], None, ranks)
        raise CheckpointError(_describe(f"step {state.step}:", differing, parts, sorted(others)))


def _differing_tensors(
    tensors: Iterable[tuple[ShardedTensor, Members]], turn: int | None, ranks: Ranks
) -> dict[str, RanksByText]:
    """Find the tensors that differ, by name: in the ninth of `turn`, or in all. All ranks."""

    def digest_all(own_tensors: Iterable[ShardedTensor]) -> list[str]:
        return digests_of((t.name, _ninth(t.local(), turn)) for t in own_tensors)

    return differing_replicas(tensors, ranks, digest_all)


def _ninth(tensor: torch.Tensor, turn: int | None) -> torch.Tensor:
    """Return the ninth of a tensor whose turn it is; all of it if it is small or without a turn."""
    if turn is None or tensor.numel() < TURNS:
        return tensor
    number = turn % TURNS
    low, high = (tensor.numel() * n // TURNS for n in (number, number + 1))
    return tensor.reshape(-1)[low:high]


def _describe(
    head: str,
    wrong: Mapping[str, RanksByText],
    parts: Mapping[str, PartState],
    others: Sequence[str],
) -> str:
    """Describe the differences and their cause: replicas diverged, or an optimizer is sharded.

    Args:
        head: what was not done because of it, or at which step.
        wrong: name of each tensor that must not differ -> its digests, and their ranks.
        parts: parts of the state.
        others: names of tensors that differ too, and may.
    """
    texts = [
        f"{name}: " + " unlike ".join(f"ranks {some.listed}" for some in by_text.values())
        for name, by_text in wrong.items()
    ]
    optimizers = [
        part
        for part, saved in parts.items()
        if saved.record["kind"] == "optimizer"
        and wrong.keys() & {tensor.name for tensor in saved.tensors}
    ]
    of_optimizers = {tensor.name for part in optimizers for tensor in parts[part].tensors}
    each_its_own = all(some.count == 1 for by_text in wrong.values() for some in by_text.values())
    if each_its_own and wrong.keys() <= of_optimizers:
        reason = (
            f"the weights agree, so {optimizers[0]} is sharded: each rank keeps the state of its "
            "own share in plain tensors. Hold them as DTensors, which say what each rank has, or "
            "give the optimizer a state_dict() and load_state_dict() of its own; if it is not "
            "sharded, its ranks have diverged: resume the last step"
        )
    else:
        reason = (
            "the replicas have diverged (a forward around the wrapper; parameters that are "
            "unfrozen behind DDP's back, or of a module that microbatches() did not get, as a "
            "loss: give it nn.ModuleList([model, loss]); an update on one rank alone, or from a "
            "rank's own values: a buffer, its data, its random numbers): make them alike, or "
            "resume the last step; hold parts of a whole as DTensors (DTensor.from_local)"
        )
        if others:
            names = ", ".join(others[:SHOWN])
            reason += f"\nthese differ too, which they may, unless an update reads them: {names}"
    lines = [
        f"{head} ranks hold different values of what they should hold alike:",
        *(f"  {line}" for line in first_few(texts, SHOWN)),
        reason,
    ]
    return "\n".join(lines)
