"""A vLLM model's weights by their Hugging Face names, to be filled by one `anyrank.sync`.

Written against the layers of vLLM (`model_executor.layers`), of which it imports nothing: it reads
the attributes that they set on themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

__all__ = ["weights"]

Layout: TypeAlias = tuple[Any, ...]
NamedView: TypeAlias = tuple[str, torch.Tensor, Layout | None]


def weights(
    model: nn.Module, ranks: Sequence[int]
) -> tuple[dict[str, torch.Tensor], dict[str, Layout]]:
    """The parameters of a vLLM model by Hugging Face's names, and their `layout=`.

    They are views of the model's own memory: what fuses several (`qkv_proj`, `gate_up_proj`) is cut
    into them, as `packed_modules_mapping` of the model says. Key and value heads that several ranks
    hold alike are replicas, and the rows that pad a vocabulary are left out. Parameters that belong
    to no parallel layer are whole on each rank.

    Args:
        model: a rank's model, as `model_runner.get_model()` gives it in a worker.
        ranks: the global ranks of its tensor-parallel group, in order.

    Returns:
        Name -> tensor, for `dst` of `sync`, and name -> layout, for its `layout=`.

    Raises:
        ValueError: quantised weights, fused experts, or a vocabulary with added rows.

    Example::

        generator, trainer = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        dst, layout = anyrank.integrations.vllm.weights(generator, [0])
        anyrank.sync(dst, trainer, layout=(layout, None))  # on ranks that train: (None, trainer)
        assert torch.equal(generator.weight, trainer.weight)
    """
    tensors: dict[str, torch.Tensor] = {}
    layouts: dict[str, Layout] = {}
    packed: dict[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    seen: set[int] = set()
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied
                continue
            seen.add(id(parameter))
            for name, view, layout in _views(path, attribute, module, packed, list(ranks)):
                tensors[name] = view
                if layout is not None:
                    layouts[name] = layout
    return tensors, layouts


def _views(
    path: str, attribute: str, module: Any, packed: dict[str, Sequence[str]], ranks: list[int]
) -> Iterator[NamedView]:
    """What one parameter holds: names, views and layouts."""
    parameter: torch.Tensor = getattr(module, attribute).detach()
    name = f"{path}.{attribute}".lstrip(".")
    is_plain = parameter.is_floating_point() and parameter.dtype.itemsize > 1
    if not is_plain or attribute in ("w13_weight", "w2_weight"):
        raise ValueError(
            f"{name}: is quantised, or fused experts, whose elements are not those of one tensor "
            "by name: give vLLM these weights itself"
        )
    if hasattr(module, "num_embeddings_padded"):
        yield _vocabulary(name, module, parameter, ranks)
        return
    parts = _parts(module, parameter, len(ranks))
    if len(parts) < 2:
        yield name, parameter, _whole_or_shard(module, parameter, ranks)
        return
    above, _, fused = path.rpartition(".")
    names = packed.get(fused)
    if names is None:
        yield name, parameter, _stacked(name, parts, ranks)
        return
    start = 0
    for (length, replicas), part in zip(parts, names, strict=True):
        view = parameter.narrow(0, start, length)
        start += length
        mesh = torch.tensor(ranks, device="cpu").reshape(-1, replicas)
        full = f"{above}.{part}.{attribute}".lstrip(".")
        yield full, view, (mesh, [Shard(0), Replicate()])


def _parts(module: Any, parameter: torch.Tensor, size: int) -> list[tuple[int, int]]:
    """Rows of each of the projections that a parameter stacks, and how many ranks hold them."""
    if hasattr(module, "num_kv_head_replicas"):  # QKVParallelLinear
        replicas = int(module.num_kv_head_replicas)
        of_value = getattr(module, "v_head_size", module.head_size)
        key, value = (module.num_kv_heads * size for size in (module.head_size, of_value))
        return [(module.num_heads * module.head_size, 1), (key, replicas), (value, replicas)]
    outputs: Sequence[int] = getattr(module, "output_sizes", ())  # MergedColumnParallelLinear
    number = size if sum(outputs) != parameter.shape[0] else 1
    replicas = size // number
    return [(rows // number, replicas) for rows in outputs]


def _stacked(name: str, parts: Sequence[tuple[int, int]], ranks: list[int]) -> Layout | None:
    """The layout of a parameter that is fused in the source as well."""
    size = len(ranks)
    if all(replicas == size for _, replicas in parts):
        return None
    if any(replicas > 1 for _, replicas in parts):
        raise ValueError(f"{name}: ranks share some of the heads that it stacks: sync these apart")
    intervals: list[list[tuple[int, int]]] = [[] for _ in ranks]
    start = 0
    for rows, _ in parts:
        for index, of_rank in enumerate(intervals):
            of_rank.append((start + index * rows, rows))
        start += rows * size
    return ranks, [Shard(0)], intervals


def _whole_or_shard(module: Any, parameter: torch.Tensor, ranks: list[int]) -> Layout | None:
    """The layout of a linear layer's parameter, by the dim that is smaller than the layer's."""
    sizes = (getattr(module, "output_size", None), getattr(module, "input_size", None))
    for dim, (length, whole) in enumerate(zip(parameter.shape, sizes, strict=False)):
        if whole is not None and length != whole:
            return ranks, [Shard(dim)]
    return None


def _vocabulary(name: str, module: Any, parameter: torch.Tensor, ranks: list[int]) -> NamedView:
    """The rows of a vocabulary that are no padding."""
    if module.num_embeddings != module.org_vocab_size:
        raise ValueError(f"{name}: the vocabulary has rows that an adapter added: sync it without")
    rows, total = parameter.shape[0], int(module.org_vocab_size)
    intervals = [
        [(index * rows, max(0, min(rows, total - index * rows)))] for index in range(len(ranks))
    ]
    index = ranks.index(dist.get_rank()) if dist.is_initialized() else 0
    return name, parameter[: intervals[index][0][1]], (ranks, [Shard(0)], intervals)
