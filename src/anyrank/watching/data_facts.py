"""What one rank's loader shows of the mistakes that `check` knows. No collectives, no sample read.

Accelerate's and transformers' loaders are known by the attributes that they document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset
from torch.utils.data.distributed import DistributedSampler

from anyrank.steps.loader import ElasticLoader

RANDOM = ("Random", "Jitter", "AutoAugment", "RandAugment", "TrivialAugment", "AugMix", "MixUp")


@dataclass(frozen=True)
class Layer:
    """Something that takes this rank's share of the samples."""

    kind: str
    ranks: int
    rank: int


@dataclass(frozen=True)
class LoaderFacts:
    """One rank's loader.

    Attributes:
        batch: samples of a batch on this rank; None where that is not known.
        layers: what shares the samples out, outermost first.
        seed: of a DistributedSampler that shuffles.
        samples: of the dataset, where it has a length.
        subset: digest of the rows of a Subset; empty for another dataset.
        repeated: samples that are given twice, so that all ranks have as many.
        augments: a random transform of the dataset.
    """

    batch: int | None
    layers: tuple[Layer, ...]
    seed: int | None
    samples: int | None
    subset: str
    repeated: int
    augments: str


def look_at(loader: Any) -> LoaderFacts | None:
    """The facts of a loader; None for none, and for anyrank's, which compares its own arguments."""
    if loader is None or isinstance(loader, ElasticLoader):
        return None
    dataset = getattr(loader, "dataset", None)
    chain = list(_chain(loader))
    samplers = [one for one in chain if isinstance(one, DistributedSampler)]
    return LoaderFacts(
        _batch_size(loader),
        tuple(layer for one in [*chain, *_datasets(dataset)] if (layer := _layer(one))),
        next((one.seed for one in samplers if one.shuffle), None),
        _length(dataset),
        _rows(dataset),
        _repeated(chain, loader),
        _augments(dataset),
    )


def _chain(loader: Any) -> Iterator[Any]:
    """The samplers of a loader, outermost first, and what each is around."""
    pending = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    seen: set[int] = set()
    while pending:
        one = pending.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        inner = getattr(one, "dataset", None)  # a DistributedSampler around a sampler
        around = [inner] if hasattr(inner, "__iter__") and not hasattr(inner, "__getitem__") else []
        pending[:0] = [getattr(one, "batch_sampler", None), getattr(one, "sampler", None), *around]


def _datasets(dataset: Any) -> Iterator[Any]:
    """A dataset, and those that it is around."""
    for _ in range(8):
        if dataset is None:
            return
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def _layer(one: Any) -> Layer | None:
    for ranks, rank in (("num_replicas", "rank"), ("num_processes", "process_index")):
        size, place = getattr(one, ranks, None), getattr(one, rank, None)
        if isinstance(size, int) and isinstance(place, int) and size > 1:
            return Layer(type(one).__name__, size, place)
    return None


def _batch_size(loader: Any) -> int | None:
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if not isinstance(size, int):
        return None
    split = getattr(sampler, "split_batches", False)  # Accelerate's: the ranks divide each batch
    return size // sampler.num_processes if split and sampler is not None else size


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _rows(dataset: Any) -> str:
    for one in _datasets(dataset):
        if isinstance(one, Subset):
            rows = repr([*map(int, one.indices)]).encode()
            return hashlib.blake2b(rows, digest_size=8).hexdigest()
    return ""


def _repeated(chain: list[Any], loader: Any) -> int:
    """How many samples the outermost sampler repeats."""
    for one in chain:
        if isinstance(one, DistributedSampler):
            samples = _length(one.dataset)
            return 0 if samples is None else max(0, one.total_size - samples)
        if getattr(one, "even_batches", False) and not getattr(one, "drop_last", False):
            samples, size = _length(getattr(loader, "dataset", None)), _batch_size(loader)
            if samples and size:
                step = size * one.num_processes
                return -samples % step
    return 0


def _augments(dataset: Any) -> str:
    """The class of a random transform, as torchvision's datasets hold them."""
    for one in _datasets(dataset):
        pending = [getattr(one, name, None) for name in ("transform", "transforms")]
        for _ in range(64):
            if not pending:
                break
            each = pending.pop()
            name = type(each).__name__
            if any(word in name for word in RANDOM):
                return name
            inner = getattr(each, "transforms", None)
            pending += [*inner] if isinstance(inner, (list, tuple)) else [inner] if inner else []
    return ""
