"""`NAME.xxh3`: checksums of a data file's blocks, by which any part of it is verified when read.

A tensor's bytes are cut into blocks of about a 64th of them, so that a part is read with little
beyond it; what lies between tensors is one block each. The file lists where the tensors lie, as
64-bit little-endian numbers (how many; then offset and bytes of each, in order), and then the
xxh3-64 of every block, 8 bytes each.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise

from anyrank.errors import CorruptCheckpoint
from anyrank.files.listing import SumsFile
from anyrank.files.storage import OpenFile, read_exactly, read_whole, split, storage_for

SUFFIX = ".xxh3"
MIN_BYTES, MAX_BYTES = 4 << 10, 1 << 20  # of a block
BLOCKS = 64  # of a tensor, at least
DIGEST_BYTES = 8
READ_BYTES = 2 << 20  # at a time: still in the cache when it is hashed

Extent = tuple[int, int]  # offset and bytes


def block_bytes(nbytes: int) -> int:
    """Bytes of a block of a tensor of this length: a power of two, so that no element is in two."""
    power = max(nbytes // BLOCKS, 1).bit_length() - 1
    return max(MIN_BYTES, min(MAX_BYTES, 1 << power))


def _ends_of(offset: int, nbytes: int) -> list[int]:
    """Where the blocks of a tensor end."""
    block, stop = block_bytes(nbytes), offset + nbytes
    return [*range(offset + block, stop, block), stop]


class BlockDigester:
    """Digests of a file's blocks, fed with its bytes in order and in parts of any size."""

    def __init__(self) -> None:
        import xxhash  # only files that are written or verified need it

        self.new = xxhash.xxh3_64
        self.hash = self.new()
        self.extents: list[Extent] = []
        self.ends: deque[int] = deque()
        self.position = self.planned = self.done = 0
        self.digests = bytearray()

    def expect(self, offset: int, nbytes: int) -> None:
        """Announce where the next tensor lies, before its bytes."""
        if nbytes:
            self.extents.append((offset, nbytes))
            if offset > self.planned:
                self.ends.append(offset)
            self.ends.extend(_ends_of(offset, nbytes))
            self.planned = offset + nbytes

    def update(self, view: memoryview) -> None:
        """Take the next bytes."""
        while len(view):
            room = self.ends[0] - self.position if self.ends else len(view)
            part, view = view[:room], view[room:]
            self.hash.update(part)
            self.position += len(part)
            if self.ends and self.position == self.ends[0]:
                self.ends.popleft()
                self._close()

    def _close(self) -> None:
        self.digests += self.hash.digest()
        self.hash, self.done = self.new(), self.position

    def to_bytes(self) -> bytes:
        """The file of the checksums, once all bytes are digested."""
        if self.position > self.done:
            self._close()
        flat = [number for extent in self.extents for number in extent]
        return struct.pack(f"<{len(flat) + 1}Q", len(self.extents), *flat) + bytes(self.digests)


@dataclass(frozen=True)
class BlockSums:
    """The blocks of one file, in order.

    Attributes:
        ends: where each ends.
        between: for each, 1 where it lies between tensors.
        digests: of all.
    """

    ends: array[int]
    between: bytes
    digests: bytes

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """The range of whole blocks around a range of bytes, with what precedes and follows a
        tensor that it begins or ends with: so nothing of a file is left out when all is read.
        """
        first, last = bisect_right(self.ends, start), bisect_left(self.ends, stop)
        first -= first > 0 and self.between[first - 1]
        last += last + 1 < len(self.ends) and self.between[last + 1]
        return self.ends[first - 1] if first else 0, self.ends[last]

    def cut(self, start: int, stop: int, most: int) -> int:
        """Where to end a read from `start`, of at most `most` bytes: at the end of a block."""
        if stop - start <= most:
            return stop
        last = self.ends[bisect_right(self.ends, start + most) - 1]
        return last if last > start else start + most

    def stops(self, start: int, stop: int, most: int) -> Iterator[int]:
        """Where reads of at most `most` bytes end, or of one block that is longer. `start` and
        `stop` are ends of blocks.
        """
        while start < stop:
            last = bisect_right(self.ends, start + most) - 1
            if last < 0 or self.ends[last] <= start:
                last += 1
            start = min(self.ends[last], stop)
            yield start

    def check(self, start: int, views: Sequence[memoryview], path: str) -> None:
        """Compare the bytes from `start`, which begin and end with blocks, with their digests.

        Raises:
            CorruptCheckpoint: a block differs.
        """
        import xxhash  # only files that are written or verified need it

        first = bisect_right(self.ends, start)
        digest, found = xxhash.xxh3_64_digest, list[bytes]()
        running, position = None, start  # the digest of a block that is in several views
        for view in views:
            index, length = first + len(found), len(view)
            last = bisect_right(self.ends, position + length)
            ends = [end - position for end in self.ends[index:last]]  # of blocks, in the view
            done = 0
            if running is not None:
                done = ends.pop(0) if ends else length
                running.update(view[:done])
                if index < last:
                    found.append(running.digest())
                    running = None
            # Few steps for each block, which together would take half as long as the hashing.
            found += [digest(view[low:high]) for low, high in pairwise([done, *ends])]
            done = ends[-1] if ends else done
            if done < length:
                running = xxhash.xxh3_64(view[done:])
            position += length
        expected = self.digests[first * DIGEST_BYTES : (first + len(found)) * DIGEST_BYTES]
        if b"".join(found) != expected:
            self._raise_first(first, found, path)

    def _raise_first(self, first: int, found: Sequence[bytes], path: str) -> None:
        for index, digest in enumerate(found, first):
            expected = self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            if digest != expected:
                low = self.ends[index - 1] if index else 0
                raise CorruptCheckpoint(
                    f"{path}: bytes {low} to {self.ends[index]} are not those that were written: "
                    f"their xxh3-64 is {digest.hex()}, it was {expected.hex()}: the file is damaged"
                )


def read_verified(
    file: OpenFile, path: str, views: Sequence[memoryview], start: int, sums: BlockSums, most: int
) -> None:
    """Fill the views from `start`, `most` bytes at a time, each compared with its checksums while
    it is in the cache. They begin and end with blocks.

    Raises:
        CorruptCheckpoint: a block differs.
        LoadError: the file cannot be read.
    """
    ends = [*sums.stops(start, start + sum(map(len, views)), most)]
    lengths = (end - begin for begin, end in pairwise([start, *ends]))
    for begin, part in zip([start, *ends], split(views, lengths), strict=False):
        read_exactly(file, path, part, begin)
        sums.check(begin, part, path)


def read_sums(where: SumsFile, size: int) -> BlockSums:
    """The checksums of a file of `size` bytes.

    Raises:
        CorruptCheckpoint: they are not there, or not what was written.
        LoadError: they cannot be read.
    """
    import xxhash  # only files that are written or verified need it

    storage = storage_for(where.path)
    if not storage.is_file(where.path) or storage.info(where.path).size != where.size:
        raise CorruptCheckpoint(f"{where.path}: is missing or has another size: it is damaged")
    data = read_whole(storage, where.path)
    if xxhash.xxh3_64_hexdigest(data) != where.digest:
        raise CorruptCheckpoint(f"{where.path}: does not match its checksum: it is damaged")
    try:
        return parse_sums(data, size)
    except (ValueError, struct.error) as error:
        raise CorruptCheckpoint(f"{where.path}: holds no checksums ({error})") from error


def parse_sums(data: bytes, size: int) -> BlockSums:
    """As `read_sums`, from bytes.

    Raises:
        ValueError, struct.error: they are not the checksums of a file of this size.
    """
    (count,) = struct.unpack_from("<Q", data)
    head = 8 + 16 * count
    if head > len(data):
        raise ValueError(f"{count} tensors in {len(data)} bytes")
    flat = struct.unpack_from(f"<{2 * count}Q", data, 8)
    extents = [*zip(flat[::2], flat[1::2], strict=True)]
    position = blocks = 0
    for offset, nbytes in extents:
        if offset < position or not nbytes or offset + nbytes > size:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of {size}, after {position}")
        blocks += (offset > position) - (-nbytes // block_bytes(nbytes))
        position = offset + nbytes
    blocks += size > position
    if head + DIGEST_BYTES * blocks != len(data):
        raise ValueError(f"{len(data) - head} bytes of digests for {blocks} blocks")
    ends, between = array("Q"), bytearray()
    for offset, nbytes in [*extents, (size, 0)]:
        if offset > (ends[-1] if ends else 0):
            ends.append(offset)
            between.append(1)
        if nbytes:
            inside = _ends_of(offset, nbytes)
            ends.extend(inside)
            between += bytes(len(inside))
    return BlockSums(ends, bytes(between), data[head:])


def check_file(
    path: str, sums: BlockSums, number: int, count: int, check: Callable[[], None]
) -> None:
    """Compare one of `count` equal parts of a file with its checksums.

    Raises:
        CorruptCheckpoint: a block differs.
        LoadError: the file cannot be read.
    """
    blocks = len(sums.ends)
    low, high = blocks * number // count, blocks * (number + 1) // count
    if low == high:
        return
    start, stop = sums.ends[low - 1] if low else 0, sums.ends[high - 1]
    memory = memoryview(bytearray(min(READ_BYTES, stop - start)))
    with closing(storage_for(path).open(path)) as file:
        for end in sums.stops(start, stop, READ_BYTES):
            check()
            if end - start > len(memory):
                memory = memoryview(bytearray(end - start))
            read_verified(file, path, [memory[: end - start]], start, sums, READ_BYTES)
            start = end
