"""The contents of a source: its files and its tensors, known from headers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import torch

from anyrank.tensors.layout import Piece
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.spec import StoredTensor, dtype_name
from anyrank.wording import join_first

SHOWN = 3  # names in a message
Fetch = Callable[[StoredTensor, int, int], torch.Tensor]  # bytes [start, stop) of it, as uint8


class Computed(Protocol):
    """A tensor that is computed from others of its listing while it is read.

    Readers treat its values as if they were the bytes of a file.
    """

    @property
    def method(self) -> str:
        """The way it is computed, in a word for reports."""
        ...

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The tensors that are read for it; each lies row-major in one file."""
        ...

    @property
    def numel(self) -> int:
        """The number of its elements."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that are stored for it."""
        ...

    def with_file_offset(self, base: int) -> Computed:
        """Return the tensor for a listing whose files start `base` later."""
        ...

    def open(self, path: str, fetch: Fetch) -> Any:
        """Open its values as if they were a file; returns an `OpenFile`."""
        ...


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file as it was when its header was read; a reader that finds it changed refuses it.

    Attributes:
        path: path or URL; for a tensor in memory, its key.
        size: bytes.
        version: modification time in ns, or an object store's tag.
        in_memory: the bytes are a tensor's, not a file's.
        location: host and inode of a local file. The same file on two hosts counts as two copies.
        fingerprint: digest of a local file's ends, and of a block of each of its tensors, by which
            copies in other places are recognized.
        blocks: where these blocks begin.
        tensor: the tensor, for one in memory, on the rank that has it.
        computed: for a tensor computed from others of its listing, how.
    """

    path: str
    size: int
    version: str
    in_memory: bool = False
    location: str = ""
    fingerprint: str = ""
    blocks: tuple[int, ...] = ()
    tensor: torch.Tensor | None = field(default=None, compare=False, repr=False)
    computed: Computed | None = None

    @property
    def is_cached(self) -> bool:
        """Return whether the page cache holds what is read of it, so that short reads are cheap."""
        return "://" not in self.path and self.computed is None and not self.in_memory

    def with_file_offset(self, base: int) -> FileInfo:
        """Return the file for a listing whose files start `base` later."""
        if self.computed is None or not base:
            return self
        return replace(self, computed=self.computed.with_file_offset(base))


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


Wanted: TypeAlias = "tuple[StoredTensor, tuple[Piece, ...]]"  # a tensor, and what is read of it


class Locator(Protocol):
    """Finds the bytes of a step of a run, by the indexes of the ranks that saved it.

    It counts files and tensors as a listing of this step alone.
    """

    def is_listed(self, stored: StoredTensor) -> bool:
        """Return True if a tensor is one of the step's, and no part of one or several together."""
        ...

    def check_same(self) -> None:
        """Refuse a folder that holds another step here than where it was listed."""
        ...

    def locate(
        self, wanted: Sequence[Wanted], threads: int
    ) -> tuple[list[StoredTensor], tuple[FileInfo, ...], dict[int, str]]:
        """Return what is wanted with the places of its bytes, and the step's files and `sums`."""
        ...


@dataclass(frozen=True)
class Listing:
    """The tensors of a source.

    Attributes:
        format: name of the format, for reports.
        files: the files that `Chunk.file` indexes.
        tensors: by key.
        metadata: free text that the format carries.
        skipped: files and keys that were skipped, each with the reason.
        checksums: checksums of byte ranges, if the format has them.
        extras: extra state of modules by key, as a tuple of the value if it is plain data, or None.
        sums: index of a file -> path of the checksums of its blocks, where it has some.
        unreadable: key of a tensor among the weights whose bytes are not its values (sparse,
            quantized, nested, arrays) -> what it is; listed in `skipped` too.
        tables: prefixes of whole keys that name a table of the checkpoint which may hold weights,
            not a module, if the format tells them apart.
        table: the table that the tensors belong to, whose name their keys leave out.
        beside: tensors of other tables, by their whole keys; `tensors` does not list them.
        unread_beside: like `unreadable`, for other tables, by whole keys.
        quantization: `quantization_config` of the config.json beside the weights.
        adapters: index of a file -> the adapter_config.json beside it, if there is one.
        locators: index of the first file of a step of a run -> what finds its bytes, if its
            tensors are listed by their shapes alone (`sources/locate.py`).
    """

    format: str
    files: tuple[FileInfo, ...]
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    skipped: tuple[str, ...] = ()
    checksums: tuple[Checksum, ...] = ()
    sums: dict[int, str] = field(default_factory=dict[int, str])
    extras: dict[str, tuple[Any] | None] = field(default_factory=dict[str, tuple[Any] | None])
    unreadable: dict[str, str] = field(default_factory=dict[str, str])
    tables: frozenset[str] = frozenset()
    table: str = ""
    beside: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    unread_beside: dict[str, str] = field(default_factory=dict[str, str])
    quantization: dict[str, Any] = field(default_factory=dict[str, Any])
    adapters: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    locators: dict[int, Locator] = field(default_factory=dict[int, Locator])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; tied tensors count once."""
        tied = ties_of(self.tensors)
        return sum(stored.nbytes for name, stored in self.tensors.items() if name not in tied)

    def stored_bytes(self, stored: StoredTensor, numel: int) -> int:
        """Estimate how many bytes of the files hold `numel` elements of one of its tensors."""
        computed = self.files[stored.chunks[0].file].computed if stored.chunks else None
        if computed is None:
            return numel * stored.dtype.itemsize
        return numel * computed.nbytes // computed.numel

    def kind_of(self, stored: StoredTensor) -> str:
        """The form in which the values of a tensor are stored: a dtype, or a way of quantizing."""
        computed = self.files[stored.chunks[0].file].computed if stored.chunks else None
        return dtype_name(stored.dtype) if computed is None else computed.method

    def names_at(self, file: int, start: int, stop: int) -> str:
        """Name the tensors that have bytes in a range of a file, to begin a message."""
        names: dict[str, None] = {}
        for name, stored in self.tensors.items():
            for chunk in stored.chunks:
                if chunk.file == file and chunk.box.numel and chunk.offset < stop:
                    pairs = zip(chunk.box.sizes, chunk.strides, strict=True)
                    reach = sum((size - 1) * stride for size, stride in pairs) + 1
                    if chunk.offset + reach * stored.dtype.itemsize > start:
                        names[name] = None
        return f"{join_first(list(names), SHOWN)}: " if names else ""

    def without_memory(self) -> Listing:
        """Return the headers without the tensors of a source in memory, ready to be sent."""
        return replace(self, files=tuple(replace(info, tensor=None) for info in self.files))

    def with_tensors(self, tensors: dict[str, StoredTensor]) -> Listing:
        """Return the listing of these files with other names or views."""
        return replace(self, tensors=tensors)


@dataclass(slots=True)
class TensorFill:
    """A tensor that is to be filled, and the bytes that fill it.

    Attributes:
        target: the tensor, and this rank's part of it.
        stored: where its bytes are.
        local: this rank's memory, of the target's local shape.
        listing: the listing whose files `stored` counts.
        index: position in the list that the ranks' `Coordinates` count, where they exchange.
    """

    target: ShardedTensor
    stored: StoredTensor
    local: torch.Tensor
    listing: Listing
    index: int = 0


def ties_of(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Tensors that share the bytes of an earlier one -> the name of that one."""
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, stored in tensors.items():
        content = (stored.shape, stored.dtype, stored.chunks)
        if stored.nbytes and (owner := first.setdefault(content, name)) != name:
            tied[name] = owner
    return tied


NOTHING = Listing("nothing", (), {})
NOT_A_TENSOR = "not a tensor"  # a note of `Listing.skipped`, for a value among the weights
ABSENT = "None"  # the same for None, which a layer without a bias has in its place
EXTRA_STATE = "_extra_state"  # where nn.Module.state_dict puts what get_extra_state returns
