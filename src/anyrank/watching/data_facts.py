"""Facts about one rank's loader, for the mistakes that `check` knows. No sample is read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset
from torch.utils.data.distributed import DistributedSampler

from anyrank.training.steps.loader import ElasticLoader

MOST_DATASETS = 8  # wrapped around each other


@dataclass(frozen=True)
class LoaderFacts:
    """One rank's loader.

    Attributes:
        batch: samples of a batch on this rank; None if unknown.
        share: for a DistributedSampler: the number of ranks, and the one whose share it takes.
        seed: seed of a DistributedSampler that shuffles.
        samples: number of samples of the dataset, if it has a length.
        subset: digest of the rows of a Subset; empty for another dataset.
        repeated: number of samples that are given twice, so that all ranks get the same number.
    """

    batch: int | None
    share: tuple[int, int] | None
    seed: int | None
    samples: int | None
    subset: str
    repeated: int


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
    )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _rows(dataset: Any) -> str:
    """The digest of the rows of a Subset, or of a Subset inside other datasets; else ""."""
    for _ in range(MOST_DATASETS):
        if isinstance(dataset, Subset):
            rows = repr([*map(int, dataset.indices)]).encode()
            return hashlib.blake2b(rows, digest_size=8).hexdigest()
        dataset = getattr(dataset, "dataset", None)
    return ""
