"""The contents of a source: its files and its tensors, known from headers only."""

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
    """A tensor that is computed from other tensors of its listing while it is read.

    Readers treat its values as if they were the bytes of a file.
    """

    @property
    def method(self) -> str:
        """How it is computed, in one word for reports."""
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
        """The number of bytes stored for it."""
        ...

    def with_file_offset(self, base: int) -> Computed:
        """Return the tensor for a listing whose files start `base` later."""
        ...

    def open(self, path: str, fetch: Fetch) -> Any:
        """Open its values as if they were a file; returns an `OpenFile`."""
        ...


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file as it was when its header was read; a reader raises an error if it has changed.

    Attributes:
        path: path or URL; for a tensor in memory, its key.
        size: bytes.
        version: modification time in ns, or an object store's tag.
        in_memory: the bytes are a tensor's, not a file's.
        location: machine and inode of a local file. The same file on two machines counts as two
            copies.
        fingerprint: digest of a local file's ends and of a block of each of its tensors, by which
            copies on other machines are recognized.
        blocks: where these blocks begin.
        tensor: the tensor, for one in memory, on the rank that has it.
        computed: how to compute the tensor, if it is computed from others of its listing.
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
        """True if reads of it go through the page cache, so that short reads are cheap."""
        return "://" not in self.path and self.computed is None and not self.in_memory

    def with_file_offset(self, base: int) -> FileInfo:
        """Return the file for a listing whose files start `base` later."""
        if self.computed is None or not base:
            return self
        return replace(self, computed=self.computed.with_file_offset(base))


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum that the format itself stores for a range of bytes, in hex.

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


Wanted: TypeAlias = "tuple[StoredTensor, tuple[Piece, ...]]"  # a tensor, and its pieces to read


class Locator(Protocol):
    """Finds the bytes of a step of a run, by the indexes of the ranks that saved it.

    Its indices of files are those in a listing of this step only.
    """

    def is_listed(self, stored: StoredTensor) -> bool:
        """Return True if a tensor is a whole tensor of the step: not a part, and not several
        joined.
        """
        ...

    def check_same(self) -> None:
        """Raise LoadError if the folder holds a different step here than where it was listed."""
        ...

    def locate(
        self, wanted: Sequence[Wanted], threads: int
    ) -> tuple[list[StoredTensor], tuple[FileInfo, ...], dict[int, str]]:
        """Return the tensors with the positions of their bytes, and the step's files and `sums`."""
        ...


@dataclass(frozen=True)
class Listing:
    """The tensors of a source.

    Attributes:
        format: name of the format, for reports.
        files: the files that `Chunk.file` indexes.
        tensors: by key.
        metadata: free text that the format carries.
        skipped: files and keys that were skipped -> the reason.
        checksums: checksums of byte ranges, if the format has them.
        extras: extra state of modules by key, as a tuple of the value if it is plain data, or None.
        sums: index of a file -> path of the checksums of its blocks, if it has some.
        unreadable: key of a tensor among the weights whose bytes are not its values (sparse,
            quantized, nested, arrays) -> its kind; listed in `skipped` too.
        tables: prefixes of whole keys that name a table of the checkpoint that may hold weights,
            and not a module, if the format distinguishes them.
        table: the table that the tensors belong to; their keys omit its name.
        beside: tensors of other tables, by their whole keys; `tensors` does not list them.
        unread_beside: like `unreadable`, for other tables, by whole keys.
        quantization: `quantization_config` of the config.json beside the weights, until a dialect
            has put weights in place of the quantized numbers.
        adapters: index of a file -> the adapter_config.json beside it, if there is one.
        locators: index of the first file of a step of a run -> what finds its bytes, if its tensors
            are listed only by their shapes (`sources/locate.py`).
        is_live: whether these are the tensors of a model in memory, which has no files.
        is_run: whether this is a step of a run, which has a model's tensors as they were.
        is_file_named: whether the keys are always those that a library uses in files, and never the
            names of its live model.
        states_table: whether the format states which table holds the weights.
        has_companions: whether a configuration and a tokenizer may be beside the files.
    """

    format: str
    files: tuple[FileInfo, ...]
    tensors: dict[str, StoredTensor]
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    skipped: dict[str, str] = field(default_factory=dict[str, str])
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
    is_live: bool = False
    is_run: bool = False
    is_file_named: bool = False
    states_table: bool = False
    has_companions: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; tied tensors count once."""
        tied = ties_of(self.tensors)
        return sum(stored.nbytes for name, stored in self.tensors.items() if name not in tied)

    @property
    def skipped_texts(self) -> list[str]:
        """Texts about what was skipped, for reports and messages."""
        return [f"{key}: {what}" for key, what in self.skipped.items()]

    def stored_bytes(self, stored: StoredTensor, numel: int) -> int:
        """Estimate how many bytes of the files hold `numel` elements of one of its tensors."""
        computed = self.files[stored.chunks[0].file].computed if stored.chunks else None
        if computed is None:
            return numel * stored.dtype.itemsize
        return numel * computed.nbytes // computed.numel

    def kind_of(self, stored: StoredTensor) -> str:
        """Return how the values of a tensor are stored: a dtype, or a quantization method."""
        computed = self.files[stored.chunks[0].file].computed if stored.chunks else None
        return dtype_name(stored.dtype) if computed is None else computed.method

    def names_at(self, file: int, start: int, stop: int) -> str:
        """Name the tensors that have bytes in a range of a file, as the start of a message."""
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
        """Return the listing without the tensors of a source in memory, so that it can be sent."""
        return replace(self, files=tuple(replace(info, tensor=None) for info in self.files))

    def with_tensors(self, tensors: dict[str, StoredTensor]) -> Listing:
        """Return the listing with the same files and different tensors: other names or views."""
        return replace(self, tensors=tensors)


@dataclass(slots=True)
class TensorFill:
    """A tensor to fill, and the bytes that fill it.

    Attributes:
        target: the tensor, and this rank's part of it.
        stored: where its bytes are.
        local: this rank's memory, with the target's local shape.
        listing: the listing whose files `stored` counts.
        index: position in the list to which the ranks' `Coordinates` refer, if they communicate.
    """

    target: ShardedTensor
    stored: StoredTensor
    local: torch.Tensor
    listing: Listing
    index: int = 0


def ties_of(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Map tensors that share the bytes of an earlier tensor to the name of that one."""
    tied: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, stored in tensors.items():
        content = (stored.shape, stored.dtype, stored.chunks)
        if stored.nbytes and (owner := first.setdefault(content, name)) != name:
            tied[name] = owner
    return tied


NOTHING = Listing("nothing", (), {})
NOT_A_TENSOR = "not a tensor"  # a reason in `Listing.skipped`, for a value among the weights
ABSENT = "None"  # the same for None, which a layer without a bias has in its place
EXTRA_STATE = "_extra_state"  # nn.Module.state_dict stores the result of get_extra_state here
