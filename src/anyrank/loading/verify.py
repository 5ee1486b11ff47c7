"""`verify=True`: the file against its checksums, replicas against one another, values for NaN."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping

from anyrank.errors import CorruptCheckpoint, LoadError
from anyrank.files.block_sums import check_file, read_sums
from anyrank.files.content_hash import BLOCK_BYTES, content_hash
from anyrank.files.listing import Listing
from anyrank.files.reader import Reader
from anyrank.files.storage import OpenFile, read_exactly, storage_for
from anyrank.loading.model_tensors import ModelTensor
from anyrank.tensors.layout import Piece
from anyrank.world.ranks import Ranks


def check_files(listing: Listing, number: int, count: int, check: Callable[[], None]) -> list[str]:
    """Compare this rank's part of the files with the checksums that came with them.

    Args:
        listing: the source.
        number: which of `count` equal parts of the work to do.
        count: how many ranks share the work.
        check: called between blocks; raises to stop early.

    Returns:
        What was compared, in words.

    Raises:
        LoadError: a checksum differs; names the file, and the record where the format knows it.
    """
    digests = [i for i, info in enumerate(listing.files) if info.sha256]
    for index in digests[number::count]:
        info = listing.files[index]
        digest = hashlib.sha256()
        _feed(info.path, 0, info.size, digest.update, check)
        if digest.hexdigest() != info.sha256:
            raise LoadError(
                f"{info.path}: SHA-256 is {digest.hexdigest()}, its publisher's is {info.sha256}: "
                "the file is corrupt; download it again"
            )
    for record in listing.checksums[number::count]:
        path = listing.files[record.file].path
        digest = _Crc32()
        _feed(path, record.start, record.stop, digest.update, check)
        if digest.hexdigest() != record.digest:
            raise LoadError(
                f"{path}: {record.what}: CRC-32 is {digest.hexdigest()}, it was "
                f"{record.digest} when it was written: the file is corrupt; copy it again"
            )
    for index, where in listing.sums.items():
        info = listing.files[index]
        try:
            check_file(info.path, read_sums(where, info.size), number, count, check)
        except CorruptCheckpoint as error:
            raise LoadError(str(error)) from error
    compared = [f"SHA-256 of {len(digests)} files"] if digests else []
    compared += [f"CRC-32 of {len(listing.checksums)} records"] if listing.checksums else []
    compared += [f"xxh3-64 of {len(listing.sums)} files"] if listing.sums else []
    return compared


class _Crc32:
    """zlib's CRC-32 with hashlib's methods."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, block: memoryview) -> None:
        self.value = zlib.crc32(block, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


def compare_duplicates(listing: Listing, duplicates: Mapping[str, str]) -> None:
    """Compare the keys of tied tensors that a source holds more than once. Each rank by itself.

    Raises:
        LoadError: two keys of a tied tensor hold different values, and the model can keep only one.
    """
    with Reader(listing, buffer_bytes=BLOCK_BYTES) as reader:
        for key, loaded in duplicates.items():
            hashes = {
                content_hash(reader.read_whole(listing.tensors[name])) for name in (key, loaded)
            }
            if len(hashes) > 1:
                raise LoadError(
                    f"{key} and {loaded} are one tensor in the model, and hold different values in "
                    "the source: untie them in the model, or remove the key that is wrong"
                )


def _feed(
    path: str,
    start: int,
    stop: int,
    take: Callable[[memoryview], object],
    check: Callable[[], None],
) -> None:
    file: OpenFile = storage_for(path).open(path)
    block = memoryview(bytearray(BLOCK_BYTES))
    try:
        for low in range(start, stop, BLOCK_BYTES):
            check()
            part = block[: min(BLOCK_BYTES, stop - low)]
            read_exactly(file, path, [part], low)
            take(part)
    finally:
        file.close()


def compare_replicas(targets: list[ModelTensor], ranks: Ranks) -> int:
    """Compare by hash what several ranks hold alike; the number of tensors compared. All ranks.

    Raises:
        LoadError: replicas differ; names the tensors and the ranks.
    """

    def hashes() -> dict[tuple[str, tuple[Piece, ...]], str]:
        return {(t.name, t.pieces): content_hash(t.local()) for t in targets if t.pieces}

    tables = ranks.together("hashing the replicas", hashes)
    seen: dict[tuple[str, tuple[Piece, ...]], dict[str, list[int]]] = {}
    for rank, table in zip(ranks.ranks, tables, strict=True):
        for key, value in table.items():
            seen.setdefault(key, {}).setdefault(value, []).append(rank)
    different = {key[0]: groups for key, groups in seen.items() if len(groups) > 1}
    if different:
        shown = [
            f"{name}: " + " differs from ".join(f"ranks {held}" for held in groups.values())
            for name, groups in list(different.items())[:10]
        ]
        raise LoadError(
            f"{len(different)} tensors differ between replicas:\n  " + "\n  ".join(shown)
        )
    return sum(1 for groups in seen.values() if sum(map(len, groups.values())) > 1)


def count_nonfinite(targets: list[ModelTensor], ranks: Ranks) -> dict[str, int]:
    """NaN and infinite values by tensor, over all ranks (replicas count once a rank). All ranks."""

    def count() -> dict[str, int]:
        found: dict[str, int] = {}
        for target in targets:
            local = target.local()
            if local.is_floating_point() and local.dtype.itemsize > 1 and local.numel():
                rows = local.reshape(-1).split(BLOCK_BYTES)
                bad = sum(int((~row.isfinite()).sum()) for row in rows)
                if bad:
                    found[target.name] = bad
        return found

    total: dict[str, int] = {}
    for table in ranks.together("looking for NaN", count):
        for name, bad in table.items():
            total[name] = max(total.get(name, 0), bad)
    return total
