"""Fingerprints of files, by which ranks recognize copies of them on other machines."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from anyrank.errors import LoadError
from anyrank.files.listing import FileInfo, Listing
from anyrank.files.storage import read_range, storage_for
from anyrank.files.threads import spread

FINGERPRINT_THREADS = 8
END_BYTES = 64 << 10  # covers headers, zip directories with checksums, and some of the weights
BLOCK_BYTES = 4096  # of a tensor


def fingerprint(info: FileInfo) -> str:
    """Return a digest of a file's first and last 64 KiB and its `blocks`, to recognize a copy.

    Raises:
        LoadError: the file cannot be read.
    """
    import xxhash  # only files that are written or verified need it

    length, digest = min(END_BYTES, info.size), xxhash.xxh3_64()
    ranges = [(offset, length) for offset in sorted({0, info.size - length})]
    ranges += [(offset, min(BLOCK_BYTES, info.size - offset)) for offset in info.blocks]
    try:
        with contextlib.closing(storage_for(info.path).open(info.path)) as file:
            for offset, nbytes in ranges:
                digest.update(read_range(file, offset, nbytes))
    except OSError as error:
        raise LoadError(f"{info.path}: cannot be read: {error}") from error
    return digest.hexdigest()


def with_fingerprints(listing: Listing) -> Listing:
    """Add fingerprints to a listing, so that other ranks recognize copies of its local files.

    It takes two reads per file and one per tensor, so only ranks whose files are elsewhere need it.
    """
    files, blocks = [*listing.files], _blocks_of(listing)
    local = (number for number, info in enumerate(files) if info.location)

    def add(number: int) -> None:
        info = replace(files[number], blocks=tuple(sorted(blocks.get(number, ()))))
        files[number] = replace(info, fingerprint=fingerprint(info))

    spread(local, [add] * min(FINGERPRINT_THREADS, len(files) or 1))
    return replace(listing, files=tuple(files))


def _blocks_of(listing: Listing) -> dict[int, set[int]]:
    """Map each file to the offsets of a block in the middle of each tensor (or of one of its
    pieces).

    Two versions of a tensor are likelier to differ in the middle than at the start, because
    embeddings start with rows that are never trained.
    """
    blocks: dict[int, set[int]] = {}
    for number, stored in enumerate([*listing.tensors.values(), *listing.beside.values()]):
        if stored.numel:
            chunk = stored.chunks[number % len(stored.chunks)]
            middle = chunk.box.numel * stored.dtype.itemsize // 2
            start = chunk.offset + max(0, middle - BLOCK_BYTES // 2)
            blocks.setdefault(chunk.file, set()).add(start)
    return blocks
