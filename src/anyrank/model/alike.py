"""Whether ranks have the same model, and the first difference in words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from anyrank.errors import LoadError
from anyrank.tensors.sharded_tensor import Description
from anyrank.world.ranks import Ranks


def check_alike(models: Sequence[Sequence[Description]], ranks: Ranks) -> None:
    """Compare the ranks' models, as `ShardedTensor.describe` describes their tensors.

    Raises:
        LoadError: the first difference.
    """
    first = ranks.ranks[0]
    for rank, model in zip(ranks.ranks[1:], models[1:], strict=True):
        for ours, others in zip_longest(models[0], model):
            if ours != others:
                raise LoadError(
                    f"the ranks' models differ: rank {first} has {_in_words(ours)}, rank {rank} "
                    f"has {_in_words(others)}"
                )


def _in_words(described: Description | None) -> str:
    if described is None:
        return "no further tensor"
    name, shape, dtype, layout = described
    return f"{name} {list(shape)} {dtype}" + ("" if layout == "None" else f" {layout}")
