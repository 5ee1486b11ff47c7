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
    """Streams with the position and the reader that ElasticLoader uses."""

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
    """Open the dataset of `ElasticLoader.from_shards`; raises the errors that it documents."""
    _check_options(options, is_planned=lengths is not None)
    check_bool(endless=endless)
    if lengths is None:
        return OpenStreams({"": Stream(shards, read, transform, window)}, endless=endless)
    options_given = {"transform": transform, "window": window, "endless": endless or None}
    for name, value in options_given.items():
        if value is not None:
            raise ValueError(
                f"{name}= cannot be combined with lengths=, because the order of known lengths is "
                f"planned without {name}. Remove one of them."
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
    check_bool(endless=endless)
    check_choice("until", until, get_args(Until))
    if until != "first" and (mix is None or endless):
        why = "there are no epochs" if endless else "there is one dataset, and no mix="
        raise ValueError(f"until={until!r} says when a mixture's epoch ends, but {why}. Remove it.")
    if mix is None:
        if isinstance(dataset, Mapping):
            raise ValueError(
                "a dict of datasets is a mixture: pass mix=, a weight for each name. For one split "
                'of a dataset pass only that, dataset["train"]'
            )
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
    """Return the stream of an `ElasticLoader` with a dataset and a transform."""
    _check_options({"tail": tail, "on_batch_change": on_batch_change})
    if weights is not None:
        raise ValueError(
            "weights= cannot be combined with transform=, which reads samples once each. Remove "
            "one."
        )
    return OpenStreams({"": MapStyleStream(dataset, transform)})


def _check_mix(datasets: Any, mix: Any) -> Mapping[str, Any]:
    """Return the datasets of a mixture; raise TypeError and ValueError for wrong arguments."""
    if not isinstance(mix, Mapping) or not isinstance(datasets, Mapping):
        raise TypeError(
            'mix= needs a dict of datasets: from_iterable({"code": a, "text": b}, '
            'mix={"code": 1, "text": 3})'
        )
    if {*datasets} != {*mix} or not all(isinstance(name, str) for name in mix):
        raise ValueError(
            f"mix= has {', '.join(map(str, mix))}, but the datasets are "
            f"{', '.join(map(str, datasets))}. Pass a weight for each of them, by its name."
        )
    weights = list(mix.values())
    if any(isinstance(w, bool) or not isinstance(w, int | float) for w in weights):
        raise TypeError(f"mix={mix}: must have a number for each dataset")
    if not all(0 <= w < float("inf") for w in weights) or not any(weights):
        raise ValueError(f"mix={mix}: weights must be at least 0, and one must be positive")
    return datasets


def _check_options(options: Mapping[str, Any], is_planned: bool = False) -> None:
    """Check that no option needs an order that is independent of the step size.

    Args:
        options: options of the loader.
        is_planned: whether the order is known, so that the samples that fill no step are too.
    """
    if options.get("on_batch_change", "error") != "error":
        raise ValueError(
            f"on_batch_change={options['on_batch_change']!r}: a stream cannot be resumed with a "
            "different global_batch, because its lanes depend on it. Remove on_batch_change=."
        )
    if options.get("tail") == "drop" and not is_planned:
        raise ValueError(
            "tail='drop' is not supported for streams, whose every row is in a step, and whose "
            "last steps of an epoch may be short. Remove it, pass the lengths of the shards, or "
            "with buckets use anyrank.Buckets(key, drop_last=True)."
        )
