"""Compare a source's files with the checksums that came with them."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing

from anyrank.errors import AnyrankError
from anyrank.files.block_sums import check_file, read_sums
from anyrank.files.listing import Listing
from anyrank.files.storage import read_exactly, storage_for
from anyrank.wording import count

BLOCK_BYTES = 1 << 20


def mismatches(
    listing: Listing,
    number: int = 0,
    count: int = 1,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[tuple[str, str]]:
    """Yield the differences in one of `count` equal parts of the files: path and description.

    For a file with checksums of its blocks, only the first difference is found.

    Args:
        listing: the source.
        number: number of the part.
        count: number of parts.
        progress: called with the number of compared bytes, `bytes_to_compare` in total.

    Raises:
        LoadError: a file cannot be read.
    """
    sizes = {info.path: info.size for info in listing.files}
    for path, published in _published(listing)[number::count]:
        digest = hashlib.sha256()
        for block in _blocks(path, 0, sizes[path]):
            digest.update(block)
            progress(len(block))
        if digest.hexdigest() != published:
            yield (
                path,
                f"SHA-256 is {digest.hexdigest()}, but its publisher has {published}. "
                "The file is corrupt; download it again",
            )
    yield from _record_mismatches(listing, number, count, progress)
    for index in listing.sums:
        info = listing.files[index]
        try:
            check_file(info.path, read_sums(listing, index), number, count, progress)
        except AnyrankError as error:
            yield info.path, str(error).removeprefix(f"{info.path}: ")


def bytes_to_compare(listing: Listing) -> int:
    """Return the number of bytes that `mismatches` reads for all parts together."""
    sizes = {info.path: info.size for info in listing.files}
    return (
        sum(sizes[path] for path, _ in _published(listing))
        + sum(record.stop - record.start for record in listing.checksums)
        + sum(listing.files[index].size for index in listing.sums)
    )


def _record_mismatches(
    listing: Listing, number: int, count: int, progress: Callable[[int], None]
) -> Iterator[tuple[str, str]]:
    """Compare the CRC-32s that the format itself keeps, like `mismatches`."""
    for record in listing.checksums[number::count]:
        path = listing.files[record.file].path
        crc = 0
        for block in _blocks(path, record.start, record.stop):
            crc = zlib.crc32(block, crc)
            progress(len(block))
        if f"{crc:08x}" != record.digest:
            names = listing.names_at(record.file, record.start, record.stop)
            yield (
                path,
                f"{names}{record.what}: CRC-32 is {crc:08x}, but was {record.digest} when "
                "it was written. The file is corrupt; copy it again",
            )


def compared(*listings: Listing) -> list[str]:
    """List the kinds and numbers of checksums that `mismatches` compares in these listings."""
    numbers = {
        ("SHA-256", "file"): sum(len(_published(listing)) for listing in listings),
        ("CRC-32", "record"): sum(len(listing.checksums) for listing in listings),
        ("xxh3-64", "file"): sum(len(listing.sums) for listing in listings),
    }
    return [f"{kind} of {count(n, noun)}" for (kind, noun), n in numbers.items() if n]


def _blocks(path: str, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes [start, stop) of a file, one block at a time, in memory that is reused."""
    block = memoryview(bytearray(BLOCK_BYTES))
    with closing(storage_for(path).open(path)) as file:
        for low in range(start, stop, BLOCK_BYTES):
            part = block[: min(BLOCK_BYTES, stop - low)]
            read_exactly(file, [part], low)
            yield part


def _published(listing: Listing) -> list[tuple[str, str]]:
    """Return the path and SHA-256 of the local files that came with a SHA-256.

    The Hugging Face cache names each large file's blob by its digest and links to it; a download
    into a plain folder leaves it in `.cache/huggingface/download/NAME.metadata`, line 2.
    """
    pairs = ((info.path, _sha256_beside(info.path)) for info in listing.files if info.location)
    return [(path, digest) for path, digest in pairs if digest]


def _sha256_beside(path: str) -> str:
    target = os.path.realpath(path)
    if os.path.basename(os.path.dirname(target)) == "blobs":
        return _as_sha256(os.path.basename(target))
    folder, name = os.path.split(path)
    note = os.path.join(folder, ".cache", "huggingface", "download", f"{name}.metadata")
    try:
        with open(note, encoding="utf-8") as file:
            lines = file.read(4096).splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return _as_sha256(lines[1].strip()) if len(lines) > 1 else ""


def _as_sha256(text: str) -> str:
    is_hex = len(text) == 64 and all(c in "0123456789abcdef" for c in text)
    return text if is_hex else ""
