"""`NAME.xxh3`: checksums of the blocks of a data file, so that any part of it can be verified.

A data file is cut into blocks of 64 KiB, starting at its first byte; the last one may be shorter.
The checksum file holds the xxh3-64 of each block, 8 bytes each, followed by the xxh3-64 of
everything before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from anyrank.errors import CorruptCheckpoint
from anyrank.files.listing import Listing
from anyrank.files.storage import OpenFile, read_exactly, read_whole, split, storage_for

SUFFIX = ".xxh3"
BLOCK_BYTES = 64 << 10
DIGEST_BYTES = 8
READ_BYTES = 2 << 20  # whole blocks per read: still in the cache when they are hashed


def sums_name(data: str) -> str:
    """Return the name of the checksum file of a data file."""
    return data.removesuffix(".distcp") + SUFFIX


def sums_bytes(size: int) -> int:
    """Return the size of the checksum file of a data file, in bytes."""
    return -(-size // BLOCK_BYTES) * DIGEST_BYTES + DIGEST_BYTES


class BlockDigester:
    """Digests the blocks of a file, whose bytes arrive in order and in parts of any size."""

    def __init__(self) -> None:
        import xxhash  # only files that are written or verified need it

        self.digest = xxhash.xxh3_64_digest
        self.new = xxhash.xxh3_64
        self.rest = self.new()  # of the block that is not complete
        self.rest_bytes = 0
        self.digests: list[bytes] = []

    def update(self, view: memoryview) -> None:
        """Add the next bytes."""
        begin = min(-self.rest_bytes % BLOCK_BYTES, len(view))
        self._add(view[:begin])
        stop = len(view) - (len(view) - begin) % BLOCK_BYTES
        # Few Python steps per block: many would take half as long as the hashing.
        self.digests += [
            self.digest(view[low : low + BLOCK_BYTES]) for low in range(begin, stop, BLOCK_BYTES)
        ]
        self._add(view[stop:])

    def _add(self, part: memoryview) -> None:
        self.rest.update(part)
        self.rest_bytes += len(part)
        if self.rest_bytes == BLOCK_BYTES:
            self._close()

    def _close(self) -> None:
        self.digests.append(self.rest.digest())
        self.rest, self.rest_bytes = self.new(), 0

    def finish(self) -> bytes:
        """Return the digests of all blocks, once all bytes have been fed."""
        if self.rest_bytes:
            self._close()
        return b"".join(self.digests)


@dataclass(frozen=True)
class BlockSums:
    """The checksums of one file.

    Attributes:
        size: bytes of the file.
        digests: digests of its blocks, in order.
        names: names of the tensors in a range of the file, as the start of a message.
    """

    size: int
    digests: bytes
    names: Callable[[int, int], str] = lambda start, stop: ""

    def to_bytes(self) -> bytes:
        """Return the content of the checksum file."""
        import xxhash  # only files that are written or verified need it

        return self.digests + xxhash.xxh3_64_digest(self.digests)

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """Extend a range of bytes to whole blocks."""
        return start - start % BLOCK_BYTES, min(stop + -stop % BLOCK_BYTES, self.size)

    def check(self, start: int, views: Sequence[memoryview], path: str) -> None:
        """Compare the bytes from `start`, which must be whole blocks, with their digests.

        Raises:
            CorruptCheckpoint: a block differs.
        """
        digester = BlockDigester()
        for view in views:
            digester.update(view)
        digests, first = digester.finish(), start // BLOCK_BYTES * DIGEST_BYTES
        if digests == self.digests[first : first + len(digests)]:
            return
        for low in range(0, len(digests), DIGEST_BYTES):
            actual = digests[low : low + DIGEST_BYTES]
            expected = self.digests[first + low : first + low + DIGEST_BYTES]
            if actual != expected:
                begin = (first + low) // DIGEST_BYTES * BLOCK_BYTES
                low, high = self.around(begin, begin + 1)
                raise CorruptCheckpoint(
                    f"{path}: {self.names(low, high)}bytes {low} to {high} differ from the saved "
                    f"ones (xxh3-64 {actual.hex()}, expected {expected.hex()}). The file is "
                    "corrupt; restore it from a copy."
                )


def read_verified(
    file: OpenFile, views: Sequence[memoryview], start: int, sums: BlockSums, most: int
) -> None:
    """Fill the views from `start`, `most` bytes at a time; check each read while it is in the
    cache.

    The views and every part of `most` bytes must consist of whole blocks.

    Raises:
        CorruptCheckpoint: a block differs.
        LoadError: the file cannot be read.
    """
    for part in split(views, itertools.repeat(most)):
        read_exactly(file, part, start)
        sums.check(start, part, file.path)
        start += sum(map(len, part))


def read_sums(listing: Listing, number: int) -> BlockSums:
    """Read the checksums of a file of a listing, by its number.

    Raises:
        CorruptCheckpoint: the checksums are missing or corrupt.
        LoadError: they cannot be read.
    """
    import xxhash  # only files that are written or verified need it

    path, size = listing.sums[number], listing.files[number].size
    storage = storage_for(path)
    length = sums_bytes(size) - DIGEST_BYTES
    info = storage.find(path)
    if info is None or info.size != sums_bytes(size):
        raise CorruptCheckpoint(
            f"{path}: is missing or has a wrong size. The checksum file is corrupt; restore it "
            "from a copy."
        )
    data = read_whole(storage, path)
    if xxhash.xxh3_64_digest(data[:length]) != data[length:]:
        raise CorruptCheckpoint(
            f"{path}: does not match its own checksum. The file is corrupt; restore it from a copy."
        )
    return BlockSums(size, data[:length], partial(listing.names_at, number))


def check_file(
    path: str, sums: BlockSums, number: int, count: int, progress: Callable[[int], None]
) -> None:
    """Compare one of `count` equal parts of a file with its checksums, and report progress.

    Raises:
        CorruptCheckpoint: a block differs.
        LoadError: the file cannot be read.
    """
    blocks = len(sums.digests) // DIGEST_BYTES
    start = blocks * number // count * BLOCK_BYTES
    stop = min(blocks * (number + 1) // count * BLOCK_BYTES, sums.size)
    memory = memoryview(bytearray(min(READ_BYTES, stop - start)))
    with closing(storage_for(path).open(path)) as file:
        for low in range(start, stop, READ_BYTES):
            part = memory[: stop - low]
            read_verified(file, [part], low, sums, READ_BYTES)
            progress(len(part))
