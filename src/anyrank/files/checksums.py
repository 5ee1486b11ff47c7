"""A source's files against the checksums that came with them."""

from __future__ import annotations

import hashlib
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
    listing: Listing, number: int, count: int, check: Callable[[], None]
) -> Iterator[tuple[str, str]]:
    """What differs in one of `count` equal parts of the files: the path, and what it is.

    A file of a run is left at its first difference.

    Args:
        listing: the source.
        number: of the part.
        count: of the parts.
        check: called between blocks; raises to stop early.

    Raises:
        LoadError: a file cannot be read.
    """
    digests = [i for i, info in enumerate(listing.files) if info.sha256]
    for index in digests[number::count]:
        info = listing.files[index]
        digest = hashlib.sha256()
        _feed(info.path, 0, info.size, digest.update, check)
        if digest.hexdigest() != info.sha256:
            yield (
                info.path,
                f"SHA-256 is {digest.hexdigest()}, its publisher's is {info.sha256}: "
                "the file is corrupt; download it again",
            )
    for record in listing.checksums[number::count]:
        path = listing.files[record.file].path
        crc = _Crc32()
        _feed(path, record.start, record.stop, crc.update, check)
        if crc.hexdigest() != record.digest:
            yield (
                path,
                f"{record.what}: CRC-32 is {crc.hexdigest()}, it was {record.digest} when it was "
                "written: the file is corrupt; copy it again",
            )
    for index, where in listing.sums.items():
        info = listing.files[index]
        try:
            check_file(info.path, read_sums(where, info.size), number, count, check)
        except AnyrankError as error:
            yield info.path, str(error).removeprefix(f"{info.path}: ")


def compared(listing: Listing) -> list[str]:
    """What `mismatches` compares, in words."""
    digests = sum(info.sha256 is not None for info in listing.files)
    words = [f"SHA-256 of {count(digests, 'file')}"] if digests else []
    words += [f"CRC-32 of {count(len(listing.checksums), 'record')}"] if listing.checksums else []
    words += [f"xxh3-64 of {count(len(listing.sums), 'file')}"] if listing.sums else []
    return words


class _Crc32:
    """zlib's CRC-32 with hashlib's methods."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, block: memoryview) -> None:
        self.value = zlib.crc32(block, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


def _feed(
    path: str,
    start: int,
    stop: int,
    take: Callable[[memoryview], object],
    check: Callable[[], None],
) -> None:
    block = memoryview(bytearray(BLOCK_BYTES))
    with closing(storage_for(path).open(path)) as file:
        for low in range(start, stop, BLOCK_BYTES):
            check()
            part = block[: min(BLOCK_BYTES, stop - low)]
            read_exactly(file, path, [part], low)
            take(part)
