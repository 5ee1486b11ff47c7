"""Everything before the first byte of payload: who sees what, headers, targets, names,
agreement.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.files.formats import Source, list_source
from anyrank.files.listing import Listing, join
from anyrank.files.storage import storage_for
from anyrank.loading.conversions import converted, declared_ignorable
from anyrank.loading.exchange import Coordinates, coordinates_of, replicas
from anyrank.loading.freeze import frozen_parts
from anyrank.loading.strategy import Decision, decide
from anyrank.loading.targets import Target, find_targets
from anyrank.tensors.names import Match, Rename, match, near, renamer
from anyrank.tensors.spec import StoredTensor
from anyrank.world.ranks import Ranks

MISSING = ("error", "init", "keep")
UNEXPECTED = ("error", "ignore")
CAST = ("float", "any")
SHOWN = 10


@dataclass(frozen=True)
class Options:
    """The caller's choices, checked."""

    missing: str = "error"
    unexpected: str = "error"
    cast: str = "float"
    rename: Rename = None
    strategy: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (("missing", MISSING), ("unexpected", UNEXPECTED), ("cast", CAST)):
            if getattr(self, name) not in allowed:
                raise LoadError(
                    f"{name}={getattr(self, name)!r} is unknown; give one of {', '.join(allowed)}"
                )


@dataclass(frozen=True)
class Sight:
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


@dataclass
class Prepared:
    """A load that can only fail by I/O from here on.

    Attributes:
        targets: every tensor of the model.
        stored: index of a target -> its bytes.
        initialise: indices of targets that a rule fills.
        keep: indices of missing targets that keep their values.
        match: names, for the report.
        ignored: unexpected keys that the model declares ignorable, or non-persistent buffers.
        frozen: frozen parts -> the source of their own that fills them.
        retie: tensors whose declared tie was broken -> the tensor to hang in their place.
        decision: who reads.
        coordinates: of every rank, by global rank.
        rebuild: whether any rank has non-persistent buffers on meta.
        in_place: whether any rank writes into memory that held values before.
    """

    targets: list[Target]
    listing: Listing
    seed: int
    stored: dict[int, StoredTensor]
    initialise: list[int]
    keep: list[int]
    match: Match
    ignored: list[str]
    frozen: dict[str, str]
    retie: dict[int, int]
    decision: Decision = field(init=False)
    coordinates: dict[int, Coordinates] = field(init=False)
    rebuild: bool = False
    in_place: bool = False


def prepare(model: nn.Module, source: Source | None, ranks: Ranks, options: Options) -> Prepared:
    """Plan a load and agree on it. All ranks; nothing is changed.

    Raises:
        LoadError: of any rank, on all ranks.
    """
    sights = ranks.together("looking at the source", lambda: _look(source))
    first = _agreed_reader(sights, ranks)
    listing = ranks.from_one("reading the headers", first, lambda: list_source(_given(source)))

    plans: list[Prepared] = []

    def plan_here() -> tuple[str, Coordinates, bool, bool, dict[str, str | None]]:
        plans.append(_plan(model, listing, options, sights[0].seed))
        targets = plans[0].targets
        hollow = any(t.is_meta and t.kind == "derived" for t in targets)
        real = any(not targets[index].is_meta for index in plans[0].stored)
        parts: dict[str, str | None] = {
            name: part.anyrank_frozen.digest  # type: ignore[union-attr]
            for name, part in frozen_parts(model)
        }
        return _digest(plans[0]), coordinates_of(targets), hollow, real, parts

    answers = ranks.together("planning the load", plan_here)
    digests, coordinates, hollow, real, parts = zip(*answers, strict=True)
    if len(set(digests)) > 1:
        _explain_difference(plans[0], ranks)
    _compare_frozen(parts, ranks)
    plans[0].rebuild, plans[0].in_place = any(hollow), any(real)
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


def _look(source: Source | None) -> Sight:
    seed = torch.initial_seed()
    if source is None or isinstance(source, Mapping):
        filled = bool(source)
        return Sight("a table in memory" if filled else "", filled, True, seed)
    several = isinstance(source, Sequence) and not isinstance(source, str)
    paths = [os.fspath(path) for path in source] if several else [os.fspath(source)]  # type: ignore[arg-type]
    there = True
    for path in paths:
        storage = storage_for(path)
        there = there and (storage.is_file(path) or storage.is_dir(path))
    return Sight(", ".join(paths), there, False, seed)


def _agreed_reader(sights: list[Sight], ranks: Ranks) -> int:
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
            f"{other!r}; "
            "give all ranks the same one, or None to those that have none"
        )
    for sight, rank in zip(sights, ranks.ranks, strict=True):
        if sight.there:
            return rank
    for sight, rank in zip(sights, ranks.ranks, strict=True):
        if sight.given:
            return rank
    return ranks.ranks[0]


def _plan(model: nn.Module, listing: Listing, options: Options, seed: int) -> Prepared:
    targets = find_targets(model)
    loadable = [i for i, target in enumerate(targets) if target.kind != "derived"]
    listing, rename = converted(model, targets, listing, renamer(options.rename))
    found = match([targets[i].wanted() for i in loadable], listing.tensors, rename)
    stored = {loadable[i]: listing.tensors[key] for i, key in found.keys.items()}
    missing = [loadable[i] for i in found.missing]
    listing, frozen = _frozen_sources(targets, missing, stored, listing)
    missing = [i for i in missing if i not in stored]
    retie = _declared_ties(model, targets, missing, stored)
    missing = [i for i in missing if i not in retie]
    ignored = [key for key in found.unexpected if _is_ignorable(key, targets, model, rename)]
    found.unexpected = [key for key in found.unexpected if key not in ignored]
    adapters = [i for i in missing if targets[i].adapter]
    absent = [i for i in missing if i not in adapters]
    problems = _problems(targets, stored, absent, found, listing, options)
    if problems:
        raise LoadError("\n".join(problems))
    init = options.missing == "init"
    initialise = [i for i in missing if init or targets[i].is_meta]
    initialise = [i for i in initialise if i not in adapters or targets[i].is_meta]
    keep = [i for i in missing if i not in initialise]
    found.missing = absent
    return Prepared(targets, listing, seed, stored, initialise, keep, found, ignored, frozen, retie)


def _frozen_sources(
    targets: list[Target], missing: list[int], stored: dict[int, StoredTensor], listing: Listing
) -> tuple[Listing, dict[str, str]]:
    """Fill what the source lacks of frozen parts from the parts' own sources."""
    parts: dict[int, list[int]] = {}
    for index in missing:
        part = targets[index].frozen
        if part is not None and part.anyrank_frozen.source is not None:  # type: ignore[union-attr]
            parts.setdefault(id(part), []).append(index)
    frozen: dict[str, str] = {}
    for indices in parts.values():
        part: Any = targets[indices[0]].frozen
        own = list_source(part.anyrank_frozen.source)
        base = len(listing.files)
        inner = find_targets(part)
        kept = [t for t in inner if t.kind != "derived"]
        keys = match([t.wanted() for t in kept], own.tensors, lambda key: key).keys
        by_tensor = {id(t.tensor): keys.get(n) for n, t in enumerate(kept)}
        renamed = {f"{base}/{key}": stored_tensor for key, stored_tensor in own.tensors.items()}
        listing = join(listing.format, [listing, own.with_tensors(renamed)])
        for index in indices:
            key = by_tensor.get(id(targets[index].tensor))
            if key is not None:
                stored[index] = listing.tensors[f"{base}/{key}"]
        frozen[targets[indices[0]].name.rsplit(".", 1)[0]] = str(part.anyrank_frozen.source)
    return listing, frozen


def _declared_ties(
    model: nn.Module, targets: list[Target], missing: list[int], stored: Mapping[int, StoredTensor]
) -> dict[int, int]:
    """Missing tensors that the model says are others' (to_empty unties them): tied again, if
    plain.
    """
    declared: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    names = {name: i for i, t in enumerate(targets) for place in t.places for name in place.names}
    ties: dict[int, int] = {}
    for index in missing:
        partner = next((declared[n] for n in targets[index].places[0].names if n in declared), None)
        source = names.get(partner) if partner is not None else None
        if source is None or source not in stored:
            continue
        if targets[source].layout is None and targets[index].layout is None:
            ties[index] = source
    return ties


def _is_ignorable(key: str, targets: list[Target], model: nn.Module, rename: Any) -> bool:
    derived = {n for t in targets if t.kind == "derived" for p in t.places for n in p.names}
    return rename(key) in derived or declared_ignorable(model, key)


def _problems(
    targets: list[Target],
    stored: dict[int, StoredTensor],
    absent: list[int],
    found: Match,
    listing: Listing,
    options: Options,
) -> list[str]:
    """Everything that is wrong with names, shapes and dtypes, in one list."""
    names = [name for target in targets for place in target.places for name in place.names[-1:]]
    unfilled = [targets[i].name for i in absent]
    lines: list[str] = []
    on_meta = [targets[i].name for i in absent if targets[i].is_meta]
    if options.missing == "error" and unfilled:
        shown = [f"{name}{near(name, found.unexpected)}" for name in unfilled]
        lines.append(
            _listed("missing in the source", shown)
            + "\n  to go on: rename=..., or missing='init' for the model's own first values, or "
            "'keep'"
        )
    elif options.missing == "keep" and on_meta:
        lines.append(
            _listed("missing in the source, and on meta, so there is nothing to keep", on_meta)
            + "\n  to go on: missing='init'"
        )
    if options.unexpected == "error" and found.unexpected:
        shown = [f"{key}{near(key, unfilled or names)}" for key in found.unexpected]
        lines.append(
            _listed("unexpected in the source", shown)
            + "\n  to go on: rename=..., or unexpected='ignore'"
        )
    for index, tensor in stored.items():
        line = _misfit(targets[index], tensor, options.cast)
        if line:
            lines.append(line)
    if lines:
        where = listing.files[0].path if listing.files else listing.format
        lines.insert(0, f"{where} ({listing.format}) does not fit the model:")
    return lines


def _misfit(target: Target, stored: StoredTensor, cast: str) -> str | None:
    if stored.shape != target.shape:
        return (
            f"{target.name}: the model has shape {list(target.shape)}, "
            f"the source {list(stored.shape)} ({stored.name})"
        )
    have, want = stored.dtype, target.dtype
    if have == want or cast == "any" or (have.is_floating_point and want.is_floating_point):
        return None
    if have.is_complex and want.is_complex:
        return None
    same = not (have.is_floating_point or have.is_complex or want.is_floating_point)
    if same and not want.is_complex and torch.can_cast(have, want):
        return None
    return (
        f"{target.name}: {have} of the source ({stored.name}) does not become {want} of the model "
        "by itself: ask for it with cast='any'"
    )


def _listed(title: str, items: list[str]) -> str:
    more = f"\n  ... and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return f"{title} ({len(items)}):\n  " + "\n  ".join(items[:SHOWN]) + more


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
        (target.describe(), index in prepared.stored, index in prepared.initialise)
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
    raise LoadError("the ranks were called with different options (missing=, rename=, ...)")


def _told(described: tuple[str, tuple[int, ...], str, str]) -> str:
    name, shape, dtype, layout = described
    return f"{name} {list(shape)} {dtype}" + ("" if layout == "None" else f" {layout}")
