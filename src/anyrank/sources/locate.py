"""Finds the bytes of tensors that are listed only by shape, which are those of steps of runs.

The indexes of the ranks that saved a step say where the bytes are. A rank that reads a share reads
the indexes that the share needs (`locate`); a tool that needs all tensors reads all indexes
(`locate_all`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from anyrank.errors import AnyrankError, LoadError
from anyrank.files.listing import Listing, Wanted
from anyrank.sources.rank_index import REQUESTS
from anyrank.tensors.box import Box
from anyrank.tensors.layout import Piece
from anyrank.tensors.spec import StoredTensor


def locate(
    listing: Listing, wanted: Sequence[Wanted], threads: int
) -> tuple[Listing, list[StoredTensor]]:
    """Find the bytes that a rank reads. Does not communicate.

    Args:
        listing: the listing.
        wanted: listed tensors, and the pieces of each to read.
        threads: maximum number of threads that read indexes.

    Returns:
        The listing with the files as they are now, in which other tensors of runs have no chunks;
        and the wanted tensors.

    Raises:
        LoadError: an index is corrupt; or a file is missing, or has a wrong size.
    """
    files, sums = [*listing.files], {**listing.sums}
    chosen = [stored for stored, _ in wanted]
    for base, locator in listing.locators.items():
        numbers = [n for n, (stored, _) in enumerate(wanted) if base in _files_of(stored)]
        of_step = [(wanted[n][0].with_file_offset(-base), wanted[n][1]) for n in numbers]
        try:
            located, step_files, step_sums = locator.locate(of_step, threads)
        except AnyrankError as error:
            raise LoadError(str(error)) from error
        for number, stored in zip(numbers, located, strict=True):
            chosen[number] = stored.with_file_offset(base)
        files[base : base + len(step_files)] = step_files
        sums |= {base + number: path for number, path in step_sums.items()}
    chunks = {stored.chunks: new.chunks for (stored, _), new in zip(wanted, chosen, strict=True)}

    def with_chunks(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        return {
            key: t
            if listing.locators.keys().isdisjoint(_files_of(t))
            else replace(t, chunks=chunks.get(t.chunks, ()))
            for key, t in tensors.items()
        }

    tensors, beside = with_chunks(listing.tensors), with_chunks(listing.beside)
    listing = replace(listing, files=tuple(files), sums=sums, tensors=tensors, beside=beside)
    return replace(listing, locators={}), chosen


def locate_all(listing: Listing) -> Listing:
    """Find the bytes of all tensors.

    Raises:
        LoadError: as for `locate`.
    """
    if not listing.locators:
        return listing
    tensors = [*listing.tensors.values(), *listing.beside.values()]
    wholes = (Box.whole(stored.shape) for stored in tensors)
    wanted = [(t, (Piece(box, box.offsets),)) for t, box in zip(tensors, wholes, strict=True)]
    return locate(listing, wanted, REQUESTS)[0]


def has_remade(listing: Listing, wanted: Iterable[StoredTensor]) -> bool:
    """Return True if `locate` cannot find a tensor because it was cut, joined or computed."""
    if not listing.locators:
        return False
    if any(info.computed is not None for info in listing.files):
        return True
    return any(
        base in _files_of(stored) and not locator.is_listed(stored.with_file_offset(-base))
        for stored in wanted
        for base, locator in listing.locators.items()
    )


def _files_of(stored: StoredTensor) -> set[int]:
    return {chunk.file for chunk in stored.chunks}
