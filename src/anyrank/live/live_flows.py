"""The plan of a sync: which tensor of `src` fills which of `dst`. Every rank makes it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from anyrank.errors import LoadError, WrongValue
from anyrank.live.ends import Added, End, TensorInfo
from anyrank.live.match import (
    EndMatch,
    Inflow,
    SourceTensor,
    check_all_shards,
    joined,
    listing_of,
    match_ends,
    sources_of,
)
from anyrank.live.report import SyncReport
from anyrank.live.route import Route
from anyrank.loading.sharing.flows import Flow, wire_dtype
from anyrank.loading.sharing.transfers import (
    HeldBox,
    Strip,
    Transfer,
    places_of,
    transfers_of,
)
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.models.dialects.layouts.given import check_parts
from anyrank.models.match import warn_about_unused_renames
from anyrank.models.options import LoadOptions
from anyrank.sources.tables.renaming import renamer
from anyrank.tensors.layout import Layout, Piece, local_pieces
from anyrank.tensors.sharded_tensor import Coordinates, Members
from anyrank.world.alike import Compared, join_digests
from anyrank.world.failures import ranks_by_value
from anyrank.world.ranks import Ranks

ROUND_BYTES = 64 << 20  # per rank, on average, between two agreements


@dataclass(frozen=True)
class SyncPlan:
    """The plan of a sync of two ends. It can fail only if a rank dies or memory runs out.

    Attributes:
        match: what fills this rank's `dst`, without its tensors.
        flows: all tensors of all ranks' `dst`, in the order in which they are sent.
        factors: whole factors of adapters to merge, for each rank that has a part of a weight to
            which their product is added; `index` is the number of the source tensor.
        added: number of a source tensor -> the adapters' products, with the numbers of the factors.
        locals: source tensor -> its position among this rank's tensors of `src`.
        shared: source tensors that are the same on several ranks, with the ranks; no buffers.
        facts: facts about all `dst` together: the report, as far as the plan knows it.
        rebuild: whether any rank has non-persistent buffers on meta.
        receivers: number of ranks that have a `dst`.
        renamed: name in `src` -> name that a callable `rename` returned; empty for other kinds.
        accelerators: the accelerators of all ranks, in the group's order; see `choose_channel`.
        route: the messages of `flows`, once they are made.
    """

    match: ModelMatch
    flows: tuple[Flow, ...]
    factors: tuple[Flow, ...]
    added: dict[int, tuple[tuple[Added, int, int], ...]]
    locals: dict[int, int]
    shared: tuple[tuple[int, Members], ...]
    facts: SyncReport
    rebuild: bool
    receivers: int
    renamed: dict[str, str]
    accelerators: tuple[str, ...]
    route: Route = field(default_factory=Route, compare=False)


class HeldEnd(NamedTuple):
    """One rank's summary of one end, for the other ranks.

    Attributes:
        digest: the same on ranks that hold the end in the same way; "" if this rank has no part.
        coordinates: position of this rank in the mesh of each of its tensors.
    """

    digest: str
    coordinates: Coordinates


@dataclass(frozen=True)
class EndsSummary:
    """One rank's summary of its two ends, for the other ranks.

    Attributes:
        src, dst: summaries of both.
        accelerator: accelerator that holds all of its tensors; see `accelerator_of`.
    """

    src: HeldEnd
    dst: HeldEnd
    accelerator: str


def in_rounds(flows: Iterable[Flow], receivers: int) -> Iterator[list[Flow]]:
    """Group flows in rounds of about ROUND_BYTES per receiver; the same on every rank."""
    most = ROUND_BYTES * max(1, receivers)
    run: list[Flow] = []
    total = 0
    for flow in flows:
        run.append(flow)
        total += flow.nbytes
        if total >= most:
            yield run
            run, total = [], 0
    if run:
        yield run


def renamed_by(names: Iterable[str], options: LoadOptions) -> dict[str, str]:
    """Map each name to what `rename=` makes of it."""
    rename = renamer(options.rename)
    return {name: rename(name) for name in names}


class Planner:
    """The maker of one plan. Every rank makes the same flows, with its own transfers."""

    def __init__(
        self, summaries: Sequence[EndsSummary], ranks: Ranks, options: LoadOptions
    ) -> None:
        self.ranks = ranks
        self.options = options
        self.summaries = dict(zip(ranks.ranks, summaries, strict=True))
        self.nodes = dict(zip(ranks.ranks, ranks.nodes, strict=True))
        self.places: dict[Any, tuple[HeldBox, ...]] = {}
        self.wanted: dict[Any, tuple[dict[int, tuple[Piece, ...]], int]] = {}
        self.transfers: dict[Any, tuple[Transfer, ...]] = {}

    def plan(self, dst: End, src: End) -> SyncPlan:
        """Make the plan. Collective.

        Raises:
            LoadError: the ends do not match on a rank; raised on every rank.
            ValueError: all ranks lack one end.
        """
        from_ranks = _alike({rank: summary.src for rank, summary in self.summaries.items()})
        to_ranks = _alike({rank: summary.dst for rank, summary in self.summaries.items()})
        for name, groups in (("src", from_ranks), ("dst", to_ranks)):
            if not groups:
                raise WrongValue(
                    f"{name}= is None, or has no tensors, on every rank. Pass it on the ranks that "
                    "have its tensors"
                )

        groups = [
            (
                self.ranks.run_on_one("describing src", lambda: src.rows, group[0]),
                {rank: self.summaries[rank].src.coordinates for rank in group},
            )
            for group in from_ranks
        ]
        sources = sources_of(groups)
        match, matched, renamed = self._matched(dst, sources, to_ranks)
        ends = [
            self.ranks.run_on_one("describing dst", lambda: matched, group[0]) for group in to_ranks
        ]
        coordinates = [
            {rank: self.summaries[rank].dst.coordinates for rank in group} for group in to_ranks
        ]
        check_all_shards(ends, coordinates, len(self.summaries))
        for end, known in zip(ends, coordinates, strict=True):
            if any(row.layout is not None and row.layout.is_given for row in end.rows):
                check_parts([(row.keys[0], row.layout) for row in end.rows], known)
        flows = self.ranks.run("planning the sync", lambda: self.flows(ends, to_ranks, sources))
        facts = joined(ends, self.options.unexpected)
        turned = frozenset(key for end in ends for key in end.turned)
        flows += tuple(self._twins(facts.duplicates, turned, sources))
        numbers = {row.keys: index for index, row in enumerate(src.rows)}
        added = _added(sources)
        return SyncPlan(
            match=match,
            flows=flows,
            factors=tuple(self._factors(added, sources)),
            added=added,
            locals={
                number: numbers[source.row.keys]
                for number, source in enumerate(sources)
                if source.row.keys in numbers
            },
            shared=tuple(
                (number, members)
                for number, source in enumerate(sources)
                if source.row.kind != "buffer"  # buffers may differ between ranks
                for members in source.holders().values()
                if len(members) > 1
            ),
            facts=facts,
            rebuild=any(row.is_meta and row.kind == "derived" for end in ends for row in end.rows),
            receivers=sum(map(len, to_ranks)),
            renamed=renamed,
            accelerators=tuple(summary.accelerator for summary in self.summaries.values()),
        )

    def _matched(
        self, dst: End, sources: Sequence[SourceTensor], to_ranks: Sequence[Sequence[int]]
    ) -> tuple[ModelMatch, EndMatch, dict[str, str]]:
        """Match this rank's `dst` with the sources; also return the renamed ones. Collective.

        Raises:
            LoadError: as for `plan`; or `rename=` differs between the ranks of one `dst`.
        """
        listing, options = listing_of(sources), self.options
        if len(to_ranks) > 1:  # another dst may use a source that one dst does not
            options = replace(options, unexpected="ignore")

        def match_here() -> tuple[tuple[ModelMatch, EndMatch, dict[str, str]], dict[str, Compared]]:
            match, matched = match_ends(dst, sources, listing, options)
            renamed = renamed_by(listing.tensors if callable(options.rename) else (), options)
            group = next(
                (str(n) for n, group in enumerate(to_ranks) if self.ranks.rank in group), ""
            )
            known = {group: Compared(matched.digest, self.ranks.rank)} if group else {}
            return (match, matched, renamed), known

        own_match, compared = self.ranks.run_and_reduce(
            "matching dst with src", match_here, join_digests
        )
        if self.ranks.index == 0:
            warn_about_unused_renames(own_match[0])
        if not all(known.digest for known in compared.values()):
            raise LoadError(
                "rename= returns different names on different ranks of one dst. Pass the same "
                "rename= on every rank"
            )
        return own_match

    def flows(
        self,
        ends: Sequence[EndMatch],
        to_ranks: Sequence[Sequence[int]],
        sources: Sequence[SourceTensor],
    ) -> tuple[Flow, ...]:
        """Make the flows of all tensors of all `dst`, with this rank's transfers.

        Does not communicate.

        Args:
            ends: each different `dst`.
            to_ranks: ranks that have it.
            sources: tensors of `src`.

        Raises:
            LoadError: no rank holds an element that this rank wants.
        """
        entries = [
            (inflow.index, number, inflow)
            for number, end in enumerate(ends)
            for inflow in end.inflows
        ]
        # By position first, so that ranks with different parts of a model receive in parallel.
        entries.sort(key=lambda entry: entry[:2])
        return tuple(
            self._flow(inflow, ends[number].rows[index], to_ranks[number], number, sources)
            for index, number, inflow in entries
        )

    def _flow(
        self,
        inflow: Inflow,
        row: TensorInfo,
        to_ranks: Sequence[int],
        group: int,
        sources: Sequence[SourceTensor],
    ) -> Flow:
        coordinates = {
            rank: self.summaries[rank].dst.coordinates.coordinate(inflow.index) for rank in to_ranks
        }
        wanted_key = (row.shape, row.layout, tuple(coordinates.values()), group)
        if wanted_key not in self.wanted:
            pieces = {c: local_pieces(row.shape, row.layout, c) for c in {*coordinates.values()}}
            wanted = {rank: pieces[coordinate] for rank, coordinate in coordinates.items()}
            self.wanted[wanted_key] = wanted, _numel(wanted)
        wanted, numel = self.wanted[wanted_key]
        known = [self._places(sources[strip.source]) for strip in inflow.strips]
        shape = tuple((s.box, s.start, s.dims) for s in inflow.strips)
        key = (wanted_key, shape, tuple(places_key for places_key, _ in known))
        transfers = self.transfers.get(key)
        if transfers is None:
            places = [boxes for _, boxes in known]
            try:
                planned = transfers_of(self.ranks.rank, inflow.strips, places, wanted)
            except LoadError as error:
                raise LoadError(f"{row.keys[0]}: {error}") from error
            transfers = self.transfers[key] = tuple(planned)
        wire = wire_dtype(inflow.stored_dtype, row.dtype)
        return Flow(
            name=row.keys[0],
            index=inflow.index if self.ranks.rank in to_ranks else -1,
            strips=inflow.strips,
            transfers=transfers,
            stored_dtype=inflow.stored_dtype,
            wire_dtype=wire,
            target_dtype=row.dtype,
            nbytes=numel * wire.itemsize,
            is_compared=inflow.is_compared,
        )

    def _twins(
        self,
        duplicates: Mapping[str, str],
        turned: Collection[str],
        sources: Sequence[SourceTensor],
    ) -> Iterator[Flow]:
        """Yield the flows that compare source tensors that dst ties; `turned` ones transposed.

        Raises:
            LoadError: two tensors cannot be equal.
        """
        numbers = {key: number for number, source in enumerate(sources) for key in source.row.keys}
        for key, loaded in duplicates.items():
            tied, other = sources[numbers[key]], sources[numbers[loaded]]
            strip = Strip.whole(numbers[key], tied.shape)
            strip = strip.transposed() if key in turned else strip
            if (strip.box.sizes, tied.row.dtype) != (other.shape, other.row.dtype):
                raise LoadError(
                    f"{key} and {loaded} are tied in dst, but have different shapes or dtypes in "
                    "src. Untie them in dst, or tie them in src"
                )
            wanted = {
                rank: local_pieces(other.shape, other.layout, coordinate)
                for rank, coordinate in other.coordinates.items()
            }
            whole = self._whole(tied, numbers[key], strip, wanted)
            name, twin = f"{key} and {loaded}", numbers[loaded]
            yield replace(whole, name=name, index=-1, is_compared=True, twin=twin)

    def _factors(
        self,
        added: Mapping[int, Sequence[tuple[Added, int, int]]],
        sources: Sequence[SourceTensor],
    ) -> Iterator[Flow]:
        """Yield the flows of adapters' factors, to all ranks with a part of their weights."""
        to_ranks: dict[int, set[int]] = {}
        for number, adapters in added.items():
            groups = sources[number].holders().values()
            for factor in {factor for _, *factors in adapters for factor in factors}:
                to_ranks.setdefault(factor, set()).update(*groups)
        for factor, ranks in sorted(to_ranks.items()):
            pieces = local_pieces(sources[factor].shape, None, None)
            strip = Strip.whole(factor, sources[factor].shape)
            yield self._whole(sources[factor], factor, strip, dict.fromkeys(sorted(ranks), pieces))

    def _whole(
        self, source: SourceTensor, number: int, strip: Strip, wanted: Mapping[int, Sequence[Piece]]
    ) -> Flow:
        """Make the flow of a whole source tensor, to ranks that want pieces of it."""
        transfers = transfers_of(self.ranks.rank, [strip], [self._places(source)[1]], wanted)
        return Flow(
            name=source.row.keys[0],
            index=number,
            strips=(strip,),
            transfers=tuple(transfers),
            stored_dtype=source.row.dtype,
            wire_dtype=source.row.dtype,
            target_dtype=source.row.dtype,
            nbytes=_numel(wanted) * source.row.dtype.itemsize,
            is_compared=False,
        )

    def _places(self, source: SourceTensor) -> tuple[Any, tuple[HeldBox, ...]]:
        layout: Layout | None = source.layout
        key = (source.shape, layout, tuple(source.coordinates.items()))
        if key not in self.places:
            self.places[key] = places_of(source.shape, layout, source.coordinates, self.nodes)
        return key, self.places[key]


def _alike(ends: Mapping[int, HeldEnd]) -> list[list[int]]:
    """Group the ranks by what they hold; ranks that hold nothing are omitted."""
    digests = {rank: end.digest for rank, end in ends.items() if end.digest}
    return [*ranks_by_value(digests).values()]


def _added(sources: Sequence[SourceTensor]) -> dict[int, tuple[tuple[Added, int, int], ...]]:
    """Map each source tensor to its adapters' products, with the numbers of both factors."""
    numbers = {source.row.keys[0]: number for number, source in enumerate(sources)}
    return {
        number: tuple((low, numbers[low.a], numbers[low.b]) for low in source.row.added)
        for number, source in enumerate(sources)
        if source.row.added
    }


def _numel(wanted: Mapping[int, Sequence[Piece]]) -> int:
    """Return the number of elements that all ranks want together."""
    return sum(piece.box.numel for pieces in wanted.values() for piece in pieces)
