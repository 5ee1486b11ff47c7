"""Everything before the first byte of payload: headers, who sees the source, the agreed plan."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from anyrank.errors import AnyrankError, LoadError, WrongValue
from anyrank.files.listing import Listing
from anyrank.files.storage import storage_for
from anyrank.filling.reading import Reading, caches_of, why_own
from anyrank.formats.sources import Source, list_source
from anyrank.model.alike import check_alike
from anyrank.model.dialects import ModelMatch
from anyrank.model.frozen_parts import FrozenSource, frozen_parts, frozen_sources
from anyrank.model.match import match_model, warn_of_idle
from anyrank.model.options import LoadOptions
from anyrank.model.share import default_buffer
from anyrank.model.tensors import ModelTensor, find_tensors
from anyrank.tensors.sharded_tensor import Coordinates, coordinates_of
from anyrank.world.ranks import Ranks

SMALL_BYTES = 64 << 10  # of headers that go with the first message; longer ones are broadcast


@dataclass(frozen=True)
class Headers:
    """What one rank has read for all.

    Attributes:
        listing: what the source holds; None where all ranks know it already.
        parts: what the sources of frozen parts hold.
    """

    listing: Listing | None
    parts: dict[FrozenSource, Listing]


@dataclass(frozen=True)
class SourceInfo:
    """What a rank was given as a source, and whether it is there.

    Attributes:
        source: the paths, or "a dict of tensors", or "" for None or an empty dict.
        location: of local paths, where they are; ranks with others have copies.
        visible: whether this rank can read it.
        seed: this rank's torch seed.
        is_live: whether it is a dict that has sharded tensors, of which no rank has all bytes.
        headers: what it holds, if this rank has read them for all, and they are few bytes.
    """

    source: str
    visible: bool
    seed: int
    location: str = ""
    is_live: bool = False
    headers: Headers | None = None


@dataclass(frozen=True)
class AgreedPlan:
    """A load that can only fail by I/O from here on.

    Attributes:
        match: what fills each tensor of this rank's model; equal on all ranks in names and shapes.
        reading: who reads, and why.
        buffer_bytes: staging memory; the smallest of all ranks', since exchanges need one size.
        seed: the first rank's torch seed, for tensors that a rule fills.
        rebuild: whether any rank has non-persistent buffers on meta.
        in_place: whether any rank writes into memory that held values before.
    """

    match: ModelMatch
    reading: Reading
    buffer_bytes: int
    seed: int
    rebuild: bool
    in_place: bool


@dataclass(frozen=True)
class _MatchSummary:
    """What a rank lets the others know of its match.

    Attributes:
        digest: of all that must be equal on all ranks.
        coordinates: where this rank is in the mesh of each tensor.
        has_meta_buffers, has_real_tensors: see `AgreedPlan.rebuild` and `in_place`.
        frozen: hash of each frozen part, None where it is unknown.
        buffer_bytes: staging memory that this rank would use.
    """

    digest: str
    coordinates: Coordinates
    has_meta_buffers: bool
    has_real_tensors: bool
    frozen: dict[str, str | None]
    buffer_bytes: int


def header_reader(
    model: nn.Module, source: Source | None, ranks: Ranks, known: Listing | None = None
) -> Callable[[], Headers]:
    """What reads the headers of a load, once.

    Args:
        model, source, ranks: of the load.
        known: what the source holds, where all ranks know that already.
    """

    def to_send(source: Source) -> Listing:
        return list_source(source).without_memory() if ranks.size > 1 else list_source(source)

    def read() -> Headers:
        listing = None if known else to_send(_require(source))
        parts = {path: to_send(path) for path in frozen_sources(model)}
        return Headers(listing, parts)

    return functools.cache(read)


def look_at_source(
    source: Source | None, ranks: Ranks, read_headers: Callable[[], Headers]
) -> SourceInfo:
    """What this rank was given, for the others; it does not wait for them.

    The first rank reads the headers at once, as it is the one whose headers count wherever it sees
    the source. What is wrong with them is raised where all ranks ask for them.

    Raises:
        LoadError: the source cannot be reached.
    """
    info = _look(source)
    if ranks.index or not info.visible or info.is_live:
        return info
    try:
        headers = read_headers()
    except Exception:
        return info
    is_long = ranks.size > 1 and len(pickle.dumps(headers)) > SMALL_BYTES
    return info if is_long else replace(info, headers=headers)


def plan_load(
    model: nn.Module,
    source: Source | None,
    ranks: Ranks,
    options: LoadOptions,
    sources: Sequence[SourceInfo],
    read_headers: Callable[[], Headers],
    *,
    known: Listing | None = None,
) -> AgreedPlan:
    """Plan a load and agree on it. All ranks; nothing is changed.

    Args:
        model, source, ranks, options: of the load.
        sources: what each rank was given.
        read_headers: of `header_reader`.
        known: what the source holds, where all ranks know it already.

    Raises:
        LoadError: of any rank, on all ranks.
    """
    first = _agreed_reader(sources, ranks)
    headers = sources[ranks.ranks.index(first)].headers
    are_copies = len({info.location for info in sources if info.visible}) > 1
    if headers is None or are_copies:

        def read() -> Headers:
            return _with_fingerprints(read_headers()) if are_copies else read_headers()

        headers = ranks.run_on_one("reading the headers", read, first)
    listing, parts = known or headers.listing, headers.parts
    assert listing is not None
    list_own = functools.cache(lambda: list_source(_require(source)))

    def match_here() -> tuple[ModelMatch, _MatchSummary]:
        tensors = _parts(model, options, ranks)
        # A dict has other addresses and strides in each rank's memory, so each rank lists its own.
        own_listing = list_own() if isinstance(source, Mapping) and source else listing
        match = match_model(model, own_listing, options, tensors, parts)
        return match, _summary(model, match, options, ranks)

    match, summaries = ranks.run_and_gather("planning the load", match_here)
    if len({summary.digest for summary in summaries}) > 1:
        _explain_difference(match, ranks)
    if ranks.index == 0:
        warn_of_idle(match)
    _compare_frozen([summary.frozen for summary in summaries], ranks)
    places = (summary.coordinates for summary in summaries)
    coordinates = dict(zip(ranks.ranks, places, strict=True))
    if options.layout is not None:
        from anyrank.around.layouts.given import check_parts

        check_parts([(tensor.name, tensor.layout) for tensor in match.tensors], coordinates)
    buffer_bytes = min(summary.buffer_bytes for summary in summaries)
    visible = [info.visible for info in sources]
    caches = caches_of(ranks.ranks, ranks.nodes, [info.path for info in listing.files])
    reason = why_own(options.strategy, caches, visible)
    if reason is not None:
        reading = Reading("own", reason, ranks.ranks)
    else:
        from anyrank.around.sharing.decision import shared_reading  # a door: see test_house

        reading = shared_reading(
            options.strategy, match, coordinates, caches, visible, ranks, buffer_bytes
        )
    return AgreedPlan(
        match=match,
        reading=reading,
        buffer_bytes=buffer_bytes,
        seed=sources[0].seed,
        rebuild=any(summary.has_meta_buffers for summary in summaries),
        in_place=any(summary.has_real_tensors for summary in summaries),
    )


def _parts(model: nn.Module, options: LoadOptions, ranks: Ranks) -> list[ModelTensor] | None:
    """The tensors of the model, if `layout=` says what they are parts of."""
    if options.layout is None:
        return None
    from anyrank.around.layouts.given import apply_layout, warn_of_unused

    tensors = find_tensors(model)
    apply_layout(tensors, options.layout, ranks)
    warn_of_unused(options.layout, tensors)
    return tensors


def _summary(
    model: nn.Module, match: ModelMatch, options: LoadOptions, ranks: Ranks
) -> _MatchSummary:
    tensors = match.tensors
    left = (t for i, t in enumerate(tensors) if i not in match.stored and t.kind != "derived")
    # All ranks get the same for a part that is filled; of others each keeps its own.
    kept = {part for t in left for registration in t.registrations for part in registration.path}
    return _MatchSummary(
        digest=_digest(match) if ranks.size > 1 else "",
        coordinates=coordinates_of(tensors),
        has_meta_buffers=any(t.is_meta and t.kind == "derived" for t in tensors),
        has_real_tensors=any(not tensors[index].is_meta for index in match.stored),
        frozen={
            name: part.anyrank_frozen.digest  # type: ignore[union-attr]
            for name, part in frozen_parts(model)
            if part in kept
        },
        buffer_bytes=options.buffer_bytes or default_buffer(tensors),
    )


def _compare_frozen(parts: Sequence[Mapping[str, str | None]], ranks: Ranks) -> None:
    """Nobody broadcasts frozen parts, so they must be equal to begin with.

    Raises:
        LoadError: a part whose hash, taken when it was frozen, differs between ranks.
    """
    for name, digest in parts[0].items():
        for rank, others in zip(ranks.ranks, parts, strict=True):
            if others.get(name) != digest and None not in (digest, others.get(name)):
                raise LoadError(
                    f"the frozen part {name or '(the model itself)'} differs between ranks: "
                    f"rank {ranks.ranks[0]} has {digest}, rank {rank} has {others.get(name)}: "
                    "freeze the same weights on every rank"
                )


def _with_fingerprints(headers: Headers) -> Headers:
    """The same, by which ranks that see copies of the files know them."""
    from anyrank.around.sharing.copies import with_fingerprints  # a door

    listing = None if headers.listing is None else with_fingerprints(headers.listing)
    return Headers(listing, {key: with_fingerprints(p) for key, p in headers.parts.items()})


def _require(source: Source | None) -> Source:
    if source is None:
        raise WrongValue(
            "the source is None on every rank: give a path, a list of paths or a dict of tensors"
        )
    return source


def _look(source: Source | None) -> SourceInfo:
    seed = torch.initial_seed()
    if source is None or isinstance(source, Mapping):
        is_live = any(hasattr(value, "placements") for value in (source or {}).values())
        name = "a dict of tensors" if source else ""
        return SourceInfo(name, bool(source), seed, is_live=is_live)
    is_list = isinstance(source, Sequence) and not isinstance(source, str)
    paths = [os.fspath(path) for path in source] if is_list else [os.fspath(source)]  # type: ignore[arg-type]
    visible, places = True, list[str]()
    for path in paths:
        try:
            storage = storage_for(path)
            visible = visible and (storage.is_file(path) or storage.is_dir(path))
            places.append(storage.location(path) if visible else "")
        except (AnyrankError, ImportError):
            raise
        except Exception as error:  # each of fsspec's file systems has errors of its own
            raise LoadError(f"{path}: cannot be reached: {error}") from error
    return SourceInfo(", ".join(paths), visible, seed, ", ".join(places))


def _agreed_reader(sources: Sequence[SourceInfo], ranks: Ranks) -> int:
    """The rank whose headers count: the first that sees the source.

    Raises:
        LoadError: ranks were given different sources.
    """
    first_ranks: dict[str, int] = {}  # source -> the first rank that was given it
    for info, rank in zip(sources, ranks.ranks, strict=True):
        if info.source:
            first_ranks.setdefault(info.source, rank)
    if len(first_ranks) > 1:
        (source, rank), (other, other_rank) = list(first_ranks.items())[:2]
        raise LoadError(
            f"ranks were given different sources: rank {rank} {source!r}, rank {other_rank} "
            f"{other!r}; give all ranks the same source, or None to ranks that have no source"
        )
    seeing = [rank for info, rank in zip(sources, ranks.ranks, strict=True) if info.visible]
    return next(iter([*seeing, *first_ranks.values(), *ranks.ranks]))


def _digest(match: ModelMatch) -> str:
    rows = [
        (
            tensor.describe(),
            str(match.stored[index].dtype) if index in match.stored else "",
            index in match.compared,
            index in match.initialise,
        )
        for index, tensor in enumerate(match.tensors)
    ]
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()


def _explain_difference(match: ModelMatch, ranks: Ranks) -> None:
    """Raise the first difference between the ranks' models. All ranks."""
    check_alike(ranks.gather([tensor.describe() for tensor in match.tensors]), ranks)
    raise LoadError(
        "the ranks' renaming functions give different names, or their dicts of tensors have "
        "different keys or dtypes"
    )
