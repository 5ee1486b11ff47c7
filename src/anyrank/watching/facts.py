"""The ranks' common knowledge: each rank's facts, gathered once, and where its tables differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from anyrank.models.digests import digests_of
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.training.random_state.generators import own_accelerator
from anyrank.training.steps.loader import ElasticLoader
from anyrank.watching import data_facts, model_rules
from anyrank.watching.data_facts import LoaderFacts
from anyrank.watching.findings import Finding
from anyrank.world.alike import RanksByText
from anyrank.world.ranks import Ranks

FINDINGS = 32  # of one rank itself
LINES = 32  # of a table, from each rank; keeps the gathered data small


Tables: TypeAlias = "dict[str, dict[str, str]]"
"""Lines that ranks should have alike, by table."""


@dataclass(frozen=True)
class Facts:
    """The facts of one rank: small, and without a tensor.

    Attributes:
        tensor_parallel: ranks that share one copy of the data.
        seed: seed of torch's generator, which is the same however often a rank has drawn.
        is_seeded: whether forwards run under seeds of their own, as an ElasticLoader's do.
        dropout: modules that draw random numbers in each forward.
        loader: None for none, and for an ElasticLoader.
        findings: findings of this rank alone.
    """

    tensor_parallel: int
    seed: int
    is_seeded: bool
    dropout: str
    loader: LoaderFacts | None
    findings: Sequence[Finding]


@dataclass(frozen=True)
class Known:
    """The input of the rules, the same on all ranks.

    Attributes:
        ranks: global ranks.
        facts: facts of each of them.
        differing: table -> line -> its texts, and their ranks.
        global_batch, accumulation: arguments of `check`.
    """

    ranks: tuple[int, ...]
    facts: Sequence[Facts]
    differing: Mapping[str, Mapping[str, RanksByText]]
    global_batch: int | None
    accumulation: int

    @property
    def data_parallel(self) -> int:
        """The number of ranks that should have different data."""
        return max(1, len(self.ranks) // max(facts.tensor_parallel for facts in self.facts))


def facts_of(
    model: nn.Module,
    optimizers: Sequence[Any],
    loader: Any,
    ranks: Ranks,
    written: Collection[int] | None = None,
    is_seeded: bool = False,
) -> tuple[Tables, Facts]:
    """This rank's tables and facts.

    Args:
        model: the model as it is trained.
        optimizers: its optimizers; none if they are not known.
        loader: the loader of its data, or None.
        ranks: the ranks that check together.
        written: ids of frozen parameters that forwards have written to, as they do to buffers; None
            if no forward ran, so that buffers are equal too.
        is_seeded: whether forwards ran under their own seeds.

    Raises:
        LoadError: the model's parameters are not its own (FSDP1).
    """
    parts = model_rules.take_apart(model)
    tensors = model_rules.readable(parts, written)
    frozen = {entry.name for entry in parts.parameters() if not entry.tensor.requires_grad}
    digests = digests_of((tensor.name, tensor.local()) for tensor in tensors)
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
    """The seed of the generator from which the model draws."""
    modules = [torch.get_device_module(d) for d in own_accelerator() if on_accelerator]
    seeds = (getattr(module, "initial_seed", torch.initial_seed) for module in modules)
    return next(seeds, torch.initial_seed)()


def _share(tensor: ShardedTensor) -> str | None:
    """A text that is equal for ranks that hold the same part of a tensor; None outside its mesh."""
    layout, coordinate = tensor.layout, tensor.coordinate
    if layout is None:
        return "whole"
    if coordinate is None:
        return None
    if layout.placements:  # along the other axes of the mesh, ranks hold the same part
        axes = zip(coordinate, layout.placements, strict=True)
        coordinate = [number for number, rule in axes if rule.kind == "shard"]
    return f"{layout} at {[*coordinate]}"
