"""What one rank's loader shows of the mistakes that `check` knows. No sample is read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset
from torch.utils.data.distributed import DistributedSampler

from anyrank.steps.loader import ElasticLoader

MOST_TRANSFORMS = 256  # that are looked at: one may be within itself
RANDOM = ("Random", "Jitter", "AutoAugment", "RandAugment", "TrivialAugment", "AugMix", "MixUp")


@dataclass(frozen=True)
class LoaderFacts:
    """One rank's loader.

    Attributes:
        batch: samples of a batch on this rank; None where that is not known.
        share: of a DistributedSampler: of how many ranks, and which one's share it takes.
        seed: of a DistributedSampler that shuffles.
        samples: of the dataset, where it has a length.
        subset: digest of the rows of a Subset; empty for another dataset.
        repeated: samples that are given twice, so that all ranks have as many.
        augments: a random transform of the dataset.
    """

    batch: int | None
    share: tuple[int, int] | None
    seed: int | None
    samples: int | None
    subset: str
    repeated: int
    augments: str


def look_at(loader: Any) -> LoaderFacts | None:
    """The facts of a loader; None for none, and for anyrank's, which compares its own arguments."""
    if loader is None or isinstance(loader, ElasticLoader):
        return None
    dataset, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)
    samplers = getattr(loader, "sampler", None), getattr(batches, "sampler", None)
    sampler = next((s for s in samplers if isinstance(s, DistributedSampler)), None)
    samples = _length(dataset)
    return LoaderFacts(
        size if isinstance(size, int) else None,
        None if sampler is None else (sampler.num_replicas, sampler.rank),
        sampler.seed if sampler is not None and sampler.shuffle else None,
        samples,
        _rows(dataset),
        max(0, sampler.total_size - samples) if sampler is not None and samples is not None else 0,
        _augments(dataset),
    )


def _datasets(dataset: Any) -> Iterator[Any]:
    """A dataset, and those that it is around."""
    for _ in range(8):
        if dataset is None:
            return
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _rows(dataset: Any) -> str:
    subsets = (inner for inner in _datasets(dataset) if isinstance(inner, Subset))
    for subset in subsets:
        rows = repr([*map(int, subset.indices)]).encode()
        return hashlib.blake2b(rows, digest_size=8).hexdigest()
    return ""


def _augments(dataset: Any) -> str:
    """The class of a random transform, as torchvision's datasets hold them."""
    pending = [
        getattr(inner, name, None)
        for inner in _datasets(dataset)
        for name in ("transform", "transforms")
    ]
    for transform in pending:  # to which those within are added
        name = type(transform).__name__
        if any(word in name for word in RANDOM):
            return name
        inner = getattr(transform, "transforms", None)
        if inner and len(pending) < MOST_TRANSFORMS:
            pending += inner if isinstance(inner, (list, tuple)) else [inner]
    return ""
