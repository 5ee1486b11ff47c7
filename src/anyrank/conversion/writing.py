"""An output's files, filled, made durable, and read again: every byte is compared by its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
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
THREADS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Window:
    """A byte range that is written in one call.

    Attributes:
        start: byte offset in the file.
        fixed: the bytes, where they are known already.
        spans: what fills it, without holes.
    """

    start: int
    fixed: bytes = b""
    spans: tuple[FileSpan, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.fixed) or self.spans[-1].stop - self.start


@dataclass(frozen=True, slots=True)
class Sealed:
    """A window's bytes and their xxh3-64, to compare the file with."""

    start: int
    nbytes: int
    digest: bytes


def _windows_of(file: OutputFile) -> Iterator[_Window]:
    """The file from start to end."""
    parts = [
        _Window(start + low, fixed[low : low + WINDOW_BYTES])
        for start, fixed in file.fixed
        for low in range(0, len(fixed), WINDOW_BYTES)
    ]
    parts += [_Window(span.start, b"", (span,)) for span in file.spans if span.nbytes]
    parts.sort(key=lambda window: window.start)
    waiting: list[FileSpan] = []
    for part in parts:
        for span in (small for s in part.spans for small in s.cut(WINDOW_BYTES)):
            if waiting and not _joins(waiting, span):
                yield _Window(waiting[0].start, b"", tuple(waiting))
                waiting = []
            waiting.append(span)
        if part.fixed:
            if waiting:
                yield _Window(waiting[0].start, b"", tuple(waiting))
                waiting = []
            yield part
    if waiting:
        yield _Window(waiting[0].start, b"", tuple(waiting))


def _joins(waiting: Sequence[FileSpan], span: FileSpan) -> bool:
    """Whether a span goes into the same window: no hole, not too long, and aligned in it."""
    first = waiting[0].start
    short = span.stop - first <= WINDOW_BYTES
    return short and (span.start - first) % span.tensor.dtype.itemsize == 0


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
        if window.fixed:
            return memoryview(window.fixed)
        pieces: list[tuple[FileSpan, torch.Tensor]] = []
        for span in window.spans:
            low = span.start - window.start
            part = memory[low : low + span.nbytes].view(span.tensor.dtype)
            pieces.append((span, part.view(span.box.sizes)))
        self.content.fill(pieces)
        return memory_of(memory)[: window.nbytes]


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
    memories = [torch.empty(WINDOW_BYTES, dtype=torch.uint8, device="cpu") for _ in range(threads)]
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
