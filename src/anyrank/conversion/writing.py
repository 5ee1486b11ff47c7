"""An output's files, filled, made durable, and read again: every byte is compared by its digest."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TypeVar

import torch

from anyrank.conversion.content import Content
from anyrank.errors import CheckpointError
from anyrank.files import placed_file
from anyrank.files.output import FileSpan, OutputFile
from anyrank.files.placed_file import PlacedFile
from anyrank.files.segments import memory_of
from anyrank.files.storage import join_path, read_exactly
from anyrank.files.store import WritableStorage, storing
from anyrank.files.threads import spread

WINDOW_BYTES = 1 << 20  # filled, hashed and written while it is in a processor's cache
ALIGNMENT = 16  # bytes, a multiple of any element's
THREADS = 2

T = TypeVar("T")


@dataclass(slots=True)
class _Window:
    """Consecutive bytes of a file, which are written in one call.

    Attributes:
        start, stop: byte offsets in the file.
        fixed: offsets and bytes of what is known already.
        spans: what fills the rest.
    """

    start: int
    stop: int
    fixed: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    spans: list[FileSpan] = field(default_factory=list[FileSpan])

    @property
    def base(self) -> int:
        """The file's offset at the beginning of the memory, in which elements are aligned so."""
        return self.start - self.start % ALIGNMENT


@dataclass(frozen=True, slots=True)
class Sealed:
    """A window's bytes and their xxh3-64, to compare the file with."""

    start: int
    nbytes: int
    digest: bytes


def _windows_of(file: OutputFile) -> Iterator[_Window]:
    """The file from start to end, which its parts cover."""
    fixed = (
        (start + low, data[low : low + WINDOW_BYTES])
        for start, data in sorted(file.fixed)
        for low in range(0, len(data), WINDOW_BYTES)
    )
    spans = (
        (part.start, part) for span in file.spans if span.nbytes for part in span.cut(WINDOW_BYTES)
    )
    parts: Iterator[tuple[int, bytes | FileSpan]] = heapq.merge(fixed, spans, key=itemgetter(0))
    window = _Window(0, 0)
    for start, part in parts:
        stop = start + (len(part) if isinstance(part, bytes) else part.nbytes)
        if stop - window.start > WINDOW_BYTES:
            yield window
            window = _Window(start, stop)
        window.stop = stop
        if isinstance(part, bytes):
            window.fixed.append((start, part))
        else:
            window.spans.append(part)
    if window.stop > window.start:
        yield window


class Writer:
    """Writes files of an output.

    Args:
        store: where to.
        folder: a folder that is there.
        content: what fills the spans.
    """

    def __init__(self, store: WritableStorage, folder: str, content: Content) -> None:
        self.store, self.folder, self.content = store, folder, content

    def write(self, file: OutputFile) -> None:
        """Write one file, durably, and compare it with what was to be written.

        Raises:
            LoadError: the source cannot be read.
            CheckpointError: the file cannot be written, or holds other bytes.
        """
        file.check_cover()
        path = join_path(self.folder, file.name)
        with storing(path):
            placed = placed_file.create(self.store, path, file.size)
        try:
            sealed = self._fill(placed, path, file)
        except BaseException:
            placed.abandon()
            raise
        with finishing(placed, path):
            compare(self.store, path, sealed)

    def _fill(self, placed: PlacedFile, path: str, file: OutputFile) -> list[Sealed]:
        sealed: list[Sealed] = []
        lock = threading.Lock()

        def work(memory: torch.Tensor, window: _Window) -> None:
            data = self._bytes(window, memory)  # of `memory`, which outlives it
            seal = Sealed(window.start, len(data), _digest(data))
            with storing(path):
                placed.write(window.start, data)
            with lock:
                sealed.append(seal)

        _run_all(_windows_of(file), work, 1 if placed.in_order else THREADS)
        return sealed

    def _bytes(self, window: _Window, memory: torch.Tensor) -> memoryview:
        data = memory_of(memory)
        for start, known in window.fixed:
            data[start - window.base :][: len(known)] = known
        pieces: list[tuple[FileSpan, torch.Tensor]] = []
        for span in window.spans:
            part = memory[span.start - window.base :][: span.nbytes].view(span.tensor.dtype)
            pieces.append((span, part.view(span.box.sizes)))
        self.content.fill(pieces)
        return data[window.start - window.base : window.stop - window.base]


@contextmanager
def finishing(placed: PlacedFile, path: str) -> Generator[None, None, None]:
    """Make a file durable while the block reads it again: the disk and a core are busy then.

    An object can be read once it is complete: it is finished before the block.

    Raises:
        CheckpointError: the storage has refused it.
    """
    if placed.in_order:
        with storing(path):
            placed.finish()
        yield
        return
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(placed.finish)
        yield
        with storing(path):
            finished.result()


def _run_all(
    items: Iterable[T], work: Callable[[torch.Tensor, T], None], threads: int = THREADS
) -> None:
    """Run `work` on each item, with a window's memory for it, on `threads` threads."""
    size = WINDOW_BYTES + ALIGNMENT
    memories = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(threads)]
    spread(items, [partial(work, memory) for memory in memories])


def compare(store: WritableStorage, path: str, sealed: Sequence[Sealed]) -> None:
    """Read a file again, and compare it with what was to be written.

    Raises:
        CheckpointError: bytes differ.
        LoadError: it cannot be read.
    """
    with closing(store.open(path)) as file:

        def work(memory: torch.Tensor, seal: Sealed) -> None:
            data = memory_of(memory)[: seal.nbytes]
            read_exactly(file, path, [data], seal.start)
            if _digest(data) != seal.digest:
                raise CheckpointError(
                    f"{path}: bytes {seal.start} to {seal.start + seal.nbytes} are not those that "
                    "were written: the disk or the memory of this machine is damaged"
                )

        _run_all(sorted(sealed, key=lambda seal: seal.start), work)


def _digest(data: memoryview) -> bytes:
    import xxhash  # only files that are written or verified need it

    return xxhash.xxh3_64_digest(data)
