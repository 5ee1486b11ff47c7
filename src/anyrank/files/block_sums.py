"""`NAME.xxh3`: checksums of a data file's blocks, which verify any part of the file when read.

A data file is cut into blocks of 64 KiB, starting at its first byte; the last one may be shorter.
The file of the checksums holds the xxh3-64 of each block, 8 bytes each, followed by the xxh3-64 of
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
    """The name of the checksums of a data file."""
    return data.removesuffix(".distcp") + SUFFIX


def sums_bytes(size: int) -> int:
    """Bytes of the checksums of a data file of a given size."""
    return -(-size // BLOCK_BYTES) * DIGEST_BYTES + DIGEST_BYTES


class BlockDigester:
    """Digests of a file's blocks, fed with its bytes in order and in parts of any size."""

    def __init__(self) -> None:
        import xxhash  # only files that are written or verified need it

        self.digest = xxhash.xxh3_64_digest
        self.new = xxhash.xxh3_64
        self.rest = self.new()  # of the block that is not complete
        self.rest_bytes = 0
        self.digests: list[bytes] = []

    def update(self, view: memoryview) -> None:
        """Take the next bytes."""
        begin = min(-self.rest_bytes % BLOCK_BYTES, len(view))
        self._add(view[:begin])
        stop = len(view) - (len(view) - begin) % BLOCK_BYTES
        # Few steps per block: many would together take half as long as the hashing.
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
        names: names of the tensors in a range of the file, as the beginning of a message.
    """

    size: int
    digests: bytes
    names: Callable[[int, int], str] = lambda start, stop: ""

    def to_bytes(self) -> bytes:
        """The file of the checksums."""
        import xxhash  # only files that are written or verified need it

        return self.digests + xxhash.xxh3_64_digest(self.digests)

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """The range of whole blocks around a range of bytes."""
        return start - start % BLOCK_BYTES, min(stop + -stop % BLOCK_BYTES, self.size)

    def check(self, start: int, views: Sequence[memoryview], path: str) -> None:
        """Compare the bytes from `start`, which begin and end with blocks, with their digests.

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
                    f"{path}: {self.names(low, high)}bytes {low} to {high} are not those that "
                    f"were written: their xxh3-64 is {actual.hex()}, it was {expected.hex()}: the "
                    "file is damaged"
                )


def read_verified(
    file: OpenFile, views: Sequence[memoryview], start: int, sums: BlockSums, most: int
) -> None:
    """Fill the views from `start`, `most` bytes at a time, checking each read while it is cached.

    The views begin and end with blocks, and so does every part of `most` bytes.

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
        CorruptCheckpoint: the checksums are missing or damaged.
        LoadError: they cannot be read.
    """
    import xxhash  # only files that are written or verified need it

    path, size = listing.sums[number], listing.files[number].size
    storage = storage_for(path)
    length = sums_bytes(size) - DIGEST_BYTES
    info = storage.find(path)
    if info is None or info.size != sums_bytes(size):
        raise CorruptCheckpoint(f"{path}: is missing or has another size: it is damaged")
    data = read_whole(storage, path)
    if xxhash.xxh3_64_digest(data[:length]) != data[length:]:
        raise CorruptCheckpoint(f"{path}: does not match its checksum: it is damaged")
    return BlockSums(size, data[:length], partial(listing.names_at, number))


def check_file(
    path: str, sums: BlockSums, number: int, count: int, progress: Callable[[int], None]
) -> None:
    """Compare one of `count` equal parts of a file with its checksums, and report its bytes.

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
