"""What a source holds: its files and its tensors, known from headers alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from anyrank.errors import LoadError
from anyrank.tensors.spec import StoredTensor


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file as it was when its header was read; a reader that finds it changed refuses it.

    Attributes:
        path: path or URL; for a tensor in memory, its key.
        size: bytes.
        version: modification time in ns, or an object store's tag.
        sha256: digest that the file's publisher gave, where one is known.
        in_memory: the bytes are a tensor's, not a file's.
    """

    path: str
    size: int
    version: str
    sha256: str | None = None
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum that the format itself keeps for a range of bytes, in hex.

    Attributes:
        file: index of the file in its listing.
        start, stop: the byte range.
        digest: 8 hex digits of a CRC-32.
        what: the range's name in errors.
    """

    file: int
    start: int
    stop: int
    digest: str
    what: str


@dataclass(frozen=True, slots=True)
class SumsFile:
    """Where the checksums of a file's blocks are: path, bytes, and the xxh3-64 of these, in hex."""

    path: str
    size: int
    digest: str


@dataclass(frozen=True)
class Listing:
    """The tensors of a source.

    Attributes:
        format: name of the format, for reports.
        files: what `Chunk.file` counts.
        tensors: by key.
        metadata: free text that the format carries.
        skipped: files and keys that were passed over by rule, each with the reason.
        checksums: of byte ranges, where the format has them.
        sums: index of a file -> where the checksums of its blocks are, in runs.
    """

    format: str
    files: tuple[FileInfo, ...]
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    skipped: tuple[str, ...] = ()
    checksums: tuple[Checksum, ...] = ()
    sums: dict[int, SumsFile] = field(default_factory=dict[int, SumsFile])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def with_tensors(self, tensors: dict[str, StoredTensor]) -> Listing:
        """The same files, other names or views."""
        return replace(self, tensors=tensors)


def join(format_name: str, listings: Iterable[Listing], skipped: Iterable[str] = ()) -> Listing:
    """One listing of several files.

    Raises:
        LoadError: two of them hold the same key.
    """
    files: list[FileInfo] = []
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    checksums: list[Checksum] = []
    sums: dict[int, SumsFile] = {}
    passed = list(skipped)
    for listing in listings:
        base = len(files)
        files += listing.files
        metadata.update(listing.metadata)
        passed += listing.skipped
        checksums += (replace(c, file=c.file + base) for c in listing.checksums)
        sums |= {base + number: one for number, one in listing.sums.items()}
        for key, stored in listing.tensors.items():
            if key in tensors:
                first = files[tensors[key].chunks[0].file].path if tensors[key].chunks else "?"
                raise LoadError(
                    f"{key} is in {first} and again in {listing.files[0].path}: "
                    "give only the files that belong together"
                )
            tensors[key] = stored.in_file(base)
    rest = (metadata, tuple(passed), tuple(checksums), sums)
    return Listing(format_name, tuple(files), tensors, *rest)
