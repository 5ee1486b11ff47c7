"""The ranks' sources: what was passed on each rank, who can see it, and what the headers say."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from anyrank.errors import AnyrankError, LoadError, WrongValue
from anyrank.files.fingerprints import with_fingerprints
from anyrank.files.listing import Listing
from anyrank.files.storage import storage_for
from anyrank.models.frozen_parts import FrozenSource
from anyrank.sources.locate import locate_all
from anyrank.sources.source import Source, list_headers
from anyrank.world.ranks import Ranks

SMALL_BYTES = 64 << 10  # headers up to this go with the first message; longer ones are broadcast


@dataclass(frozen=True)
class Headers:
    """The headers that one rank has read for all ranks.

    Attributes:
        listing: contents of the source; None if all ranks already know it.
        parts: contents of the sources of frozen parts.
    """

    listing: Listing | None
    parts: dict[FrozenSource, Listing]


@dataclass(frozen=True)
class SourceInfo:
    """The source that was passed on the ranks, and which of them see it.

    Attributes:
        sources: the paths, or "a dict of tensors", -> the first rank on which they were passed;
            only the first two. A rank with None or an empty dict adds no entry.
        locations: real locations of the local paths that ranks see; two are enough to show that
            ranks see copies.
        seeing: the ranks that can read it, one bit per position: every rank must know who reads.
        seed: the first rank's torch seed.
        is_live: whether a rank has a dict with sharded tensors, so that no rank has all bytes.
        headers: the headers, if the first rank has read them for all ranks and they are small.
    """

    sources: dict[str, int]
    locations: frozenset[str]
    seeing: int
    seed: int
    is_live: bool = False
    headers: Headers | None = None

    def join(self, others: SourceInfo) -> SourceInfo:
        """Merge the messages of ranks; the first rank's comes first."""
        sources = {**self.sources}
        for source, rank in others.sources.items():
            sources[source] = min(rank, sources.get(source, rank))
        first_two = sorted(sources.items(), key=lambda item: item[1])[:2]
        return SourceInfo(
            dict(first_two),
            frozenset(sorted(self.locations | others.locations)[:2]),
            self.seeing | others.seeing,
            self.seed,
            self.is_live or others.is_live,
            self.headers or others.headers,
        )

    def sees(self, position: int) -> bool:
        """Return True if the rank at a position can read the source."""
        return bool(self.seeing >> position & 1)


def header_reader(
    source: Source | None,
    find_frozen: Callable[[], Sequence[FrozenSource]],
    ranks: Ranks,
    known: Listing | None = None,
) -> Callable[[], Headers]:
    """Make a function that reads the headers of a load, once.

    Args:
        source, ranks: arguments of the load.
        find_frozen: lists the sources of the model's frozen parts; not called before the arguments
            are checked.
        known: contents of the source, if all ranks already know them.
    """

    def to_send(source: Source) -> Listing:
        listing = list_headers(source)
        return listing.without_memory() if ranks.size > 1 else listing

    def read() -> Headers:
        listing = None if known else to_send(require_source(source))
        parts = {path: to_send(path) for path in find_frozen()}
        return Headers(listing, parts)

    return functools.cache(read)


def look_at_source(
    source: Source | None, ranks: Ranks, read_headers: Callable[[], Headers]
) -> SourceInfo:
    """Describe this rank's source for the other ranks. Does not communicate.

    The first rank reads the headers at once, because its headers count if it sees the source.
    Errors in them are raised when all ranks ask for the headers.

    Raises:
        LoadError: the source cannot be reached.
    """
    info = _locate(source, ranks)
    if ranks.index or not info.seeing or info.is_live:
        return info
    try:
        headers = read_headers()
    except Exception:
        return info
    is_long = ranks.size > 1 and len(pickle.dumps(headers)) > SMALL_BYTES
    return info if is_long else replace(info, headers=headers)


def agreed_reader(info: SourceInfo, ranks: Ranks) -> int:
    """Return the rank whose headers count: the first that sees the source.

    Raises:
        LoadError: ranks passed different sources.
    """
    if len(info.sources) > 1:
        (source, rank), (other, other_rank) = info.sources.items()
        raise LoadError(
            f"different sources were passed on rank {rank} ({source!r}) and rank {other_rank} "
            f"({other!r}). Pass the same source on every rank, or None on ranks that have no source"
        )
    seeing = (rank for position, rank in enumerate(ranks.ranks) if info.sees(position))
    return next(seeing, next(iter(info.sources.values()), ranks.ranks[0]))


def with_file_fingerprints(headers: Headers) -> Headers:
    """Add fingerprints, by which ranks recognize copies of the files."""
    listing = None if headers.listing is None else with_fingerprints(headers.listing)
    return Headers(listing, {key: with_fingerprints(p) for key, p in headers.parts.items()})


def with_all_chunks(headers: Headers) -> Headers:
    """Find the bytes of every tensor in steps of runs, with the indexes of all ranks.

    Raises:
        LoadError: as for `locate_all`.
    """
    listing = None if headers.listing is None else locate_all(headers.listing)
    return Headers(listing, {key: locate_all(part) for key, part in headers.parts.items()})


def require_source(source: Source | None) -> Source:
    if source is None:
        raise WrongValue(
            "source=None on every rank: expected a path, a list of paths or a dict of tensors on "
            "at least one rank"
        )
    return source


def _locate(source: Source | None, ranks: Ranks) -> SourceInfo:
    seed, bit = torch.initial_seed(), 1 << ranks.index
    if source is None or isinstance(source, Mapping):
        is_live = any(hasattr(value, "placements") for value in (source or {}).values())
        sources = {"a dict of tensors": ranks.rank} if source else {}
        return SourceInfo(sources, frozenset(), bit if source else 0, seed, is_live)
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
        except Exception as error:  # each fsspec file system has its own errors
            raise LoadError(f"{path}: cannot be reached: {error}") from error
    locations = frozenset([", ".join(places)] if visible else [])
    return SourceInfo({", ".join(paths): ranks.rank}, locations, bit if visible else 0, seed)
