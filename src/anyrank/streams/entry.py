"""The door of the room: what `ElasticLoader.from_shards` and `from_iterable` open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from anyrank.data.fetch import OwnOrder
from anyrank.streams.iterables import parts_of
from anyrank.streams.position import StreamPosition
from anyrank.streams.readers import StreamReader
from anyrank.streams.shards import Shards
from anyrank.streams.sources import Stream


class OpenStream(Stream):
    """A stream as a loader takes it."""

    position_class = StreamPosition

    def by_microbatch(self, seed: int, collate_fn: Callable[[list[Any]], Any] | None) -> Any:
        return StreamReader(self, seed, collate_fn)


def open_shards(
    shards: Sequence[Any],
    read: Callable[..., Iterable[Any]],
    lengths: Sequence[int] | None,
    transform: Any,
    window: int | None,
) -> OwnOrder:
    """The dataset of `ElasticLoader.from_shards`; raises as that."""
    if lengths is None:
        return OpenStream(shards, read, transform, window)
    for name, value in (("transform", transform), ("window", window)):
        if value is not None:
            raise ValueError(
                f"{name}= with lengths=: the order of known lengths is planned, which knows no "
                f"{name}: remove one of them"
            )
    return Shards(shards, read, lengths)


def open_iterable(dataset: Any, transform: Any, window: int | None, num_workers: Any) -> OwnOrder:
    """The dataset of `ElasticLoader.from_iterable`; raises as that."""
    names, read = parts_of(dataset, num_workers)
    return OpenStream(names, read, transform, window)
