"""Datasets that are cut into shards by themselves, as Hugging Face's IterableDataset."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from anyrank.checks import check_int

# Words in the names of steps in a Hugging Face stream that cannot be read by shards.
REFUSED = {
    "Shuffled": "shuffle(buffer_size=) keeps rows in a buffer, which a resume cannot give back",
    "Cycling": "shuffle(buffer_size=) or interleave_datasets mixes its shards while it reads them",
    "Step": "split_dataset_by_node has divided it among the ranks already",
}
# Steps of a Hugging Face stream that call no function of a user's, so that nothing is drawn.
PLAIN = {"Arrow", "Rebatched", "SelectColumns", "Formatted", "Skip", "Take"}


class Parts:
    """Reads the shards of a dataset by their numbers.

    Args:
        dataset: with `num_shards` and `shard(num_shards=, index=)`.
        num_shards: of it.
    """

    def __init__(self, dataset: Any, num_shards: int) -> None:
        self.dataset, self.num_shards = dataset, num_shards

    def __call__(self, name: str) -> Iterator[Any]:
        return _rows_of(self._part(name))

    def _part(self, name: str) -> Any:
        return self.dataset.shard(num_shards=self.num_shards, index=int(name.split()[0]))


class SkippingParts(Parts):
    """Parts whose rows are skipped by the dataset. For those that draw no random numbers: what is
    drawn for rows that are skipped, or in a batch with others, shifts what is drawn after them.
    """

    def __call__(self, name: str, start: int = 0) -> Iterator[Any]:
        part = self._part(name)
        return _rows_of(part.skip(start) if start else part)


def _rows_of(part: Any) -> Iterator[Any]:
    if hasattr(part, "iter"):
        # A plain iteration would give each worker of a DataLoader some shards of the part.
        return ({k: v[0] for k, v in batch.items()} for batch in part.iter(batch_size=1))
    return iter(part)


def parts_of(dataset: Any, num_workers: int) -> tuple[list[str], Parts]:
    """The names of a dataset's shards, and what reads them.

    Raises:
        TypeError: it cannot be cut into shards.
        ValueError: its rows cannot be read by shards, or its shards are not the same each time.
    """
    name = type(dataset).__name__
    if not callable(getattr(dataset, "shard", None)) or not hasattr(dataset, "num_shards"):
        raise TypeError(
            f"dataset is a {name}, which has no num_shards, or no shard(num_shards=, index=): give "
            "Hugging Face's IterableDataset or a class with both; for files and generators use "
            "ElasticLoader.from_shards(shards, read)"
        )
    steps = [*_steps_of(dataset.state_dict())] if hasattr(dataset, "state_dict") else []
    for step in steps:
        if why := next((text for word, text in REFUSED.items() if word in step), None):
            raise ValueError(
                f"this {name} cannot be read by shards ({step}): {why}. Give the dataset before "
                "that call: the loader divides it, and shuffles its shards, and with window= rows"
            )
    if num_workers and _knows_workers(dataset):
        raise ValueError(
            f"{name}.__iter__ asks for get_worker_info(), and would leave rows out, as each lane "
            "is read by one worker: let it give all rows of its shard, or give num_workers=0"
        )
    resharded = [dataset.reshard() if hasattr(dataset, "reshard") else dataset for _ in range(2)]
    counts = [check_int("num_shards", part.num_shards, 1) for part in resharded]
    if len({*counts}) > 1:
        raise ValueError(
            f"this {name} has {counts[0]} shards, and {counts[1]} when it is asked again: the same "
            "rows cannot be found after a resume; give a dataset of a fixed list of files"
        )
    draws = not steps or not all(step.startswith((*PLAIN,)) for step in steps)
    kind = Parts if draws or not hasattr(resharded[0], "skip") else SkippingParts
    return [f"{n} of {counts[0]}" for n in range(counts[0])], kind(resharded[0], counts[0])


def _steps_of(state: Any) -> Iterator[str]:
    """The steps of a Hugging Face stream, by their names in its state."""
    if isinstance(state, dict):
        for key, value in state.items():  # pyright: ignore[reportUnknownVariableType]
            if key == "type":
                yield str(value)  # pyright: ignore[reportUnknownArgumentType]
            yield from _steps_of(value)
    elif isinstance(state, list):
        for value in state:  # pyright: ignore[reportUnknownVariableType]
            yield from _steps_of(value)


def _knows_workers(dataset: Any) -> bool:
    """Whether the rows that a class gives depend on the worker, as far as its source tells."""
    if hasattr(dataset, "iter"):
        return False
    try:
        return "get_worker_info" in inspect.getsource(type(dataset).__iter__)
    except (OSError, TypeError, AttributeError):
        return False
