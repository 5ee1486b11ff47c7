"""What the ranks know together: each rank's facts, gathered once, and where its tables differ.

A table has a line for each tensor and may be long, so only its digest is gathered. Where digests
differ, the lines are found in two more rounds: digests of buckets, then the lines of a few buckets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyrank.random_state.saved_streams import capture
from anyrank.state.digests import start_digests
from anyrank.steps.loader import ElasticLoader
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.watching import data_facts, model_facts
from anyrank.watching.data_facts import LoaderFacts
from anyrank.watching.model_facts import Some
from anyrank.world.ranks import Ranks

BUCKETS = 512
TABLES = 4  # of BUCKETS times 8 bytes: 16 KiB, and as much again for the lines
LINES = 64

Table = dict[str, str]
Values = dict[int, "str | None"]  # by rank; None where the rank's table lacks the line


@dataclass(frozen=True)
class Facts:
    """One rank's: small, and without a tensor."""

    digests: Mapping[str, str]
    sizes: Mapping[str, int]
    ddp: bool
    static_graph: bool
    tensor_parallel: int
    missing: Some
    stale: Some
    ties: tuple[tuple[str, str, str], ...]
    meta: Some
    off: Some
    device: str
    stream: str
    streams_given: bool
    dropout: Some
    loader: LoaderFacts | None
    training: Some
    broadcast: Some
    reentrant: Some


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
    given: Any, optimizers: Sequence[Any], loader: Any, ranks: Ranks, is_before: bool
) -> tuple[dict[str, Table], Facts]:
    """This rank's tables and facts.

    Args:
        given: the model.
        optimizers: of it; none when they are not known.
        loader: of its data, or None.
        ranks: that check together.
        is_before: whether no forward ran, so that buffers are alike as well.

    Raises:
        AnyrankError: the model's parameters are not its own (FSDP1).
    """
    model = model_facts.take_apart(given)
    held = model_facts.readable(model, buffers=is_before)
    values = [(one.name, one.local()) for one in held]
    digests = start_digests(values, ranks.check)()
    kinds = model_facts.kinds_of(model)
    tables = {
        "kinds": kinds,
        "order": {f"{number}": name for number, name in enumerate(kinds)},
    }
    for one, digest in zip(held, digests, strict=True):
        if (share := _share(one)) is not None:
            tables.setdefault(f"values {share}", {})[one.name] = str(digest)
    missing, stale = model_facts.left_out(model, optimizers) if optimizers else (Some(), Some())
    by_id = {id(one.tensor): digest for one, digest in zip(held, digests, strict=True)}
    meta, off, device = model_facts.misplaced(model, ranks.size)
    training, broadcast = model_facts.frozen_parts(model)
    streams = capture({})
    drawn = "device" if model.on_accelerator() and "device" in streams else "torch"
    return tables, Facts(
        {name: _digest(table.items()) for name, table in tables.items()},
        {name: len(table) for name, table in tables.items()},
        model.ddp is not None,
        model.ddp is not None and bool(model.ddp.static_graph),
        model.tensor_parallel(),
        missing,
        stale,
        tuple(model_facts.broken_ties(model, by_id)[: model_facts.SHOWN]),
        meta,
        off,
        device,
        streams[drawn].digest,
        isinstance(loader, ElasticLoader),  # each microbatch has a stream of its own
        model_facts.active_dropout(model),
        data_facts.look_at(loader),
        training,
        broadcast,
        model_facts.reentrant_parts(model) if model.ddp is not None else Some(),
    )


def _share(held: ShardedTensor) -> str | None:
    """The same for two ranks that hold the same part of a tensor; None outside of its mesh."""
    if held.layout is None:
        return "whole"
    if held.coordinate is None:
        return None
    return _digest([(str(held.layout), str(held.pieces))])


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
        Table -> line -> values, of about LINES lines of each table.
    """
    first: dict[str, str] = {}
    wrong: list[str] = []
    for one in facts:
        for name, digest in one.digests.items():
            if first.setdefault(name, digest) != digest and name not in wrong:
                wrong.append(name)
    if not wrong:
        return {}
    wrong = sorted(wrong)[:TABLES]
    buckets = {name: _buckets(tables[name]) for name in wrong if name in tables}
    packed = {name: [_digest(one) for one in cut] for name, cut in buckets.items()}
    every = ranks.gather({name: bytes.fromhex("".join(cut)) for name, cut in packed.items()})
    sent: dict[str, Table] = {}
    for name, cut in buckets.items():
        parts = [packed[name] for packed in every if name in packed]
        places = range(0, BUCKETS * 8, 8)
        different = [at // 8 for at in places if len({part[at : at + 8] for part in parts}) > 1]
        most = LINES * BUCKETS // max(one.sizes.get(name, 0) for one in facts)
        lines = {line for number in different[: max(1, most)] for line, _ in cut[number]}
        sent[name] = {line: value for line, value in tables[name].items() if line in lines}
    answers = ranks.gather(sent)
    found: dict[str, dict[str, Values]] = {}
    for name in wrong:
        has = {r: rows[name] for r, rows in zip(ranks.ranks, answers, strict=True) if name in rows}
        for line in dict.fromkeys(line for rows in has.values() for line in rows):
            values = {rank: rows.get(line) for rank, rows in has.items()}
            if len({*values.values()}) > 1:
                found.setdefault(name, {})[line] = values
    return found


def _buckets(table: Table) -> list[list[tuple[str, str]]]:
    """The lines of a table, sorted, by a hash of their names."""
    cut: list[list[tuple[str, str]]] = [[] for _ in range(BUCKETS)]
    for line in sorted(table.items()):
        name = hashlib.blake2b(line[0].encode(), digest_size=4).digest()
        cut[int.from_bytes(name, "little") % BUCKETS].append(line)
    return cut
