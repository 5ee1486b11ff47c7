"""What `ElasticLoader.from_shards` and `from_iterable` call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from anyrank.training.data.fetch import OwnOrder
from anyrank.training.streams.iterables import parts_of
from anyrank.training.streams.position import StreamPosition
from anyrank.training.streams.readers import StreamReader
from anyrank.training.streams.shards import Shards
from anyrank.training.streams.sources import Stream


class OpenStream(Stream):
    """A stream as a loader takes it."""

    position_class = StreamPosition
    can_flow = True

    def by_microbatch(self, seed: int, collate_fn: Callable[[list[Any]], Any] | None) -> Any:
        return StreamReader(self, seed, collate_fn)


def open_shards(
    shards: Sequence[Any],
    read: Callable[..., Iterable[Any]],
    lengths: Sequence[int] | None,
    transform: Any,
    window: int | None,
    options: Mapping[str, Any],
) -> OwnOrder:
    """The dataset of `ElasticLoader.from_shards`, which has these other options; raises as that."""
    _check_options(options)
    if lengths is None:
        _check_tail(options)
        return OpenStream(shards, read, transform, window)
    for name, value in (("transform", transform), ("window", window)):
        if value is not None:
            raise ValueError(
                f"{name}= with lengths=: the order of known lengths is planned, which knows no "
                f"{name}: remove one of them"
            )
    return Shards(shards, read, lengths)


def open_iterable(
    dataset: Any, transform: Any, window: int | None, options: Mapping[str, Any]
) -> OwnOrder:
    """The dataset of `ElasticLoader.from_iterable`, which has these other options."""
    _check_options(options)
    _check_tail(options)
    names, read = parts_of(dataset, options.get("num_workers", 0))
    return OpenStream(names, read, transform, window)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what needs an order that does not depend on the sizes of steps."""
    if options.get("on_batch_change", "error") != "error":
        raise ValueError(
            f"on_batch_change={options['on_batch_change']!r}: a step has rows of as many lanes as "
            "microbatches, so a run goes on with its global_batch alone: remove it"
        )


def _check_tail(options: Mapping[str, Any]) -> None:
    """Refuse to drop what does not fill a step: there is no such rest in lanes."""
    if options.get("tail") == "drop":
        raise ValueError(
            "tail='drop': every row of a stream is in a step, and an epoch's last ones are "
            "shorter: remove it, or give the lengths of the shards"
        )
