"""Facts about the loader of one rank, for the rules of `check`. Reads no sample."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Subset
from torch.utils.data.distributed import DistributedSampler

from anyrank.training.steps.loader import ElasticLoader

MOST_DATASETS = 8  # that wrap each other


@dataclass(frozen=True)
class LoaderFacts:
    """The facts about the loader of one rank.

    Attributes:
        batch: number of samples per batch on this rank; None if unknown.
        share: for a DistributedSampler, its num_replicas and its rank.
        seed: seed of a DistributedSampler that shuffles; None otherwise.
        samples: number of samples of the dataset, if it has a length.
        subset: digest of the indices of a Subset; empty for any other dataset.
        repeated: number of samples that are repeated so that all ranks get the same number.
    """

    batch: int | None
    share: tuple[int, int] | None
    seed: int | None
    samples: int | None
    subset: str
    repeated: int


def look_at(loader: Any) -> LoaderFacts | None:
    """Return the facts about a loader; None for no loader, and for an ElasticLoader.

    An ElasticLoader compares its arguments itself.
    """
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
    """Return the digest of the indices of a Subset, possibly inside other datasets; else ""."""
    for _ in range(MOST_DATASETS):
        if isinstance(dataset, Subset):
            rows = repr([*map(int, dataset.indices)]).encode()
            return hashlib.blake2b(rows, digest_size=8).hexdigest()
        dataset = getattr(dataset, "dataset", None)
    return ""
