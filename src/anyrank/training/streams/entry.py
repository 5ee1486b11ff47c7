"""The functions that `ElasticLoader` calls for shards, iterables and transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from anyrank.checks import check_bool, check_choice
from anyrank.training.data.fetch import OwnOrder
from anyrank.training.streams.deal import Until
from anyrank.training.streams.iterables import open_parts
from anyrank.training.streams.map_style import MapStyleStream
from anyrank.training.streams.position import StreamPosition
from anyrank.training.streams.shards import Shards
from anyrank.training.streams.sources import Stream, Streams
from anyrank.training.streams.workers import BlockReader


class OpenStreams(Streams):
    """Streams as a loader takes them."""

    position_class = StreamPosition

    def by_microbatch(self, seed: int, collate_fn: Callable[[list[Any]], Any] | None) -> Any:
        return BlockReader(self, seed, collate_fn)


def open_shards(
    shards: Sequence[Any],
    read: Callable[..., Iterable[Any]],
    lengths: Sequence[int] | None,
    transform: Any,
    window: int | None,
    endless: bool,
    options: Mapping[str, Any],
) -> OwnOrder:
    """Open the dataset of `ElasticLoader.from_shards` with its options; raises the same errors."""
    _check_options(options)
    check_bool(endless=endless)
    if lengths is None:
        _check_tail(options)
        return OpenStreams({"": Stream(shards, read, transform, window)}, endless=endless)
    options_given = {"transform": transform, "window": window, "endless": endless or None}
    for name, value in options_given.items():
        if value is not None:
            raise ValueError(
                f"{name}= with lengths=: the order of known lengths is planned, which knows no "
                f"{name}: remove one of them"
            )
    return Shards(shards, read, lengths)


def open_iterable(
    dataset: Any,
    transform: Any,
    window: int | None,
    endless: bool,
    mix: Mapping[str, float] | None,
    until: Until,
    options: Mapping[str, Any],
) -> OwnOrder:
    """Open the dataset of `ElasticLoader.from_iterable` with its options."""
    _check_options(options)
    _check_tail(options)
    check_bool(endless=endless)
    check_choice("until", until, get_args(Until))
    if until != "first" and (mix is None or endless):
        why = "there are no epochs" if endless else "there is one dataset, and no mix="
        raise ValueError(f"until={until!r} says when a mixture's epoch ends, but {why}: remove it")
    if mix is None:
        if isinstance(dataset, Mapping):
            raise ValueError("a dict of datasets is a mixture: give mix=, a weight for each name")
        return OpenStreams({"": open_parts(dataset, transform, window, endless)}, endless=endless)
    datasets = _check_mix(dataset, mix)
    sources = {
        name: open_parts(part, transform, window, endless) for name, part in datasets.items()
    }
    weights = {name: float(mix[name]) for name in datasets}
    return OpenStreams(sources, endless=endless, mix=weights, until=until)


def open_map_style(
    dataset: Any, transform: Any, weights: Any, tail: str, on_batch_change: str
) -> OwnOrder:
    """The dataset of an `ElasticLoader` with a transform, whose samples are to be seen."""
    options = {"tail": tail, "on_batch_change": on_batch_change}
    _check_options(options)
    _check_tail(options)
    if weights is not None:
        raise ValueError("weights= with transform=: samples are read once each: remove one of them")
    return OpenStreams({"": MapStyleStream(dataset, transform)})


def _check_mix(datasets: Any, mix: Any) -> Mapping[str, Any]:
    """Return the datasets of a mixture; raise TypeError and ValueError for wrong arguments."""
    if not isinstance(mix, Mapping) or not isinstance(datasets, Mapping):
        raise TypeError(
            'mix= is of a dict of datasets: from_iterable({"code": a, "text": b}, '
            'mix={"code": 1, "text": 3})'
        )
    if {*datasets} != {*mix} or not all(isinstance(name, str) for name in mix):
        raise ValueError(
            f"mix has {', '.join(map(str, mix))}, the datasets are "
            f"{', '.join(map(str, datasets))}: give each of them a weight, by its name"
        )
    weights = list(mix.values())
    if any(isinstance(w, bool) or not isinstance(w, int | float) for w in weights):
        raise TypeError(f"mix={mix}: give a number for each dataset")
    if not all(0 <= w < float("inf") for w in weights) or not any(weights):
        raise ValueError(f"mix={mix}: give weights of at least 0, one of them more")
    return datasets


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that need an order which does not depend on the sizes of steps."""
    if options.get("on_batch_change", "error") != "error":
        raise ValueError(
            f"on_batch_change={options['on_batch_change']!r}: a step has rows of as many lanes as "
            "microbatches, so a run only continues with its own global_batch: remove it"
        )


def _check_tail(options: Mapping[str, Any]) -> None:
    """Refuse to drop samples that do not fill a step: lanes leave no such rest."""
    if options.get("tail") == "drop":
        raise ValueError(
            "tail='drop': every row of a stream is in a step, and an epoch's last ones are "
            "shorter: remove it, give the lengths of the shards, or with buckets "
            "anyrank.Buckets(key, drop_last=True)"
        )
