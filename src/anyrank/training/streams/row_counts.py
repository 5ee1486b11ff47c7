"""`anyrank.row_counts`: the lengths of shards that are files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from anyrank.checks import check_type

PARQUET = (".parquet", ".pq")
LINES = (".jsonl", ".ndjson")


def row_counts(
    paths: Iterable[str | os.PathLike[str]], *, kept_in: str | os.PathLike[str] | None = None
) -> list[int]:
    """Count the rows of files, for `ElasticLoader.from_shards(lengths=)`.

    For parquet files only the footers are read (needs pyarrow); files of JSON lines are read once
    from end to end (0.4 GB/s), without empty lines. Does not communicate: each rank may call it, or
    only one of them.

    Args:
        paths: paths of files that end in .parquet, .pq, .jsonl or .ndjson.
        kept_in: a file, for example in the run's folder, that caches the counts: a file of the same
            size and time is not counted again.

    Raises:
        ValueError: a file has an unknown ending.
        OSError: a file does not exist.

    Example::

        with open("a.jsonl", "w") as lines:
            lines.write('{"x": 1}\\n{"x": 2}\\n')
        assert anyrank.row_counts(["a.jsonl"]) == [2]
    """
    check_type("paths", paths, list if isinstance(paths, str) else Iterable, "a list of paths")
    if kept_in is not None:
        check_type("kept_in", kept_in, (str, os.PathLike), "a path")
    known: dict[str, Any] = {}
    if kept_in is not None and Path(kept_in).exists():
        with suppress(ValueError, TypeError):  # a corrupt entry is counted again
            known |= json.loads(Path(kept_in).read_text(encoding="utf-8"))
    counts: list[int] = []
    for path in map(Path, paths):
        if path.suffix not in PARQUET + LINES:
            raise ValueError(
                f"paths= has {path}, but only rows of {', '.join(PARQUET + LINES)} can be counted. "
                "Pass lengths= yourself, or omit it: rows are then counted as they are read."
            )
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        match known.get(os.path.abspath(path)):
            case [size, time, int(rows)] if [size, time] == stamp:
                pass
            case _:
                try:
                    rows = _count(path)
                except Exception as error:
                    error.add_note(f"raised by row_counts, {path}")
                    raise
                known[os.path.abspath(path)] = [*stamp, rows]
        counts.append(rows)
    if kept_in is not None:
        partial = Path(f"{os.fspath(kept_in)}.{os.getpid()}.part")
        partial.write_text(json.dumps(known), encoding="utf-8")
        partial.replace(kept_in)  # at once: other ranks may read it
    return counts


def _count(path: Path) -> int:
    if path.suffix in LINES:
        with path.open("rb") as lines:
            return sum(1 for line in lines if not line.isspace())
    import pyarrow.parquet  # pyright: ignore

    return int(pyarrow.parquet.read_metadata(path).num_rows)  # pyright: ignore
