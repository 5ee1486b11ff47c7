"""Datasets that divide themselves into shards, such as Hugging Face's IterableDataset.

How a stream of `datasets` treats its rows is read from its chain of steps, which it keeps under
private names (docs/dev/private-names.md). A step that treats each row by itself, such as `map`, is
done by shard. One that counts rows over the whole stream, such as `take`, is only correct in one
shard. One that mixes rows with its own generator, or has divided them already, is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from anyrank.checks import check_int
from anyrank.training.streams.sources import Stream

# Words in the names of rejected steps of a Hugging Face stream -> the reason, and the way out.
REFUSED = {
    "BufferShuffled": "shuffle() keeps rows in a buffer, which a resume cannot restore. Pass the "
    "dataset without that call; the loader shuffles its shards, and with window= its rows.",
    "Cycling": "interleave_datasets() mixes rows while it reads. Pass the datasets by name, "
    'from_iterable({"a": a, "b": b}, mix={"a": 1, "b": 3}).',
    "Step": "it takes only every n-th row. Pass the dataset without that call.",
}
DIVIDED = (
    "split_dataset_by_node() has already divided it among the ranks. Pass the dataset without that "
    "call; the loader divides it."
)
ENDLESS = (
    "repeat(None) repeats each shard without end, so shards after the first of a lane would never "
    "be read. Pass the dataset without that call, and pass endless=True."
)
# Steps that call no function of the user, so that nothing is drawn.
PLAIN = {"Arrow", "Rebatched", "SelectColumns", "Columns", "Formatted", "Skip", "Take"}
# Steps that call no user function and keep every row.
KEEPING = {*PLAIN, "Examples"} - {"Skip", "Take"}
COLUMNS = {"identity_func", "_rename_columns_fn"}  # of remove_columns and rename_column
WHOLE = "the whole stream"


class Parts:
    """Reads the shards of a dataset by their numbers.

    Args:
        dataset: dataset with `num_shards` and `shard(num_shards=, index=)`.
        num_shards: its number of shards.
    """

    def __init__(self, dataset: Any, num_shards: int) -> None:
        self.dataset, self.num_shards = dataset, num_shards

    def __call__(self, name: str) -> Iterator[Any]:
        return iter(self._part(name))

    def _part(self, name: str) -> Any:
        if name == WHOLE:
            return self.dataset
        return self.dataset.shard(num_shards=self.num_shards, index=int(name.split()[0]))


class SkippingParts(Parts):
    """Parts whose rows are skipped by the dataset. Only for datasets that draw no random numbers;
    otherwise skipped rows, or rows in a batch with others, would shift later draws.
    """

    def __call__(self, name: str, start: int = 0) -> Iterator[Any]:
        part = self._part(name)
        return iter(part.skip(start) if start else part)


def open_parts(dataset: Any, transform: Any, window: int | None, endless: bool) -> Stream:
    """Open the shards of a dataset.

    Raises:
        TypeError: the dataset cannot be divided into shards.
        ValueError: its rows cannot be read shard by shard, or its shards differ each time.
    """
    kind = type(dataset).__name__
    if not callable(getattr(dataset, "shard", None)) or not hasattr(dataset, "num_shards"):
        raise TypeError(
            f"dataset is a {kind}, which has no num_shards, or no shard(num_shards=, index=). Pass "
            "Hugging Face's IterableDataset or a class with both; for files and generators use "
            "ElasticLoader.from_shards(shards, read)."
        )
    chain = [*_chain_of(getattr(dataset, "_ex_iterable", None))]
    names = [*map(_name_of, chain)]
    for name in names:
        if why := next((text for word, text in REFUSED.items() if word in name), None):
            raise ValueError(f"this {kind} cannot be read shard by shard ({name}): {why}")
    if getattr(dataset, "_distributed", None) is not None:
        raise ValueError(f"this {kind} cannot be read shard by shard: {DIVIDED}")
    counts_rows = next(filter(None, map(_why_whole, names, chain)), None)
    repeats = any(getattr(step, "num_times", 1) is None for step in chain)
    if repeats and not counts_rows and not endless:
        raise ValueError(f"this {kind} cannot be read shard by shard: {ENDLESS}")
    resharded = dataset if counts_rows else _reshard(dataset, kind)
    shards = (
        [WHOLE]
        if counts_rows
        else [f"{n} of {resharded.num_shards}" for n in range(resharded.num_shards)]
    )
    draws = not names or not all(name in PLAIN for name in names)
    parts = Parts if draws or not hasattr(resharded, "skip") else SkippingParts
    known = _length_of(dataset, names)
    stream = Stream(shards, parts(resharded, len(shards)), transform, window, known)
    stream.fingerprint = re.sub(r" at 0x[0-9a-f]+", "", str([vars(s).get("kwargs") for s in chain]))
    if counts_rows:
        stream.note = (
            f"{counts_rows} counts rows over the whole stream, so it is one shard: every rank "
            "reads the whole stream, and a resume rereads the rows before its position"
        )
    return stream


def _reshard(dataset: Any, kind: str) -> Any:
    """Return the dataset with its actual number of shards.

    Raises:
        ValueError: its number of shards changes between calls.
    """
    twice = [dataset.reshard() if hasattr(dataset, "reshard") else dataset for _ in range(2)]
    counts = [check_int("num_shards", part.num_shards, 1) for part in twice]
    if len({*counts}) > 1:
        raise ValueError(
            f"this {kind} has {counts[0]} shards, but {counts[1]} when it is opened again, so a "
            "resume could not find the same rows. Pass a dataset of a fixed list of files."
        )
    return twice[0]


def _chain_of(step: Any) -> Iterator[Any]:
    """Yield the steps of a Hugging Face stream, from the last one on."""
    if step is not None:
        yield step
        inner = [vars(step).get("ex_iterable"), *vars(step).get("ex_iterables", ())]
        for source in inner:
            yield from _chain_of(source)


def _name_of(step: Any) -> str:
    """Return the kind of a step; "Columns" if it maps each row by a function of `datasets`."""
    name = type(step).__name__.partition("ExamplesIterable")[0] or "Examples"
    return "Columns" if name == "Mapped" and _own_function(step) in COLUMNS else name


def _own_function(step: Any) -> str:
    """Return the name of a step's function if it is one of `datasets`; else nothing.

    `remove_columns`, `rename_column`, `add_column`, `batch` and others call `map` with such a
    function.
    """
    function: Any = getattr(step, "function", None)
    function = getattr(function, "func", function)
    module = getattr(function, "__module__", None) or ""
    return function.__name__ if module.split(".")[0] == "datasets" else ""


def _why_whole(name: str, step: Any) -> str | None:
    """Return what a step does that is only correct for the whole stream; None if it is by row."""
    size, own_function = getattr(step, "batch_size", 1), _own_function(step)
    if own_function.startswith("_batch"):
        return "batch()"
    if own_function == "add_column_fn":
        return "add_column()"
    if name in ("Skip", "Take"):
        return f"{name.lower()}({step.n})"
    if name == "HorizontallyConcatenatedMultiSources":
        return "concatenate_datasets(axis=1)"
    if getattr(step, "with_indices", False):
        return f"{'filter' if name == 'Filtered' else 'map'}(with_indices=True)"
    if getattr(step, "drop_last_batch", False):
        return "a batched map(drop_last_batch=True)"
    if getattr(step, "batched", False) and (size is None or size <= 0):
        return "a map of one batch"
    return None


def _length_of(dataset: Any, names: list[str]) -> int | None:
    """Return the number of rows of a dataset if it is known and no step drops rows."""
    if hasattr(dataset, "__len__"):
        return len(dataset)
    splits = getattr(getattr(dataset, "info", None), "splits", None)
    if not splits or not names or not all(name in KEEPING for name in names):
        return None
    known: Any = splits.get(str(getattr(dataset, "split", "")))
    return getattr(known, "num_examples", None) or None
