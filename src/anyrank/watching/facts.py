"""What the ranks know together: each rank's facts, gathered once, and where its tables differ.

A table has a line for each tensor and may be long, so only its digest is gathered. Where digests
differ, one rank sends its table to all, and each answers with the lines that it has otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anyrank.random_state.streams import own_accelerator
from anyrank.state.digests import digests_of
from anyrank.steps.loader import ElasticLoader
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.watching import data_facts, model_rules
from anyrank.watching.data_facts import LoaderFacts
from anyrank.watching.findings import Finding
from anyrank.world.ranks import Ranks

FINDINGS = 32  # of a rank itself; what is gathered is small
TABLES = 4  # that are compared line by line
LINES = 32  # of each, from each rank

Table = dict[str, str]
Values = dict[int, "str | None"]  # by rank; None where the rank's table lacks the line


@dataclass(frozen=True)
class Facts:
    """One rank's: small, and without a tensor.

    Attributes:
        digests: of each table.
        tensor_parallel: ranks that share one copy of the data.
        seed: of torch's generator, which is the same however often a rank has drawn.
        is_seeded: whether forwards run under seeds of their own, as an ElasticLoader's do.
        dropout: modules that draw random numbers in each forward.
        loader: None for none, and for an ElasticLoader.
        findings: of this rank by itself.
    """

    digests: Mapping[str, str]
    tensor_parallel: int
    seed: int
    is_seeded: bool
    dropout: str
    loader: LoaderFacts | None
    findings: Sequence[Finding]


@dataclass(frozen=True)
class Known:
    """What the rules are given, the same on all ranks.

    Attributes:
        ranks: global ranks.
        facts: of each.
        differing: table -> line -> its values.
        global_batch, accumulation: arguments of `check`.
    """

    ranks: tuple[int, ...]
    facts: Sequence[Facts]
    differing: Mapping[str, Mapping[str, Values]]
    global_batch: int | None
    accumulation: int

    @property
    def data_parallel(self) -> int:
        """Ranks that should have different data."""
        return max(1, len(self.ranks) // max(facts.tensor_parallel for facts in self.facts))


def facts_of(
    model: nn.Module,
    optimizers: Sequence[Any],
    loader: Any,
    ranks: Ranks,
    written: Collection[int] | None = None,
    is_seeded: bool = False,
) -> tuple[dict[str, Table], Facts]:
    """This rank's tables and facts.

    Args:
        model: as it is trained.
        optimizers: of it; none when they are not known.
        loader: of its data, or None.
        ranks: that check together.
        written: ids of frozen parameters that forwards have written to, as to buffers; None where
            none ran, so that buffers are alike as well.
        is_seeded: whether forwards ran under seeds of their own.

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
            {name: _digest(table.items()) for name, table in tables.items()},
            parts.tensor_parallel(),
            _seed(parts.on_accelerator()),
            is_seeded or isinstance(loader, ElasticLoader),
            model_rules.active_dropout(parts),
            data_facts.look_at(loader),
            [*model_rules.own_findings(parts, optimizers, by_id)][:FINDINGS],
        ),
    )


def _seed(on_accelerator: bool) -> int:
    """The seed of the generator that the model draws from."""
    modules = [torch.get_device_module(d) for d in own_accelerator() if on_accelerator]
    seeds = (getattr(module, "initial_seed", torch.initial_seed) for module in modules)
    return next(seeds, torch.initial_seed)()


def _share(tensor: ShardedTensor) -> str | None:
    """The same for two ranks that hold the same part of a tensor; None outside of its mesh."""
    if tensor.layout is None:
        return "whole"
    if tensor.coordinate is None:
        return None
    return _digest([(str(tensor.layout), str(tensor.pieces))])


def _digest(lines: Iterable[tuple[str, str]]) -> str:
    return hashlib.blake2b(repr(list(lines)).encode(), digest_size=8).hexdigest()


def differences(
    tables: Mapping[str, Table], facts: Sequence[Facts], ranks: Ranks
) -> dict[str, dict[str, Values]]:
    """Lines of the tables that differ between ranks that have the table. All ranks.

    Args:
        tables: of this rank.
        facts: of every rank, in order.
        ranks: that check together.

    Returns:
        Table -> line -> values, of the first LINES lines that a rank has otherwise than the first.
    """
    having: dict[str, list[int]] = {}
    digests: dict[str, set[str]] = {}
    for rank, known in zip(ranks.ranks, facts, strict=True):
        for name, digest in known.digests.items():
            having.setdefault(name, []).append(rank)
            digests.setdefault(name, set()).add(digest)
    wrong = sorted(name for name in having if len(digests[name]) > 1)[:TABLES]
    return {name: _differing(tables.get(name), name, having[name], ranks) for name in wrong}


def _differing(
    table: Table | None, name: str, having: Sequence[int], ranks: Ranks
) -> dict[str, Values]:
    """Line -> values, of the lines of one table that differ between the ranks that have it."""
    first = ranks.run_on_one(f"comparing {name}", lambda: table or {}, having[0])
    table = first if table is None else table
    lines = [line for line in {**first, **table} if table.get(line) != first.get(line)][:LINES]
    answers = ranks.gather({line: table.get(line) for line in lines})
    by_rank = dict(zip(ranks.ranks, answers, strict=True))
    return {
        line: {rank: by_rank[rank].get(line, first.get(line)) for rank in having}
        for line in dict.fromkeys(line for answer in answers for line in answer)
    }
