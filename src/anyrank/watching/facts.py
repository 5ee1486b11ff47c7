"""The input of the rules: the facts of each rank, and the differences between their tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from anyrank.models.digests import digests_of_values
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.training.random_state.generators import own_accelerator
from anyrank.training.steps.loader import ElasticLoader
from anyrank.watching import data_facts, model_rules
from anyrank.watching.data_facts import LoaderFacts
from anyrank.watching.findings import Finding
from anyrank.world.alike import RanksByText
from anyrank.world.ranks import Ranks

FINDINGS = 32  # that one rank reports about itself
LINES = 32  # of a table, per rank; keeps the gathered data small


Tables: TypeAlias = "dict[str, dict[str, str]]"
"""Table -> line -> text; the lines that should be the same on every rank."""


@dataclass(frozen=True)
class Facts:
    """The facts of one rank: small, and without tensors.

    Attributes:
        tensor_parallel: ranks that share one copy of the data.
        seed: seed of torch's generator; it does not depend on how many numbers were drawn.
        is_seeded: whether each forward has its own seed, as with an ElasticLoader.
        dropout: modules that draw random numbers in each forward.
        loader: facts about the loader; None for no loader, and for an ElasticLoader.
        findings: findings that need only this rank.
    """

    tensor_parallel: int
    seed: int
    is_seeded: bool
    dropout: str
    loader: LoaderFacts | None
    findings: Sequence[Finding]


@dataclass(frozen=True)
class Known:
    """The input of the rules.

    Attributes:
        ranks: global ranks.
        facts: facts of each rank.
        differing: table -> line -> each text, with the ranks that have it.
        global_batch, accumulation: arguments of `check`.
    """

    ranks: tuple[int, ...]
    facts: Sequence[Facts]
    differing: Mapping[str, Mapping[str, RanksByText]]
    global_batch: int | None
    accumulation: int

    @property
    def data_parallel(self) -> int:
        """Number of ranks that should have different data."""
        return max(1, len(self.ranks) // max(facts.tensor_parallel for facts in self.facts))


def facts_of(
    model: nn.Module,
    optimizers: Sequence[Any],
    loader: Any,
    ranks: Ranks,
    written: Collection[int] | None = None,
    is_seeded: bool = False,
) -> tuple[Tables, Facts]:
    """Return the tables and the facts of this rank.

    Args:
        model: the model as it is trained.
        optimizers: its optimizers; empty if unknown.
        loader: the loader of the training data, or None.
        ranks: the ranks that check together.
        written: ids of the frozen parameters that forwards have changed; None if no forward has
            run, so that buffers are compared too.
        is_seeded: whether forwards ran with their own seeds.

    Raises:
        LoadError: the model is wrapped by FSDP1.
    """
    parts = model_rules.take_apart(model)
    tensors = model_rules.readable(parts, written)
    frozen = {entry.name for entry in parts.parameters() if not entry.tensor.requires_grad}
    digests = digests_of_values((tensor.name, tensor.local()) for tensor in tensors)
    kinds = model_rules.kinds_of(parts)
    tables = {
        "kinds": kinds,
        "order": {f"{number}": name for number, name in enumerate(kinds)},
    }
    for tensor, digest in zip(tensors, digests, strict=True):
        if (share := _share(tensor)) is not None:
            what = f"values frozen {share}" if tensor.name in frozen else f"values {share}"
            tables.setdefault(what, {})[tensor.name] = digest
    by_id = {id(item.tensor): digest for item, digest in zip(tensors, digests, strict=True)}
    return (
        tables,
        Facts(
            parts.tensor_parallel(),
            _seed(parts.on_accelerator()),
            is_seeded or isinstance(loader, ElasticLoader),
            model_rules.active_dropout(parts),
            data_facts.look_at(loader),
            [*model_rules.own_findings(parts, optimizers, by_id)][:FINDINGS],
        ),
    )


def _seed(on_accelerator: bool) -> int:
    """Return the seed of the generator from which the model draws."""
    modules = [torch.get_device_module(d) for d in own_accelerator() if on_accelerator]
    seeds = (getattr(module, "initial_seed", torch.initial_seed) for module in modules)
    return next(seeds, torch.initial_seed)()


def _share(tensor: ShardedTensor) -> str | None:
    """Return a text that identifies a rank's part of a tensor; None outside of its mesh."""
    layout, coordinate = tensor.layout, tensor.coordinate
    if layout is None:
        return "whole"
    if coordinate is None:
        return None
    if layout.placements:  # along mesh axes that do not shard, ranks hold the same part
        axes = zip(coordinate, layout.placements, strict=True)
        coordinate = [number for number, rule in axes if rule.kind == "shard"]
    return f"{layout} at {[*coordinate]}"
