"""The rules of `check` that need only one rank: its model and its optimizers.

Their findings name no rank; equal findings of several ranks are merged. Does not communicate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anyrank.errors import AnyrankError
from anyrank.models.digests import check_has_memory
from anyrank.models.dtensors import as_sharded
from anyrank.models.tensors import REGISTRIES, NamedModule, find_modules
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.spec import dtype_name
from anyrank.tensors.torch_classes import is_fsdp2
from anyrank.watching.findings import Finding
from anyrank.wording import count, join_first

SHOWN = 4
# Classes with `p`, and the names that other modules use for a dropout probability.
PLAIN_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS = (*PLAIN_DROPOUTS, nn.AlphaDropout, nn.FeatureAlphaDropout)
PROBABILITIES = ("dropout", "attention_dropout", "dropout_p", "drop_prob", "attn_pdrop")


def some(names: Iterable[str]) -> str:
    """Return the first few distinct names, and the number of the rest."""
    return join_first(list(dict.fromkeys(names)), SHOWN)


@dataclass(frozen=True)
class Entry:
    """A parameter or buffer under one of its names in the model; a tied one has several."""

    name: str
    kind: str
    tensor: torch.Tensor
    module: nn.Module
    unit: nn.Module | None  # its FSDP2 unit


@dataclass(frozen=True)
class Model:
    """The modules and tensors of a model."""

    layers: list[NamedModule]
    entries: list[Entry]

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The first DDP wrapper, or None."""
        wrappers = (layer.module for layer in self.layers)
        return next((m for m in wrappers if isinstance(m, DistributedDataParallel)), None)

    def on_accelerator(self) -> bool:
        """Return whether the model computes on an accelerator, even if parameters are elsewhere."""
        kinds = {
            getattr(entry.tensor, "device_mesh", entry.tensor.device) for entry in self.entries
        }
        return any(getattr(k, "device_type", getattr(k, "type", "")) != "cpu" for k in kinds)

    def parameters(self) -> list[Entry]:
        """Return each parameter once, under its first name in the model."""
        first: dict[int, Entry] = {}
        for entry in self.entries:
            if entry.kind == "parameter":
                first.setdefault(id(entry.tensor), entry)
        return list(first.values())

    def tensor_parallel(self) -> int:
        """Return the number of ranks that share one copy of the data.

        These are the ranks along the axes after that of FSDP; without FSDP, along all axes.
        """
        size, is_fsdp = 1, any(is_fsdp2(layer.module) for layer in self.layers)
        for entry in self.parameters():
            tensor: Any = entry.tensor
            placements = getattr(tensor, "placements", None)
            if placements is None:
                continue
            shape = tuple(tensor.device_mesh.shape)
            cut = [axis for axis, placed in enumerate(placements) if not placed.is_replicate()]
            before = 0 if not is_fsdp else (cut[0] + 1 if cut else len(shape))
            size = max(size, math.prod(shape[before:]))
        return size


def take_apart(model: nn.Module) -> Model:
    """List the modules and tensors of a model; reshard FSDP2 units to the form optimizers see.

    Raises:
        LoadError: the model has FSDP1 or a quantized module, whose tensors are not parameters.
    """
    layers, entries = find_modules(model), list[Entry]()
    for layer in layers:
        if is_fsdp2(layer.module):
            layer.module.reshard()
    for layer in layers:
        units = (module for module in reversed(layer.path) if is_fsdp2(module))
        unit = next(units, None)
        prefix = f"{layer.unwrapped}." if layer.unwrapped else ""
        for kind, registry in REGISTRIES:
            for attribute, tensor in layer.module.__dict__[registry].items():
                if tensor is not None:
                    entries.append(Entry(prefix + attribute, kind, tensor, layer.module, unit))
    return Model(layers, entries)


def kinds_of(model: Model) -> dict[str, str]:
    """Return the properties of each parameter that must be the same on every rank."""
    return {
        entry.name: f"{dtype_name(entry.tensor.dtype)}{list(entry.tensor.shape)}, "
        + ("trained" if entry.tensor.requires_grad else "not trained")
        for entry in model.parameters()
    }


def readable(model: Model, written: Collection[int] | None) -> list[ShardedTensor]:
    """Return the tensors whose values must be the same on all replicas.

    These are parameters and buffers, except for batch statistics. After a forward, exclude all
    buffers and the frozen parameters in `written`.
    """
    tensors: dict[int, ShardedTensor] = {}
    for entry in model.entries:
        counts = entry.kind == "parameter" and id(entry.tensor) not in (written or ())
        if entry.kind != "parameter" and written is None:
            counts = not hasattr(entry.module, "track_running_stats")
        if not counts or id(entry.tensor) in tensors or entry.tensor.is_meta:
            continue
        try:
            tensor = as_sharded(entry.name, entry.tensor)
            check_has_memory(entry.name, tensor.local())
        except AnyrankError:
            continue  # quantized, nested or freed: it has no plain bytes to compare
        tensors[id(entry.tensor)] = tensor
    return list(tensors.values())


def active_dropout(model: Model) -> str:
    """Return the names of modules that draw random numbers in each forward; "" for none."""
    return some(_name(layer) for layer in model.layers if _has_active_dropout(layer.module))


def _name(layer: NamedModule) -> str:
    return layer.unwrapped or "the model"


def own_findings(
    model: Model, optimizers: Sequence[Any], digests: Mapping[int, str]
) -> Iterator[Finding]:
    """Yield the findings of the rules in this module.

    Args:
        model: the model.
        optimizers: its optimizers; empty if unknown.
        digests: id of each tensor -> digest of its values on this rank.
    """
    yield from _ties(model, digests)
    if optimizers:
        yield from _optimizer(model, optimizers)
    yield from _frozen(model)


def _ties(model: Model, digests: Mapping[int, str]) -> Iterator[Finding]:
    """Find embeddings and heads that are separate parameters with the same values."""
    untied = any(_says_untied(layer.module) for layer in model.layers)
    entries = [] if untied else [entry for entry in model.entries if id(entry.tensor) in digests]
    embeddings = [entry for entry in entries if isinstance(entry.module, nn.Embedding)]
    heads = [entry for entry in entries if isinstance(entry.module, nn.Linear)]
    for embedding, head in itertools.product(embeddings, heads):
        if (
            embedding.tensor is head.tensor
            or embedding.tensor.shape != head.tensor.shape
            or digests[id(embedding.tensor)] != digests[id(head.tensor)]
            or not _is_not_constant(embedding.tensor)
        ):
            continue
        in_units = embedding.unit is not head.unit
        yield Finding(
            "ties",
            f"{head.name} has the same values as {embedding.name}, but is a separate Parameter"
            + (" in a different FSDP unit" if in_units else ""),
            f"{embedding.name}, {head.name}",
            "each gets its own gradients, so they drift apart",
            "fully_shard([embedding, head])  # one unit; or shard both with the root"
            if in_units
            else f"model.{head.name} = model.{embedding.name}  # or model.tie_weights()",
        )


def _says_untied(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    return getattr(config, "tie_word_embeddings", None) is False


def _is_not_constant(tensor: Any) -> bool:
    """Return whether the local part is not constant, so that equality means a tie."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "placements") else local
    return bool(local.numel() > 1 and (local != local.flatten()[0]).any())


def _optimizer(model: Model, optimizers: Sequence[Any]) -> Iterator[Finding]:
    """Find trainable parameters that no optimizer has, and stale ones in optimizers."""
    stepped = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    trained = [entry for entry in model.parameters() if entry.tensor.requires_grad]
    missing = [entry for entry in trained if id(entry.tensor) not in stepped]
    known = {id(entry.tensor) for entry in model.entries}
    shapes = {tuple(entry.tensor.shape) for entry in missing}
    stale = sum(n not in known and tuple(p.shape) in shapes for n, p in stepped.items())
    if missing:
        what = f"the optimizer lacks {count(len(missing), 'trainable parameter')}"
        yield Finding(
            "optimizer",
            f"{what}, and holds {stale} of the same shapes that the model no longer has"
            if stale
            else what,
            some(entry.name for entry in missing),
            "they get gradients, but are never updated",
            "optimizer = AdamW(model.parameters())  # after the model is moved, adapted, sharded"
            if stale
            else "pass them to the optimizer, or call requires_grad_(False)",
        )


def _has_active_dropout(module: nn.Module) -> bool:
    if not module.training:
        return False
    names = ("p",) if isinstance(module, DROPOUTS) else PROBABILITIES
    values = (getattr(module, name, None) for name in names)
    return any(isinstance(value, float) and value > 0 for value in values)


def _updates_statistics(module: nn.Module) -> bool:
    """Return whether a module updates running statistics in each forward."""
    return module.training and bool(getattr(module, "track_running_stats", False))


def _frozen(model: Model) -> Iterator[Finding]:
    """Find frozen parts in train mode, and frozen parts whose buffers DDP broadcasts.

    Train mode counts only if it has an effect. The base of an adapter is not such a part.
    """
    adapted = any(layer.in_peft for layer in model.layers)
    adapted |= any("lora_" in entry.name.lower() for entry in model.parameters())
    parts = [] if adapted else list(_frozen_parts(model))
    training = [
        part.unwrapped
        for part in parts
        if any(
            _has_active_dropout(module) or _updates_statistics(module)
            for module in part.module.modules()
        )
    ]
    if training:
        yield Finding(
            "frozen",
            "a frozen part is in train mode",
            some(training),
            "its dropout or batch statistics are active, although it is frozen",
            f"anyrank.freeze(model.{training[0]})  # model.train() leaves it in eval mode",
        )
    broadcast: set[int] = set()
    if model.ddp is not None and model.ddp.broadcast_buffers:
        ignored = model.ddp.parameters_to_ignore
        named = model.ddp.module.named_buffers()
        broadcast = {id(buffer) for name, buffer in named if name not in ignored}
    sent = [part.unwrapped for part in parts if broadcast & {*map(id, part.module.buffers())}]
    if sent:
        yield Finding(
            "frozen",
            "DDP broadcasts the buffers of a frozen part in each forward",
            some(sent),
            "traffic for values that never change",
            f"anyrank.freeze(model.{sent[0]})  # before DDP",
        )


def _frozen_parts(model: Model) -> Iterator[NamedModule]:
    """Yield the outermost modules whose parameters are all frozen, except for the model itself."""
    frozen: set[nn.Module] = set()
    for layer in model.layers:
        grads = [parameter.requires_grad for parameter in layer.module.parameters()]
        if grads and not any(grads) and frozen.isdisjoint(layer.path):
            frozen.add(layer.module)
            if len(layer.path) > 1:
                yield layer
