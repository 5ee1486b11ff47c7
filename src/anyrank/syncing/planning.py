"""The plan of a sync: agreed by all ranks, worked out by each for itself, kept by both layouts.

What the ranks exchange is small: a digest of each end and coordinates in its meshes. Only if some
rank has not planned these very ends before, one rank of each layout describes it to the others.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyrank.errors import LoadError
from anyrank.model.match import ModelMatch
from anyrank.model.options import Options
from anyrank.syncing.ends import End, Row, check_values
from anyrank.syncing.match import (
    Facts,
    Filling,
    MatchedEnd,
    SourceTensor,
    joined,
    listing_of,
    match_ends,
    sources_of,
)
from anyrank.tensors.box import Box
from anyrank.tensors.layout import Layout, Piece, local_pieces
from anyrank.tensors.names import renamer
from anyrank.tensors.sync_plan import (
    Coordinate,
    Place,
    Strip,
    Transfer,
    places_of,
    transfers_of,
)
from anyrank.world.failures import different
from anyrank.world.ranks import Ranks

KEPT_PLANS = 8  # of the latest calls of this process; they hold no tensors


@dataclass(frozen=True, slots=True)
class Flow:
    """One tensor of some ranks' `dst`, and what this rank has to do with it.

    Attributes:
        name: in `dst`.
        index: among this rank's tensors of `dst`; -1 on a rank that has another `dst`, or none.
        strips: where its elements are in `src`.
        transfers: this rank's, in the order of all ranks.
        stored, wire, held: dtypes in `src`, between the ranks, and in `dst`.
        nbytes: that all ranks receive of it, at most.
        is_compared: whether it is to be equal already, and not written.
        twin: number of the source tensor that takes the place of `dst` where two of src are
            compared, as dst ties them; else -1.
    """

    name: str
    index: int
    strips: tuple[Strip, ...]
    transfers: tuple[Transfer, ...]
    stored: torch.dtype
    wire: torch.dtype
    held: torch.dtype
    nbytes: int
    is_compared: bool
    twin: int = -1


@dataclass(frozen=True)
class SyncPlan:
    """A sync of two ends that can only fail by the loss of a rank or of memory from here on.

    Attributes:
        match: what fills this rank's `dst`, without its tensors.
        flows: all tensors of all ranks' `dst`, in the order in which they are sent.
        locals: source tensor -> its position among this rank's tensors of `src`.
        facts: of all `dst` together, for the report.
        rebuild: whether any rank has non-persistent buffers on meta.
        receivers: how many ranks have a `dst`.
        renamed: name in `src` -> what a callable `rename` gave for it; empty for other ones.
    """

    match: ModelMatch
    flows: tuple[Flow, ...]
    locals: dict[int, int]
    facts: Facts
    rebuild: bool
    receivers: int
    renamed: dict[str, str]


@dataclass(frozen=True)
class _Card:
    """What a rank lets the others know of its ends.

    Attributes:
        src, dst: digests of their rows; empty for None.
        src_at, dst_at: this rank's coordinates in the meshes of each.
        known: key of the plan that this rank has kept for its ends; empty if there is none.
        seed: this rank's torch seed.
        version: that this rank gives the weights, if it does.
        held: version that this rank's dst has now.
    """

    src: str
    src_at: tuple[Coordinate, ...]
    dst: str
    dst_at: tuple[Coordinate, ...]
    known: str
    seed: int
    version: int | None
    held: int


_kept: OrderedDict[Any, tuple[str, SyncPlan]] = OrderedDict()


@dataclass(frozen=True)
class Agreement:
    """What all ranks agreed on before the first byte.

    Attributes:
        plan: this rank's part of it.
        dst, src: as they are on this rank.
        is_planned: whether the plan was made now.
        seed: the first rank's torch seed.
        version: of the weights that are sent.
    """

    plan: SyncPlan
    dst: End
    src: End
    is_planned: bool
    seed: int
    version: int


def agree_plan(
    look: Callable[[], tuple[End, End]],
    options: Options,
    ranks: Ranks,
    version: int | None,
    held: int,
) -> Agreement:
    """The plan that all ranks follow. All ranks; nothing is changed.

    Args:
        look: gives dst and src as they are on this rank.
        options: what the caller allows, the same on all ranks.
        ranks: of the call.
        version: that this rank gives the weights, if it does.
        held: version that this rank's dst has now.

    Raises:
        LoadError: the ends do not fit each other, on any rank; on all ranks.
    """
    choices = (options.missing, options.unexpected, options.cast)

    def introduce() -> tuple[tuple[End, End, Any, SyncPlan | None], _Card]:
        dst, src = look()
        check_values(src)
        rename = options.rename
        by_function = callable(rename)
        choice = (*choices, by_function, "" if by_function else repr(rename))
        where = (dst.digest, dst.coordinates, src.digest, src.coordinates, ranks.ranks, choice)
        known, plan = _kept.get(where, ("", None))
        if plan is not None and plan.renamed != _renamed(plan.renamed, options):
            known, plan = "", None  # a function may answer differently now
        seed = torch.initial_seed()
        at = (src.digest, src.coordinates, dst.digest, dst.coordinates)
        return (dst, src, where, plan), _Card(*at, known, seed, version, held)

    (dst, src, where, plan), cards = ranks.own_and_all("looking at both ends", introduce)
    agreed = _agreed_version(dict(zip(ranks.ranks, cards, strict=True)), ranks)
    key = _key(cards, choices)
    made = plan is None or any(card.known != key for card in cards)
    if made:
        plan = _Planner(cards, ranks, options).plan(dst, src)
        _kept[where] = key, plan
        while len(_kept) > KEPT_PLANS:
            _kept.popitem(last=False)
    _kept.move_to_end(where)
    assert plan is not None
    return Agreement(plan, dst, src, made, cards[0].seed, agreed)


def _agreed_version(cards: Mapping[int, _Card], ranks: Ranks) -> int:
    """The version that ranks gave, else the next one.

    Raises:
        LoadError: ranks gave different ones.
    """
    given = {rank: card.version for rank, card in cards.items() if card.version is not None}
    if len(set(given.values())) > 1:
        words = {rank: str(version) for rank, version in given.items()}
        text = different("sync(): version= differs between ranks", words, ranks.named)
        raise LoadError(f"{text}: they mean the weights of different steps")
    return next(iter(given.values()), 1 + max(card.held for card in cards.values()))


def _renamed(names: Iterable[str], options: Options) -> dict[str, str]:
    """What `rename=` makes of each name."""
    rename = renamer(options.rename)
    return {name: rename(name) for name in names}


def _key(cards: Sequence[_Card], choices: tuple[str, ...]) -> str:
    rows = [(card.src, card.src_at, card.dst, card.dst_at) for card in cards]
    return hashlib.blake2b(repr((rows, choices)).encode(), digest_size=16).hexdigest()


class _Planner:
    """Makes one plan. Every rank comes to the same flows, each with its own transfers."""

    def __init__(self, cards: Sequence[_Card], ranks: Ranks, options: Options) -> None:
        self.ranks = ranks
        self.options = options
        self.cards = dict(zip(ranks.ranks, cards, strict=True))
        self.nodes = dict(zip(ranks.ranks, ranks.nodes, strict=True))
        self.places: dict[Any, tuple[Place, ...]] = {}
        self.wanted: dict[Any, dict[int, tuple[Piece, ...]]] = {}
        self.transfers: dict[Any, tuple[Transfer, ...]] = {}

    def plan(self, dst: End, src: End) -> SyncPlan:
        """The plan. All ranks.

        Raises:
            LoadError: on any rank, on all.
        """
        from_ranks = self._alike({rank: card.src for rank, card in self.cards.items()})
        to_ranks = self._alike({rank: card.dst for rank, card in self.cards.items()})
        for name, groups in (("src", from_ranks), ("dst", to_ranks)):
            if not groups:
                raise LoadError(f"{name} is None, or holds no tensors, on every rank")

        groups = [
            (
                self.ranks.from_one("describing src", group[0], lambda: src.rows),
                {rank: self.cards[rank].src_at for rank in group},
            )
            for group in from_ranks
        ]
        sources = sources_of(groups)
        listing = listing_of(sources)

        options = self.options
        if len(to_ranks) > 1:  # what one dst does not take, another may
            options = replace(options, unexpected="ignore")

        def match_here() -> tuple[tuple[ModelMatch, MatchedEnd, dict[str, str]], str]:
            match, matched = match_ends(dst, sources, listing, options)
            renamed = _renamed(listing.tensors if callable(options.rename) else (), options)
            return (match, matched, renamed), matched.digest if dst.digest else ""

        (match, matched, renamed), digests = self.ranks.own_and_all(
            "matching dst with src", match_here
        )
        by_rank = dict(zip(self.ranks.ranks, digests, strict=True))
        for group in to_ranks:
            if len({by_rank[rank] for rank in group}) > 1:
                raise LoadError(
                    "the ranks' renaming functions give different names for one dst: give all "
                    "ranks the same rename="
                )
        ends = [
            self.ranks.from_one("describing dst", group[0], lambda: matched) for group in to_ranks
        ]
        flows, _ = self.ranks.own_and_all(
            "planning the sync", lambda: (self._flows(ends, to_ranks, sources), None)
        )
        facts = joined(ends, self.options.unexpected)
        flows += tuple(self._twins(facts.duplicates, sources))
        numbers = {keys: i for i, row in enumerate(src.rows) for keys in [row.keys]}
        return SyncPlan(
            match=match,
            flows=flows,
            locals={
                number: numbers[source.row.keys]
                for number, source in enumerate(sources)
                if source.row.keys in numbers
            },
            facts=facts,
            rebuild=any(row.is_meta and row.kind == "derived" for end in ends for row in end.rows),
            receivers=sum(map(len, to_ranks)),
            renamed=renamed,
        )

    def _alike(self, digests: Mapping[int, str]) -> list[list[int]]:
        """The ranks by what they hold; those that hold nothing are left out."""
        groups: dict[str, list[int]] = {}
        for rank, digest in digests.items():
            if digest:
                groups.setdefault(digest, []).append(rank)
        return list(groups.values())

    def _flows(
        self,
        ends: Sequence[MatchedEnd],
        to_ranks: Sequence[Sequence[int]],
        sources: Sequence[SourceTensor],
    ) -> tuple[Flow, ...]:
        every = [
            (filling.index, number, filling)
            for number, end in enumerate(ends)
            for filling in end.fillings
        ]
        # By position first: ranks that hold different parts of a model receive side by side.
        every.sort(key=lambda entry: entry[:2])
        return tuple(
            self._flow(filling, ends[number].rows[index], to_ranks[number], number, sources)
            for index, number, filling in every
        )

    def _flow(
        self,
        filling: Filling,
        row: Row,
        to_ranks: Sequence[int],
        group: int,
        sources: Sequence[SourceTensor],
    ) -> Flow:
        wanted_key = (row.shape, row.layout, row.mesh, group)
        wanted = self.wanted.get(wanted_key)
        if wanted is None:
            wanted = self.wanted[wanted_key] = self._wanted(row, to_ranks)
        known = [self._places(sources[strip.source]) for strip in filling.strips]
        shape = tuple((s.box, s.start, s.dims) for s in filling.strips)
        key = (wanted_key, shape, tuple(places_key for places_key, _ in known))
        transfers = self.transfers.get(key)
        if transfers is None:
            transfers = tuple(
                transfers_of(
                    self.ranks.rank, filling.strips, [places for _, places in known], wanted
                )
            )
            self.transfers[key] = transfers
        wire = min((filling.stored, row.dtype), key=lambda dtype: dtype.itemsize)
        numel = sum(piece.box.numel for pieces in wanted.values() for piece in pieces)
        return Flow(
            name=row.keys[0],
            index=filling.index if self.ranks.rank in to_ranks else -1,
            strips=filling.strips,
            transfers=transfers,
            stored=filling.stored,
            wire=wire,
            held=row.dtype,
            nbytes=numel * wire.itemsize,
            is_compared=filling.is_compared,
        )

    def _twins(
        self, duplicates: Mapping[str, str], sources: Sequence[SourceTensor]
    ) -> Iterator[Flow]:
        """Source tensors that dst ties, to be compared with one another.

        Raises:
            LoadError: two that cannot be equal.
        """
        numbers = {key: number for number, source in enumerate(sources) for key in source.row.keys}
        for key, loaded in duplicates.items():
            one, other = sources[numbers[key]], sources[numbers[loaded]]
            if (one.shape, one.row.dtype) != (other.shape, other.row.dtype):
                raise LoadError(f"{key} and {loaded} are one tensor in dst, and not alike in src")
            strip = Strip(
                Box.whole(one.shape),
                numbers[key],
                (0,) * len(one.shape),
                tuple(range(len(one.shape))),
            )
            wanted = {
                rank: local_pieces(other.shape, other.layout, coordinate)
                for rank, coordinate in other.coordinates.items()
            }
            transfers = transfers_of(self.ranks.rank, [strip], [self._places(one)[1]], wanted)
            dtype = one.row.dtype
            name, twin = f"{key} and {loaded}", numbers[loaded]
            yield Flow(name, -1, (strip,), tuple(transfers), dtype, dtype, dtype, 0, True, twin)

    def _wanted(self, row: Row, to_ranks: Sequence[int]) -> dict[int, tuple[Piece, ...]]:
        at = {rank: self.cards[rank].dst_at[row.mesh] for rank in to_ranks}
        pieces: dict[Coordinate, tuple[Piece, ...]] = {
            coordinate: local_pieces(row.shape, row.layout, coordinate)
            for coordinate in set(at.values())
        }
        return {rank: pieces[coordinate] for rank, coordinate in at.items()}

    def _places(self, source: SourceTensor) -> tuple[Any, tuple[Place, ...]]:
        layout: Layout | None = source.layout
        key = (source.shape, layout, tuple(source.coordinates.items()))
        if key not in self.places:
            self.places[key] = places_of(source.shape, layout, source.coordinates, self.nodes)
        return key, self.places[key]
