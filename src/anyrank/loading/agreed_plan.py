"""The plan of a load: what fills each tensor, and who reads, agreed before any payload moves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.loading.headers import (
    Headers,
    SourceInfo,
    agreed_reader,
    require_source,
    with_all_chunks,
    with_file_fingerprints,
)
from anyrank.loading.reading import Reading, caches_of, why_own
from anyrank.models.alike import Inventory, check_alike, find_coordinates, inventory_of
from anyrank.models.allocation import default_buffer
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.models.dialects.layouts.given import (
    apply_layout,
    check_parts,
    warn_about_unused_layout,
)
from anyrank.models.first_values.initialize import Initializer
from anyrank.models.frozen_parts import FrozenSource, frozen_info
from anyrank.models.match import match_model, warn_about_unused_renames
from anyrank.models.options import LoadOptions
from anyrank.models.tensors import NamedModule, find_tree
from anyrank.sources.locate import has_remade, locate
from anyrank.sources.source import Source, list_headers
from anyrank.tensors.sharded_tensor import Coordinates
from anyrank.world.alike import Compared, differing, digest_of, join_digests
from anyrank.world.device import read_threads
from anyrank.world.failures import describe_texts
from anyrank.world.ranks import Ranks

# What ranks compare besides their tensors: what fills them, and each frozen part, by its name.
FILLS, FROZEN = "fills", "frozen "


@dataclass(frozen=True)
class AgreedPlan:
    """A load on which all ranks agree; from now on, only I/O can fail.

    Attributes:
        match: what fills each tensor of this rank's model; names and shapes are the same on every
            rank.
        coordinates: coordinates of every rank, by global rank.
        reading: who reads, and why.
        buffer_bytes: staging memory: the smallest of all ranks, because exchanges need one size.
        initializer: the rules for tensors without bytes, with the first rank's torch seed.
        rebuild: whether any rank has non-persistent buffers on meta.
        in_place: whether any rank overwrites memory that held values.
    """

    match: ModelMatch
    coordinates: Mapping[int, Coordinates]
    reading: Reading
    buffer_bytes: int
    initializer: Initializer
    rebuild: bool
    in_place: bool


@dataclass(frozen=True)
class _MatchSummary:
    """One rank's summary of its match for the other ranks, or the summary of several ranks.

    Attributes:
        inventory: inventory of its tensors, of what fills them, and of each frozen part whose hash
            is known.
        has_meta_buffers, has_real_tensors: see `AgreedPlan.rebuild` and `in_place`.
        needs_all_chunks: whether names and shapes do not suffice for the plan.
        buffer_bytes: staging memory that it would use.
    """

    inventory: Inventory
    has_meta_buffers: bool
    has_real_tensors: bool
    needs_all_chunks: bool
    buffer_bytes: int

    def join(self, others: _MatchSummary) -> _MatchSummary:
        """Merge the summaries of ranks."""
        return _MatchSummary(
            join_digests(self.inventory, others.inventory),
            self.has_meta_buffers or others.has_meta_buffers,
            self.has_real_tensors or others.has_real_tensors,
            self.needs_all_chunks or others.needs_all_chunks,
            # Ranks exchange blocks of one size, so the rank with the least memory decides.
            min(self.buffer_bytes, others.buffer_bytes),
        )


def plan_load(
    model: nn.Module,
    source: Source | None,
    ranks: Ranks,
    options: LoadOptions,
    info: SourceInfo,
    read_headers: Callable[[], Headers],
    *,
    known: Listing | None = None,
) -> AgreedPlan:
    """Plan a load and agree on it. Collective; changes nothing.

    Args:
        model, source, ranks, options: those of the load.
        info: the sources that the ranks passed.
        read_headers: the function that `header_reader` made.
        known: contents of the source, if all ranks already know them.

    Raises:
        LoadError: an error of any rank, on every rank.
    """
    # One rank lists the source for all: two listings could show two states of one folder.
    first = agreed_reader(info, ranks)
    headers = info.headers if first == ranks.ranks[0] else None
    are_copies = len(info.locations) > 1

    def recognized(headers: Headers) -> Headers:
        return with_file_fingerprints(headers) if are_copies else headers

    def plan_by(headers: Headers) -> tuple[AgreedPlan, bool]:
        listing = known or headers.listing
        assert listing is not None
        return _plan(model, source, ranks, options, info, listing, headers.parts)

    if headers is None or are_copies:
        headers = ranks.run_on_one("reading the headers", lambda: recognized(read_headers()), first)
    plan, needs_all_chunks = plan_by(headers)
    if needs_all_chunks:

        def read_all() -> Headers:
            return recognized(with_all_chunks(read_headers()))

        plan, _ = plan_by(ranks.run_on_one("reading the ranks' indexes", read_all, first))
    elif plan.match.listing.locators:
        what, threads = "reading the ranks' indexes", read_threads(ranks.ranks_on_node)
        match = ranks.run(what, lambda: _with_chunks(plan.match, threads, are_copies))
        plan = replace(plan, match=match)
    if ranks.index == 0:
        warn_about_unused_renames(plan.match)
    return plan


def _with_chunks(match: ModelMatch, threads: int, are_copies: bool) -> ModelMatch:
    """Return the match with the chunks that contain this rank's shares.

    Args:
        match: a match by names and shapes.
        threads: limit of the threads that read.
        are_copies: whether ranks see the source in different places.

    Raises:
        LoadError: as for `locate`; or this rank sees a different step of a run.
    """
    if are_copies:
        for locator in match.listing.locators.values():
            locator.check_same()
    wanted = [(stored, match.tensors[index].pieces) for index, stored in match.wanted]
    listing, located = locate(match.listing, wanted, threads)
    stored = dict(zip(match.stored, located, strict=False))
    compared = dict(zip(match.compared, located[len(stored) :], strict=True))
    return replace(match, listing=listing, stored=stored, compared=compared)


def _plan(
    model: nn.Module,
    source: Source | None,
    ranks: Ranks,
    options: LoadOptions,
    info: SourceInfo,
    listing: Listing,
    parts: Mapping[FrozenSource, Listing],
) -> tuple[AgreedPlan, bool]:
    """Plan a load with a listing. Collective.

    Args:
        model, source, ranks, options, info: as for `plan_load`.
        listing: contents of the source, on all ranks.
        parts: contents of the sources of frozen parts.

    Returns:
        The plan, and whether it needs the chunks of all tensors, which the listing lacks.
    """
    list_own = functools.cache(lambda: list_headers(require_source(source)))

    def match_here() -> tuple[tuple[ModelMatch, dict[str, str]], _MatchSummary]:
        tree = find_tree(model, with_packed=options.layout is None)
        apply_layout(tree.tensors, options.layout, ranks)
        warn_about_unused_layout(options.layout, tree.tensors)
        # Addresses and strides in a dict differ between ranks, so each rank lists its own.
        own_listing = list_own() if isinstance(source, Mapping) and source else listing
        match = match_model(tree, own_listing, options, parts)
        hashes = _frozen_hashes(tree.modules, match)
        return (match, hashes), _summary(match, hashes, options, ranks)

    (match, hashes), summary = ranks.run_and_reduce(
        "planning the load", match_here, _MatchSummary.join
    )
    # With different models, ranks would fill different tensors or hang, so none continues.
    title = "the ranks' models differ"
    check_alike(title, match.tensors, summary.inventory, ranks, LoadError)
    if ranks.size > 1 and not summary.inventory[FILLS].digest:
        raise LoadError(
            "rename= returns different names on different ranks, or the dicts of tensors have "
            "different keys or dtypes. Pass the same on every rank"
        )
    coordinates = find_coordinates(match.tensors, summary.inventory, ranks)
    _compare_frozen(hashes, summary.inventory, ranks)
    if options.layout is not None:
        check_parts([(tensor.name, tensor.layout) for tensor in match.tensors], coordinates)
    visible = [info.sees(position) for position in range(ranks.size)]
    caches = caches_of(ranks.ranks, ranks.nodes, [file.path for file in listing.files])
    reason = why_own(options.strategy, caches, visible)
    if reason is not None:
        reading = Reading("own", reason, ranks.ranks)
    else:
        from anyrank.loading.sharing.decision import shared_reading

        reading = shared_reading(
            options.strategy, match, coordinates, caches, visible, ranks, summary.buffer_bytes
        )
    plan = AgreedPlan(
        match=match,
        coordinates=coordinates,
        reading=reading,
        buffer_bytes=summary.buffer_bytes,
        initializer=Initializer(model, info.seed),
        rebuild=summary.has_meta_buffers,
        in_place=summary.has_real_tensors,
    )
    # Ranks that exchange bytes compute the reads of every rank.
    exchanges = reading.flows is not None and bool(match.listing.locators)
    return plan, summary.needs_all_chunks or exchanges


def _summary(
    match: ModelMatch, hashes: Mapping[str, str], options: LoadOptions, ranks: Ranks
) -> _MatchSummary:
    tensors = match.tensors
    inventory = inventory_of(tensors, ranks)
    if ranks.size > 1:
        inventory[FILLS] = Compared(_digest(match), ranks.rank)
        for name, text in hashes.items():
            inventory[FROZEN + name] = Compared(text, ranks.rank)
    return _MatchSummary(
        inventory=inventory,
        has_meta_buffers=any(t.is_meta and t.kind == "derived" for t in tensors),
        has_real_tensors=any(not tensors[index].is_meta for index in match.stored),
        needs_all_chunks=_needs_all_chunks(match),
        buffer_bytes=options.buffer_bytes or default_buffer(tensors),
    )


def _needs_all_chunks(match: ModelMatch) -> bool:
    """Return True if tensors without chunks were converted into others, or are compared."""
    if not match.listing.locators:
        return False
    return bool(match.stored_twice) or has_remade(match.listing, (t for _, t in match.wanted))


def _frozen_hashes(modules: Sequence[NamedModule], match: ModelMatch) -> dict[str, str]:
    """Return the hash, if known, of each frozen part that keeps its values.

    A part that is filled gets the same values on every rank, so it needs no comparison.
    """
    tensors = match.tensors
    left = (t for i, t in enumerate(tensors) if i not in match.stored and t.kind != "derived")
    kept = {part for t in left for registration in t.registrations for part in registration.path}
    names: dict[nn.Module, str] = {}
    for owner in modules:
        if owner.module in kept:
            names.setdefault(owner.module, owner.raw)  # it may be registered twice
    known = {name: info for part, name in names.items() if (info := frozen_info(part))}
    return {name: digest for name, info in known.items() if (digest := info.digest) is not None}


def _compare_frozen(hashes: Mapping[str, str], inventory: Inventory, ranks: Ranks) -> None:
    """Check that frozen parts, which are not broadcast, are the same on every rank. Collective.

    Raises:
        LoadError: the hash of a part, taken when it was frozen, differs between ranks.
    """
    lines = {FROZEN + name: {name: text} for name, text in hashes.items()}
    compared = {kind: known for kind, known in inventory.items() if kind.startswith(FROZEN)}
    for by_name in differing(lines, compared, ranks).values():
        for name, by_text in by_name.items():
            title = f"the frozen part {name or '(the model itself)'} differs between ranks"
            text = describe_texts(title, by_text, ranks.name_ranks)
            raise LoadError(f"{text}. Freeze the same weights on every rank")


def _digest(match: ModelMatch) -> str:
    """Return a digest of what fills the tensors, which are given by their positions."""
    dtypes = sorted((index, str(stored.dtype)) for index, stored in match.stored.items())
    return digest_of([dtypes, sorted(match.compared), sorted(match.initialize)])
