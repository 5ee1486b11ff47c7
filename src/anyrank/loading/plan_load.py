"""The plan of a load: what fills each tensor, and who reads, agreed before any payload moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.loading.headers import (
    Headers,
    SourceInfo,
    agreed_reader,
    require_source,
    with_file_fingerprints,
)
from anyrank.loading.reading import Reading, caches_of, why_own
from anyrank.models.alike import Inventory, check_alike, inventory_of
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.models.dialects.layouts.given import check_parts, tensors_with_layout
from anyrank.models.frozen_parts import frozen_parts
from anyrank.models.match import match_model, warn_of_idle
from anyrank.models.options import LoadOptions
from anyrank.models.share import default_buffer
from anyrank.models.tensors import ModelTensor
from anyrank.sources.source import Source, list_source
from anyrank.tensors.sharded_tensor import Coordinates
from anyrank.world.alike import digest_of, unlike
from anyrank.world.failures import describe_values
from anyrank.world.ranks import Ranks


@dataclass(frozen=True)
class AgreedPlan:
    """A load that from here on can fail only by I/O.

    Attributes:
        match: what fills each tensor of this rank's model; equal on all ranks in names and shapes.
        coordinates: coordinates of every rank, by global rank.
        reading: who reads, and why.
        buffer_bytes: staging memory; the smallest of all ranks', because exchanges need one size.
        seed: the first rank's torch seed, for tensors filled by a rule.
        rebuild: whether any rank has non-persistent buffers on meta.
        in_place: whether any rank writes into memory that held values before.
    """

    match: ModelMatch
    coordinates: Mapping[int, Coordinates]
    reading: Reading
    buffer_bytes: int
    seed: int
    rebuild: bool
    in_place: bool


@dataclass(frozen=True)
class _MatchSummary:
    """A rank's match, summarised for the other ranks.

    Attributes:
        inventory: inventory of its tensors.
        fills: digest of the sources of their values; empty in a process alone.
        has_meta_buffers, has_real_tensors: see `AgreedPlan.rebuild` and `in_place`.
        frozen: hash of each frozen part, None if unknown.
        buffer_bytes: staging memory that this rank would use.
    """

    inventory: Inventory
    fills: str
    has_meta_buffers: bool
    has_real_tensors: bool
    frozen: dict[str, str | None]
    buffer_bytes: int


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
        model, source, ranks, options: arguments of the load.
        sources: the source that each rank was given.
        read_headers: result of `header_reader`.
        known: contents of the source, if all ranks know them already.

    Raises:
        LoadError: an error of any rank, on all ranks.
    """
    # One rank lists the source for all: two listings could show two states of one folder.
    first = agreed_reader(sources, ranks)
    headers = sources[ranks.ranks.index(first)].headers
    are_copies = len({info.location for info in sources if info.visible}) > 1
    if headers is None or are_copies:

        def read() -> Headers:
            return with_file_fingerprints(read_headers()) if are_copies else read_headers()

        headers = ranks.run_on_one("reading the headers", read, first)
    listing, parts = known or headers.listing, headers.parts
    assert listing is not None
    list_own = functools.cache(lambda: list_source(require_source(source)))

    def match_here() -> tuple[ModelMatch, _MatchSummary]:
        tensors = _parts(model, options, ranks)
        # A dict has other addresses and strides in each rank's memory, so each rank lists its own.
        own_listing = list_own() if isinstance(source, Mapping) and source else listing
        match = match_model(model, own_listing, options, tensors, parts)
        return match, _summary(model, match, options, ranks)

    match, summaries = ranks.run_and_gather("planning the load", match_here)
    # Ranks with other models would fill other tensors, or wait for one another: none may go on.
    inventories = [summary.inventory for summary in summaries]
    title = "the ranks' models differ"
    coordinates = check_alike(title, match.tensors, inventories, ranks, LoadError)
    if len({summary.fills for summary in summaries}) > 1:
        raise LoadError(
            "the ranks' renaming functions give different names, or their dicts of tensors have "
            "different keys or dtypes"
        )
    if ranks.index == 0:
        warn_of_idle(match)
    _compare_frozen([summary.frozen for summary in summaries], ranks)
    if options.layout is not None:
        check_parts([(tensor.name, tensor.layout) for tensor in match.tensors], coordinates)
    # Ranks exchange blocks of one size, so the smallest memory of any rank counts for all.
    buffer_bytes = min(summary.buffer_bytes for summary in summaries)
    visible = [info.visible for info in sources]
    caches = caches_of(ranks.ranks, ranks.nodes, [info.path for info in listing.files])
    reason = why_own(options.strategy, caches, visible)
    if reason is not None:
        reading = Reading("own", reason, ranks.ranks)
    else:
        from anyrank.loading.sharing.decision import shared_reading

        reading = shared_reading(
            options.strategy, match, coordinates, caches, visible, ranks, buffer_bytes
        )
    return AgreedPlan(
        match=match,
        coordinates=coordinates,
        reading=reading,
        buffer_bytes=buffer_bytes,
        seed=sources[0].seed,
        rebuild=any(summary.has_meta_buffers for summary in summaries),
        in_place=any(summary.has_real_tensors for summary in summaries),
    )


def _parts(model: nn.Module, options: LoadOptions, ranks: Ranks) -> list[ModelTensor] | None:
    """The tensors of the model, if `layout=` says of which wholes they are parts."""
    if options.layout is None:
        return None
    return tensors_with_layout(model, options.layout, ranks)


def _summary(
    model: nn.Module, match: ModelMatch, options: LoadOptions, ranks: Ranks
) -> _MatchSummary:
    tensors = match.tensors
    left = (t for i, t in enumerate(tensors) if i not in match.stored and t.kind != "derived")
    # All ranks get the same values for a part that is filled; other parts keep each rank's own.
    kept = {part for t in left for registration in t.registrations for part in registration.path}
    return _MatchSummary(
        inventory=inventory_of(tensors, ranks),
        fills=_digest(match) if ranks.size > 1 else "",
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
    """Compare frozen parts: nobody broadcasts them, so they must be equal to begin with.

    Raises:
        LoadError: a part whose hash, taken when it was frozen, differs between ranks.
    """
    for name, values in unlike(dict(zip(ranks.ranks, parts, strict=True))).items():
        known = {rank: value for rank, value in values.items() if value is not None}
        if len({*known.values()}) > 1:
            title = f"the frozen part {name or '(the model itself)'} differs between ranks"
            text = describe_values(title, known, ranks.name_ranks)
            raise LoadError(f"{text}: freeze the same weights on every rank")


def _digest(match: ModelMatch) -> str:
    """A digest of what fills the tensors, by their positions."""
    dtypes = sorted((index, str(stored.dtype)) for index, stored in match.stored.items())
    return digest_of([dtypes, sorted(match.compared), sorted(match.initialise)])
