"""The seal after the pickle in the `.metadata` of a step: the digest of its plan, and a checksum.

It stands after the pickle's end, so that readers of the pickle do not see it. The pickle depends on
the plan alone: steps of one plan have the same, and a later one takes a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing

from anyrank.errors import CorruptCheckpoint
from anyrank.files.storage import Storage, read_range, storing

MARK = b"anyrank\n"
DIGEST_BYTES = 16
SEAL_BYTES = 2 * DIGEST_BYTES + len(MARK)
READ_BYTES = 1 << 20


def write_sealed(
    storage: Storage, path: str, parts: Iterable[bytes], plan: bytes, rest: Callable[[], None]
) -> None:
    """Write a `.metadata`.

    Args:
        storage, path: where to write it.
        parts: parts of the pickle.
        plan: digest of the plan that it depends on.
        rest: called after each part.

    Raises:
        CheckpointError: the device refuses; part of the file may exist.
    """
    import xxhash  # only files that are written or verified need it

    digester = xxhash.xxh3_128()
    with storing(path):
        file = storage.create(path)
        try:
            for part in parts:
                digester.update(part)
                file.write([part])
                rest()
            digester.update(plan)
            file.write([plan + digester.digest() + MARK])
        except BaseException:
            file.abandon()
            raise
        file.finish()


def plan_of(storage: Storage, path: str) -> bytes | None:
    """Return the plan of a `.metadata`, from its end; None if there is no file, or no seal.

    Raises:
        OSError: the file cannot be read.
    """
    info = storage.find(path)
    if info is None or info.size < SEAL_BYTES:
        return None
    with closing(storage.open(path)) as file:
        seal = read_range(file, info.size - SEAL_BYTES, SEAL_BYTES)
    return seal[:DIGEST_BYTES] if seal.endswith(MARK) else None


def check_seal(storage: Storage, path: str, rest: Callable[[], None] = lambda: None) -> None:
    """Compare a `.metadata` with its checksum.

    Args:
        storage, path: where the file is.
        rest: called after each block that was read.

    Raises:
        CorruptCheckpoint: it differs from what was written.
        OSError: it cannot be read.
    """
    import xxhash  # only files that are written or verified need it

    digester = xxhash.xxh3_128()
    with closing(storage.open(path)) as file:
        stop = file.info.size - DIGEST_BYTES - len(MARK)
        for low in range(0, max(0, stop), READ_BYTES):
            digester.update(read_range(file, low, min(READ_BYTES, stop - low)))
            rest()
        seal = read_range(file, stop, DIGEST_BYTES + len(MARK)) if stop > 0 else b""
    if seal != digester.digest() + MARK:
        raise CorruptCheckpoint(f"{path}: does not match its own checksum: the file is damaged")
