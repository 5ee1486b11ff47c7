"""Write the files of an output, durably."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter

import torch

from anyrank.files.block_sums import BlockDigester
from anyrank.files.progress import Progress
from anyrank.files.segments import memory_of
from anyrank.files.storage import LocalStorage, join_path, storing
from anyrank.tools.convert.content import StoredContent
from anyrank.tools.convert.output import FileSpan, OutputFile

WINDOW_BYTES = 1 << 20  # filled, hashed and written while in the processor's cache
ALIGNMENT = 16  # bytes, a multiple of any element size
THREADS = 2


@dataclass(slots=True)
class _Window:
    """Consecutive bytes of a file that are written in one call.

    Attributes:
        start, stop: byte offsets in the file.
        fixed: offsets and bytes of all that is already known.
        spans: the spans of the rest.
    """

    start: int
    stop: int
    fixed: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    spans: list[FileSpan] = field(default_factory=list[FileSpan])


def write(
    folder: str,
    file: OutputFile,
    content: StoredContent,
    progress: Progress,
    digester: BlockDigester | None = None,
) -> None:
    """Write one file, durably.

    Args:
        folder: an existing local folder.
        file: the plan of its bytes.
        content: reads the values of the spans.
        progress: counts the written bytes.
        digester: receives all bytes.

    Raises:
        LoadError: the source cannot be read.
        CheckpointError: the file cannot be written.
    """
    path = join_path(folder, file.name)
    with storing(path):
        sink = LocalStorage().create(path)
    try:
        for data in _filled(file, content):
            if digester is not None:
                digester.update(data)
            with storing(path):
                sink.write([data])
            progress.add(len(data))
    except BaseException:
        sink.abandon()
        raise
    with storing(path):
        sink.finish()


def _filled(file: OutputFile, content: StoredContent) -> Iterator[memoryview]:
    """Yield the bytes of a file from start to end; a few threads fill them in advance."""
    size = WINDOW_BYTES + ALIGNMENT
    free = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(THREADS + 1)]
    coming: deque[tuple[torch.Tensor, Future[memoryview]]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        for window in _windows_of(file):
            memory = free.pop()
            coming.append((memory, pool.submit(_fill, window, memory, content)))
            if not free:
                yield coming[0][1].result()
                free.append(coming.popleft()[0])
        for _, filled in coming:
            yield filled.result()


def _fill(window: _Window, memory: torch.Tensor, content: StoredContent) -> memoryview:
    """Fill a window, and return its bytes as a view of the memory."""
    # Elements have the alignment that they have in the file.
    base = window.start - window.start % ALIGNMENT
    data = memory_of(memory)
    for start, known in window.fixed:
        data[start - base :][: len(known)] = known
    pieces: list[tuple[FileSpan, torch.Tensor]] = []
    for span in window.spans:
        part = memory[span.start - base :][: span.nbytes].view(span.tensor.dtype)
        pieces.append((span, part.view(span.box.sizes)))
    content.fill(pieces)
    return data[window.start - base : window.stop - base]


def _windows_of(file: OutputFile) -> Iterator[_Window]:
    """Yield the windows of a file from start to end."""
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
