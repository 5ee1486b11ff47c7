"""What one rank's loader shows of the mistakes that `check` knows. No sample is read."""

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
    sampler = next((one for one in samplers if isinstance(one, DistributedSampler)), None)
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
    for one in _datasets(dataset):
        if isinstance(one, Subset):
            rows = repr([*map(int, one.indices)]).encode()
            return hashlib.blake2b(rows, digest_size=8).hexdigest()
    return ""


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
