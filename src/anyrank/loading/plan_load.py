"""Everything before the first byte of payload: who sees what, headers, the plan, and agreement on
it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anyrank.errors import AnyrankError, LoadError
from anyrank.files.formats import Source, list_memory, list_source
from anyrank.files.storage import storage_for
from anyrank.frozen.freeze import frozen_parts
from anyrank.loading.allocate import default_buffer
from anyrank.loading.match_model import Prepared, fit
from anyrank.loading.options import Options
from anyrank.loading.strategy import decide
from anyrank.tensors.sharded_tensor import Coordinates, coordinates_of, replicas
from anyrank.world.ranks import Ranks


@dataclass(frozen=True)
class SourceInfo:
    """What a rank was given as a source, and whether it is there.

    Attributes:
        given: the paths, or "a table in memory", or "" for None or an empty table.
        there: whether this rank can read it.
        in_memory: whether it is a table.
        seed: this rank's torch seed; the first rank's is used for first values.
    """

    given: str
    there: bool
    in_memory: bool
    seed: int


def prepare(model: nn.Module, source: Source | None, ranks: Ranks, options: Options) -> Prepared:
    """Plan a load and agree on it. All ranks; nothing is changed.

    Raises:
        LoadError: of any rank, on all ranks.
    """
    sights = ranks.together("looking at the source", lambda: _look(source))
    first = _agreed_reader(sights, ranks)
    listing = ranks.from_one("reading the headers", first, lambda: list_source(_given(source)))

    plans: list[Prepared] = []

    def plan_here() -> tuple[str, Coordinates, bool, bool, dict[str, str | None], int]:
        # A table lies differently in each rank's memory, so each looks at its own.
        mine = list_memory(source) if isinstance(source, Mapping) and source else listing
        plans.append(fit(model, mine, options, sights[0].seed))
        targets = plans[0].targets
        buffer = options.buffer_bytes or default_buffer(targets)
        hollow = any(t.is_meta and t.kind == "derived" for t in targets)
        real = any(not targets[index].is_meta for index in plans[0].stored)
        parts: dict[str, str | None] = {
            name: part.anyrank_frozen.digest  # type: ignore[union-attr]
            for name, part in frozen_parts(model)
        }
        return _digest(plans[0]), coordinates_of(targets), hollow, real, parts, buffer

    answers = ranks.together("planning the load", plan_here)
    digests, coordinates, hollow, real, parts, buffers = zip(*answers, strict=True)
    if len(set(digests)) > 1:
        _explain_difference(plans[0], ranks)
    _compare_frozen(parts, ranks)
    plans[0].rebuild, plans[0].in_place = any(hollow), any(real)
    plans[0].buffer_bytes = min(buffers)
    return _decided(plans[0], options, ranks, coordinates, [sight.there for sight in sights])


def _compare_frozen(parts: Sequence[Mapping[str, str | None]], ranks: Ranks) -> None:
    """Nobody broadcasts frozen parts, so they must be equal to begin with.

    Raises:
        LoadError: a part whose hash, taken when it was frozen, differs between ranks.
    """
    for name, digest in parts[0].items():
        for rank, others in zip(ranks.ranks, parts, strict=True):
            if others.get(name) != digest and None not in (digest, others.get(name)):
                raise LoadError(
                    f"the frozen part {name or 'itself'} differs between ranks: "
                    f"rank {ranks.ranks[0]} has {digest}, rank {rank} has {others.get(name)}: "
                    "freeze the same weights on every rank"
                )


def _decided(
    prepared: Prepared,
    options: Options,
    ranks: Ranks,
    coordinates: Sequence[Coordinates],
    sees: Sequence[bool],
) -> Prepared:
    """Choose the strategy, from what all ranks know of one another."""
    prepared.coordinates = dict(zip(ranks.ranks, coordinates, strict=True))
    shared = _replicated(prepared, dict(zip(ranks.ranks, ranks.nodes, strict=True)))
    prepared.decision = decide(options.strategy, ranks.ranks, ranks.nodes, sees, shared)
    return prepared


def _given(source: Source | None) -> Source:
    if source is None:
        raise LoadError("the source is None on every rank: give a path, a list or a table")
    return source


def _look(source: Source | None) -> SourceInfo:
    seed = torch.initial_seed()
    if source is None or isinstance(source, Mapping):
        filled = bool(source)
        return SourceInfo("a table in memory" if filled else "", filled, True, seed)
    several = isinstance(source, Sequence) and not isinstance(source, str)
    paths = [os.fspath(path) for path in source] if several else [os.fspath(source)]  # type: ignore[arg-type]
    there = True
    for path in paths:
        try:
            storage = storage_for(path)
            there = there and (storage.is_file(path) or storage.is_dir(path))
        except (AnyrankError, ImportError):
            raise
        except Exception as error:  # each of fsspec's file systems has errors of its own
            raise LoadError(f"{path}: cannot be reached: {error}") from error
    return SourceInfo(", ".join(paths), there, False, seed)


def _agreed_reader(sights: list[SourceInfo], ranks: Ranks) -> int:
    """The rank whose headers count: the first that sees the source.

    Raises:
        LoadError: ranks were given different sources.
    """
    given: dict[str, int] = {}
    for sight, rank in zip(sights, ranks.ranks, strict=True):
        if sight.given:
            given.setdefault(sight.given, rank)
    if len(given) > 1:
        (one, rank), (other, other_rank) = list(given.items())[:2]
        raise LoadError(
            f"ranks were given different sources: rank {rank} {one!r}, rank {other_rank} "
            f"{other!r}; give all ranks the same one, or None to those that have none"
        )
    for sight, rank in zip(sights, ranks.ranks, strict=True):
        if sight.there:
            return rank
    for sight, rank in zip(sights, ranks.ranks, strict=True):
        if sight.given:
            return rank
    return ranks.ranks[0]


def _replicated(prepared: Prepared, node_of: Mapping[int, int]) -> int:
    """Bytes that ranks on different machines hold alike."""
    if len(set(node_of.values())) == 1:
        return 0
    total = 0
    for index, tensor in prepared.stored.items():
        groups = replicas(index, prepared.targets[index], prepared.coordinates)
        for pieces, members in groups.items():
            if len({node_of[member] for member in members}) > 1:
                total += sum(piece.box.numel for piece in pieces) * tensor.dtype.itemsize
    return total


def _digest(prepared: Prepared) -> str:
    table = [
        (
            target.describe(),
            str(prepared.stored[index].dtype) if index in prepared.stored else "",
            index in prepared.compared,
            index in prepared.initialise,
        )
        for index, target in enumerate(prepared.targets)
    ]
    return hashlib.blake2b(repr(table).encode(), digest_size=16).hexdigest()


def _explain_difference(prepared: Prepared, ranks: Ranks) -> None:
    """Raise the first difference between the ranks' models. All ranks."""
    tables = ranks.gather([target.describe() for target in prepared.targets])
    for rank, table in zip(ranks.ranks[1:], tables[1:], strict=True):
        for ours, theirs in zip(tables[0], table, strict=False):
            if ours != theirs:
                raise LoadError(
                    f"the ranks' models differ: rank {ranks.ranks[0]} has {_told(ours)}, "
                    f"rank {rank} has {_told(theirs)}"
                )
        if len(table) != len(tables[0]):
            raise LoadError(
                f"the ranks' models differ: rank {ranks.ranks[0]} has {len(tables[0])} tensors, "
                f"rank {rank} has {len(table)}"
            )
    raise LoadError(
        "the ranks' renaming functions give different names, or their tables have other keys or "
        "dtypes"
    )


def _told(described: tuple[str, tuple[int, ...], str, str]) -> str:
    name, shape, dtype, layout = described
    return f"{name} {list(shape)} {dtype}" + ("" if layout == "None" else f" {layout}")
