"""Turn a DataLoader into an `ElasticLoader`: same data and workers on any number of ranks."""

from __future__ import annotations

from typing import Any, Literal

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import anyrank

OnBatchChange = Literal["error", "rescale"]


def elastic_loader(
    dataloader: Any,
    *,
    global_batch: int,
    microbatch: int | None = None,
    seed: int = 0,
    exact: bool = False,
    on_batch_change: OnBatchChange = "error",
    transform: Any = None,
    window: int | None = None,
    keys: Any = None,
    process_group: Any = None,
) -> anyrank.ElasticLoader:
    """Make the loader of steps over a DataLoader's data.

    Args:
        dataloader: a torch DataLoader over a dataset with a length, or over a stream that
            `ElasticLoader.from_iterable` accepts. For a dataset, the order must be sequential,
            shuffled, or weighted with replacement; `drop_last` drops the samples that do not fill
            the epoch's last step, and is refused for a stream.
        global_batch: samples of a step, on all ranks together.
        microbatch: samples of one forward pass; default: the DataLoader's batch_size.
        seed: seed of the order and of all random numbers.
        exact: whether to sum gradients with the same bits on any number of ranks.
        on_batch_change: what to do if a state has a different global_batch, as for
            `ElasticLoader`.
        transform, keys: as for `ElasticLoader`.
        window: for a stream, as for `ElasticLoader.from_iterable`.
        process_group: the data-parallel ranks; default: all ranks.

    Raises:
        TypeError: not a DataLoader, or a dataset without length.
        ValueError: an order, a sharding or a worker_init_fn that cannot be kept.
    """
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"the training data is a {type(dataloader).__name__}. Pass a single torch DataLoader "
            "over a map-style dataset"
        )
    dataset: Any = dataloader.dataset
    if isinstance(dataset, IterableDataset) and not has_shards(dataset):
        raise TypeError(
            f"the training data is a {type(dataset).__name__}, a stream, whose order cannot be "
            "planned. Pass a map-style dataset (len() and dataset[i]), or a stream with num_shards "
            "and shard(num_shards=, index=), such as a Hugging Face IterableDataset"
        )
    if dataloader.batch_size is None:
        raise ValueError(
            "the training DataLoader has a batch_sampler, or no batching, but steps are planned "
            "from global_batch. Use DataLoader(dataset, batch_size=..., shuffle=...). For batches "
            "of one aspect ratio or length, pass transform=anyrank.Buckets(key), and keys= if the "
            "bucket of each sample is known"
        )
    if dataloader.worker_init_fn is not None:
        raise ValueError(
            "the training DataLoader has a worker_init_fn, which is not supported. Remove it: the "
            "random numbers of each sample are already seeded. Move other setup into the dataset"
        )
    options: dict[str, Any] = {
        "global_batch": global_batch,
        "microbatch": microbatch or dataloader.batch_size,
        "seed": seed,
        "exact": exact,
        "num_workers": dataloader.num_workers,
        "collate_fn": dataloader.collate_fn,
        "tail": "drop" if dataloader.drop_last else "short",
        "process_group": process_group,
        "pin_memory": dataloader.pin_memory,
        "prefetch_factor": dataloader.prefetch_factor,
        "persistent_workers": dataloader.persistent_workers,
    }
    if has_shards(dataset):
        if keys is not None:
            raise ValueError("keys= needs a dataset with a length, not a stream. Remove keys=")
        if dataloader.drop_last:
            raise ValueError(
                "the training DataLoader has drop_last=True, which is not supported for streams: "
                "every row is in a step, and the last steps of an epoch may be short. Use "
                "drop_last=False (dataloader_drop_last=False for the Trainer), or with buckets "
                "transform=anyrank.Buckets(key, drop_last=True)"
            )
        return anyrank.ElasticLoader.from_iterable(
            dataset, transform=transform, window=window, **options
        )
    if window is not None:
        raise ValueError(
            f"window= needs a stream, but the training data is a {type(dataset).__name__}. "
            "Remove window="
        )
    options |= _order(dataloader) | {"transform": transform, "keys": keys}
    return anyrank.ElasticLoader(dataset, on_batch_change=on_batch_change, **options)


def has_shards(dataset: Any) -> bool:
    """Return True if a dataset is a stream that `ElasticLoader.from_iterable` accepts."""
    return not hasattr(dataset, "__len__") and hasattr(dataset, "num_shards")


def _order(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of an ElasticLoader that give a sampler's order.

    Raises:
        ValueError: a sampler whose order cannot be kept.
    """
    sampler: Any = dataloader.sampler
    length = len(dataloader.dataset) if hasattr(dataloader.dataset, "__len__") else None  # pyright: ignore[reportArgumentType]
    if type(sampler) is SequentialSampler and (length is None or len(sampler) == length):
        return {"shuffle": False}
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == length:
        return {"shuffle": True}
    if type(sampler) is WeightedRandomSampler and sampler.replacement and len(sampler) == length:
        return {"weights": sampler.weights}
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            "the training DataLoader has a DistributedSampler. anyrank already divides the data "
            "among the ranks, so a second sharding would lose samples. Remove it, and set "
            "shuffle=True or False"
        )
    if length is None:
        return {}  # a dataset without a length: ElasticLoader says what to do
    raise ValueError(
        f"the training DataLoader's sampler is a {type(sampler).__name__}, whose order is unknown "
        "for a different number of ranks. Set shuffle=True or False (for some of the samples, over "
        "a torch.utils.data.Subset), or use WeightedRandomSampler(weights, "
        "num_samples=len(dataset), replacement=True)"
    )
