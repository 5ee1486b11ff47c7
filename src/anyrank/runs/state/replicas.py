"""Compare by digest, before a save writes anything, what several ranks should hold equally.

A save takes each element from one rank. If replicas differ, the run has no single value: for
trained tensors that is an error, for anything else the first rank's value is saved. Each save
compares one ninth of every tensor, in turns, so that nine saves have compared all; a run may ask
for full comparisons between its saves.
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
from anyrank.models.digests import digests_of_values
from anyrank.models.spreads import replicas_here, spreads_of
from anyrank.runs.state.part_types import SHOWN, PartState, shared_tensors
from anyrank.runs.state.train_state import TrainState
from anyrank.tensors.sharded_tensor import Members, ShardedTensor
from anyrank.tensors.spread import Spread
from anyrank.wording import first_few
from anyrank.world.alike import RanksByText, join_digests
from anyrank.world.first_ranks import name_ranks
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
    """Find the names of tensors that differ and may; the first rank's are saved. Collective.

    Args:
        parts: parts of the state.
        spreads: layout of each of their tensors on the ranks.
        turn: number of saves so far, the same on every rank.
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
    may_differ = {tensor.name for tensor in shared_tensors(parts) if tensor.may_differ}
    wrong = {name: by_text for name, by_text in differing.items() if name not in may_differ}
    if wrong:
        others = sorted(differing.keys() - wrong.keys())
        raise CheckpointError(
            _describe(f"step {step} was not saved, because replicas differ:", wrong, parts, others)
            + "\nOnly one ninth of each tensor is compared per save; other differences may exist. "
            "Checkpoints(replicas_every=1) compares everything, and reports the first step."
        )
    if ranks.index == 0:
        log.warning(
            "%d tensors differ between the ranks; the first rank's are saved: %s",
            len(differing),
            ", ".join(sorted(differing)[:SHOWN]),
        )
    return sorted(differing)


def find_identical(
    parts: Mapping[str, PartState], known: Mapping[str, Collection[str]], ranks: Ranks
) -> dict[str, list[str]]:
    """Find the unsharded optimizer state that is identical on every rank, by part. Collective.

    An example is a preconditioner that each rank computes from whole gradients. Any number of ranks
    can resume it.

    Whole values are compared in each save, because a save by only the first rank would lose any
    that differ.

    Args:
        parts: parts of the state, with records that are the same on every rank.
        known: names that were identical when this run was sharded, by part; the state of an
            unsharded parameter does not show it.
        ranks: ranks that save together.
    """
    identical = {
        part: sorted({tensor.name for tensor in parts[part].tensors}.intersection(names))
        for part, names in known.items()
        if part in parts
    }
    beside = {part: saved for part, saved in parts.items() if saved.agreement == "equal"}
    if any(saved.own_tensors for saved in beside.values()):  # the same on every rank, like records
        named = [
            (replace(tensor, name=name), ranks.ranks)
            for saved in beside.values()
            for name, tensor in saved.beside_shards.items()
        ]
        wrong = differing_replicas(named, ranks, _digests_with_shapes)
        for part, saved in beside.items():
            names = [name for name in saved.beside_shards if name not in wrong]
            identical[part] = sorted({*identical.get(part, ()), *names})
    return {part: names for part, names in identical.items() if names}


def _digests_with_shapes(tensors: Iterable[ShardedTensor]) -> list[str]:
    rows = [*tensors]
    digests = digests_of_values((tensor.name, tensor.local()) for tensor in rows)
    pairs = zip(digests, rows, strict=True)
    return [f"{digest} {list(row.shape)} {row.dtype}" for digest, row in pairs]


def check_replicas(state: TrainState, ranks: Ranks) -> None:
    """Compare all of the model and the optimizers, without a save. Collective.

    Raises:
        CheckpointError: trained tensors differ; the error names one, the ranks and the step.
    """

    def list_own() -> tuple[dict[str, PartState], Inventory]:
        parts = state.parts.save_tensors(ranks.index)
        return parts, inventory_of(shared_tensors(parts), ranks)

    parts, inventory = ranks.run_and_reduce("looking at the replicas", list_own, join_digests)
    tensors = shared_tensors(parts)
    title = f"step {state.step}: the ranks' states differ"
    check_alike(title, tensors, inventory, ranks, CheckpointError)
    coordinates = find_coordinates(tensors, inventory, ranks)
    replicas = [*replicas_here(tensors, spreads_of(tensors, coordinates, ranks), ranks)]
    differing = _differing_tensors([r for r in replicas if not r[0].may_differ], None, ranks)
    if differing:  # the same on every rank, so that all of them gather once more
        others = _differing_tensors([r for r in replicas if r[0].may_differ], None, ranks)
        head = f"step {state.step}: replicas differ:"
        raise CheckpointError(_describe(head, differing, parts, sorted(others)))


def _differing_tensors(
    tensors: Iterable[tuple[ShardedTensor, Members]], turn: int | None, ranks: Ranks
) -> dict[str, RanksByText]:
    """Find the tensors that differ, by name: in the ninth of `turn`, or in all. Collective."""

    def digest_all(own_tensors: Iterable[ShardedTensor]) -> list[str]:
        return digests_of_values((t.name, _compared_part(t.local(), turn)) for t in own_tensors)

    return differing_replicas(tensors, ranks, digest_all)


def _compared_part(tensor: torch.Tensor, turn: int | None) -> torch.Tensor:
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
        head: the first line.
        wrong: name of each tensor that must not differ -> its digests, and their ranks.
        parts: parts of the state.
        others: names of tensors that differ too, which is allowed.
    """
    texts = [
        f"{name}: " + " vs. ".join(name_ranks(some) for some in by_text.values())
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
            f"The weights are the same, so {optimizers[0]} probably is a sharded optimizer that "
            "keeps per-rank state in plain tensors. Store it as DTensors, which record the shard "
            "of each rank, or implement state_dict() and load_state_dict() in the optimizer. If "
            "it is not sharded, its ranks have diverged; resume the last checkpoint."
        )
    else:
        reason = (
            "The replicas have diverged. Likely causes:\n"
            "- the forward bypassed the wrapper (model.module(...))\n"
            "- a parameter was unfrozen after DDP was built\n"
            "- microbatches() was not given a trained module, such as a loss "
            "(pass nn.ModuleList([model, loss]))\n"
            "- an update on only one rank, or with per-rank values: a buffer, data, random "
            "numbers\n"
            "Fix: resume the last checkpoint. If the tensors are shards of one tensor, store them "
            "as DTensors (DTensor.from_local)."
        )
        if others:
            names = ", ".join(others[:SHOWN])
            reason += f"\nThese tensors may differ, and do: {names}"
    lines = [
        head,
        *(f"  {line}" for line in first_few(texts, SHOWN)),
        reason,
    ]
    return "\n".join(lines)
