"""Match the names of `src` and `dst` like those of a file, and find what fills each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from anyrank.errors import LoadError
from anyrank.files.listing import Listing
from anyrank.live.ends import End, TensorInfo
from anyrank.live.report import SyncReport
from anyrank.loading.sharing.transfers import Coordinate, Strip, strips_of
from anyrank.models.dialects.dialect import ModelMatch
from anyrank.models.dialects.peft.merging import scales_differ
from anyrank.models.match import match_model
from anyrank.models.options import LoadOptions
from anyrank.models.tensors import in_state_dict
from anyrank.sources.tables.renaming import renamer
from anyrank.tensors.layout import Layout, Piece
from anyrank.tensors.names import candidates, is_of_base_layer, match_keys
from anyrank.tensors.sharded_tensor import Coordinates, Members, holders
from anyrank.tensors.spec import StoredTensor, dtype_name
from anyrank.wording import count, listed
from anyrank.world.alike import digest_of


@dataclass
class SourceTensor:
    """One tensor of `src`, over all ranks.

    Attributes:
        row: the description that its ranks send.
        coordinates: global rank -> coordinate in its mesh, for the ranks that have a part of it.
    """

    row: TensorInfo
    coordinates: dict[int, Coordinate]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.row.shape

    @property
    def layout(self) -> Layout | None:
        """Its layout on its ranks."""
        return self.row.layout

    def holders(self) -> Mapping[tuple[Piece, ...], Members]:
        """Map pieces to the ranks that hold exactly these pieces."""
        return holders(self.shape, self.layout, tuple(self.coordinates.items()))


@dataclass(frozen=True)
class Inflow:
    """The sources of one tensor of `dst`.

    Attributes:
        index: position among the tensors of this `dst`.
        strips: positions of its elements in the tensors of `src`.
        stored_dtype: dtype in `src`.
        is_compared: whether it belongs to a frozen part, which must already be equal.
    """

    index: int
    strips: tuple[Strip, ...]
    stored_dtype: torch.dtype
    is_compared: bool


@dataclass(frozen=True)
class EndMatch:
    """The description of one `dst` for all ranks: its tensors' rows, and how each is filled.

    Attributes:
        rows: rows of its tensors.
        inflows: inflows of the tensors that `src` contains.
        facts: the report, as far as the match knows it.
        adapters: names in `src` of adapter tensors that this `dst` does not have.
        turned: names in `src` of tensors that `dst` has as a transposed view of another tensor.
    """

    rows: tuple[TensorInfo, ...]
    inflows: tuple[Inflow, ...]
    facts: SyncReport
    adapters: list[str]
    turned: frozenset[str]

    @property
    def digest(self) -> str:
        """Digest that is equal on ranks with the same match."""
        return digest_of([self.inflows, self.facts])


def sources_of(
    groups: Sequence[tuple[tuple[TensorInfo, ...], Mapping[int, Coordinates]]],
) -> list[SourceTensor]:
    """Find the tensors of `src` over all ranks that have a part of it.

    Args:
        groups: rows that are the same on several ranks, with the coordinates of each such rank.

    Raises:
        LoadError: ranks hold a tensor of the same name in different ways.
    """
    known: dict[tuple[str, ...], SourceTensor] = {}
    for rows, ranks in groups:
        for index, row in enumerate(rows):
            if row.kind in ("derived", "dropped"):
                continue
            tensor = known.setdefault(row.keys, SourceTensor(row, {}))
            words, other_words = _describe(tensor.row), _describe(row)
            if (words, tensor.row.added) != (other_words, row.added):
                first, other = next(iter(tensor.coordinates)), next(iter(ranks))
                raise LoadError(
                    f"{row.keys[0]}: ranks hold it in different ways in src (rank {first} as "
                    f"{words}, rank {other} as {other_words}). Pass src on the ranks of one "
                    "layout, with the same adapters merged, and None on the other ranks"
                )
            tensor.coordinates.update(
                {rank: known.coordinate(index) for rank, known in ranks.items()}
            )
    for tensor in known.values():
        if tensor.row.kind == "buffer" and tensor.layout is None:
            # Plain buffers may differ between ranks: those of the first rank count, as in a save.
            first = min(tensor.coordinates)
            tensor.coordinates = {first: tensor.coordinates[first]}
    return list(known.values())


def _describe(row: TensorInfo) -> str:
    layout = "whole" if row.layout is None else str(row.layout)
    adapters = _merged([row]) and f", to be merged with {_merged([row])}"
    adapters = ", with its adapter merged into it" if row.is_merged else adapters
    return f"{dtype_name(row.dtype)}{list(row.shape)} {layout}{adapters}"


def listing_of(sources: Sequence[SourceTensor]) -> Listing:
    """List the tensors of `src` under all their names, like those of a file.

    Raises:
        LoadError: two tensors have the same name.
    """
    tensors: dict[str, StoredTensor] = {}
    for number, source in enumerate(sources):
        row = source.row
        for key in row.keys if row.kind != "factor" else ():
            if key in tensors:
                raise LoadError(
                    f"src contains {key} twice: different ranks have different tensors of that name"
                )
            tensors[key] = StoredTensor.contiguous(key, row.shape, row.dtype, number, 0)
    return Listing("live", (), tensors, is_live=True)


def match_ends(
    dst: End, sources: Sequence[SourceTensor], listing: Listing, options: LoadOptions
) -> tuple[ModelMatch, EndMatch]:
    """Match this rank's `dst` with `src`. Does not communicate.

    Returns:
        The match, without the tensors themselves, and its description for the other ranks.

    Raises:
        LoadError: all problems with names, shapes and dtypes, in one list.
    """
    names = [target.all_names() for target in in_state_dict(dst.tensors)]
    if options.merge:
        _check_merged(dst, sources)
    adapters = [
        key
        for source in sources
        if source.row.is_adapter and source.row.kind != "factor"
        for key in source.row.keys
    ]
    left = match_keys(names, adapters, renamer(options.rename)).unexpected
    if left or not dst.tensors:  # for `left`, `joined` raises its own error about all dst
        options = replace(options, unexpected="ignore")
    match = match_model(dst.tree, listing, options)
    for index, stored in match.stored.items():
        rows = [sources[chunk.file].row for chunk in stored.chunks]
        at_base = any(map(is_of_base_layer, dst.rows[index].keys))
        if at_base and any(row.is_merged != dst.rows[index].is_merged for row in rows):
            both = ("src", "dst") if rows[0].is_merged else ("dst", "src")
            raise LoadError(
                f"{dst.tensors[index].name}: the adapter is merged into the base weights in "
                f"{both[0]}, but not in {both[1]}. Call merge_adapter() or unmerge_adapter() on "
                "one of them"
            )
        scaling, src_scaling = dst.rows[index].scaling, rows[0].scaling
        if scaling is None or src_scaling is None:
            continue
        if scales_differ(scaling, src_scaling):
            raise LoadError(
                f"{dst.tensors[index].name}: its adapter is scaled by {src_scaling:g} in src, but "
                f"by {scaling:g} in dst, so the two models differ. Use the same LoraConfig in both"
            )
    shapes = [source.shape for source in sources]
    inflows = tuple(
        Inflow(index, strips_of(stored, shapes), stored.dtype, index in match.compared)
        for index, stored in sorted({**match.stored, **match.compared}.items())
    )
    facts = _facts(dst, match, len(inflows), sources)
    matched = EndMatch(dst.rows, inflows, facts, left, match.turned)
    return match.with_tensors([]), matched


def _check_merged(dst: End, sources: Sequence[SourceTensor]) -> None:
    """Check that merge=True has something to merge, and that no adapter would count twice.

    Raises:
        LoadError: src has no adapter; or dst has one, which the error names.
    """
    if not any(source.row.added or source.row.is_merged for source in sources):
        raise LoadError("merge=True needs an active PEFT adapter in src. Remove merge=True")
    adapters = [row.keys[0] for row in dst.rows if row.is_adapter]
    if adapters:
        raise LoadError(
            f"merge=True, but dst has an adapter too ({adapters[0]}). Remove merge=True to copy "
            "the adapter, or pass a dst without adapters"
        )


def _facts(dst: End, match: ModelMatch, count: int, sources: Sequence[SourceTensor]) -> SyncReport:
    tensors = dst.tensors
    numbers = {key: number for number, source in enumerate(sources) for key in source.row.keys}
    wanted = dict(match.wanted)
    return SyncReport(
        tensors=count,
        missing=match.missing,
        unexpected=match.unexpected,
        kept=[tensors[i].name for i in match.keep],
        renamed={
            tensors[i].name: stored.name
            for i, stored in wanted.items()
            if not {*tensors[i].flat_names()}.intersection(candidates(stored.name))
        },
        tied=match.tied,
        duplicates={
            key: loaded
            for key, loaded in match.duplicates.items()
            if numbers.get(key) != numbers.get(loaded)
        },
        cast={
            tensors[i].name: f"{dtype_name(stored.dtype)} -> {dtype_name(tensors[i].dtype)}"
            for i, stored in wanted.items()
            if stored.dtype != tensors[i].dtype
        },
        frozen=[tensors[i].name for i in match.compared],
        merged={
            tensors[i].name: words
            for i, stored in wanted.items()
            if (words := _merged(sources[chunk.file].row for chunk in stored.chunks))
        },
    )


def check_all_shards(
    ends: Sequence[EndMatch], coordinates: Sequence[Mapping[int, Coordinates]], called: int
) -> None:
    """Check that every rank of the mesh of a dst passes it.

    There is nothing to check if only some ranks call, because the rest may have their own call, or
    if every rank passes a dst.

    Args:
        ends: each different `dst`.
        coordinates: coordinates of each rank that has it.
        called: number of ranks in the call.

    Raises:
        LoadError: some ranks of a mesh pass None; the error names a tensor.
    """
    if sum(map(len, coordinates)) == called or called < dist.get_world_size():
        return
    holders: dict[Layout, tuple[str, set[Any]]] = {}
    for end, known in zip(ends, coordinates, strict=True):
        for index, row in enumerate(end.rows):
            if row.layout is not None:
                present = holders.setdefault(row.layout, (row.keys[0], set()))[1]
                present.update(
                    own_coordinates.coordinate(index) for own_coordinates in known.values()
                )
    for layout, (name, present) in holders.items():
        count, num_present = math.prod(layout.mesh_shape), len(present - {None})
        if num_present < count:
            raise LoadError(
                f"{name}: dst is sharded over {count} ranks, but only {num_present} of them passed "
                "it, so the rest would keep old values. Pass dst on every rank of its mesh"
            )


def _merged(rows: Iterable[TensorInfo]) -> str:
    """Return a text with the adapters that are merged into a tensor."""
    words = (f"{low.adapter} x {low.scaling:g}" for row in rows for low in row.added)
    return ", ".join(dict.fromkeys(words))


def joined(ends: Sequence[EndMatch], unexpected: str) -> SyncReport:
    """Join the facts of all `dst`: a tensor of `src` is used if one of them uses it.

    Raises:
        LoadError: no `dst` has the tensors of an adapter of `src`, or other tensors of `src` that
            may not be ignored.
    """
    first, *others = (end.facts for end in ends)
    for facts in others:
        first = replace(
            first,
            tensors=first.tensors + facts.tensors,
            missing=list(dict.fromkeys([*first.missing, *facts.missing])),
            unexpected=[key for key in first.unexpected if key in facts.unexpected],
            kept=list(dict.fromkeys([*first.kept, *facts.kept])),
            renamed={**first.renamed, **facts.renamed},
            tied={**first.tied, **facts.tied},
            duplicates={**first.duplicates, **facts.duplicates},
            cast={**first.cast, **facts.cast},
            frozen=list(dict.fromkeys([*first.frozen, *facts.frozen])),
            merged={**first.merged, **facts.merged},
        )
    left = [key for key in ends[0].adapters if all(key in end.adapters for end in ends)]
    if left:
        raise LoadError(
            f"src has {count(len(left), 'PEFT adapter tensor')} (such as {left[0]}) that dst does "
            "not have; without them dst would compute something different. Sync with merge=True, "
            "or add the same adapter to dst"
        )
    if first.unexpected and unexpected == "error":
        raise LoadError(
            f"src does not match dst:\n{listed('unexpected in the source', first.unexpected)}\n"
            "  Fix: map the names with rename=..., or set unexpected='ignore'"
        )
    return first
