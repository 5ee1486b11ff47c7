"""The seal of a step's `.metadata`: the digest of its plan, and a checksum.

It follows the end of the pickle, so that readers of the pickle do not see it. The pickle depends
only on the plan: steps with the same plan have the same pickle, and later steps copy it.
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
    """Write a `.metadata` with its seal.

    Args:
        storage, path: where to write it.
        parts: parts of the pickle.
        plan: digest of the plan on which the pickle depends.
        rest: called after each part.

    Raises:
        CheckpointError: the device reports an error; a part of the file may remain.
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
    """Read the plan's digest from a `.metadata`; None if the file is missing or has no seal.

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
        CorruptCheckpoint: the file has changed since it was written.
        OSError: the file cannot be read.
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
        raise CorruptCheckpoint(
            f"{path}: does not match its own checksum. The file is corrupt; restore it from a "
            "copy, or use an older step."
        )
