"""The rules of `check` that one rank knows by itself: what its model and optimizer show.

Their findings name no rank: those that several ranks have are one. No collectives.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from anyrank.errors import AnyrankError, LoadError
from anyrank.model.peft import is_peft
from anyrank.model.wrappers import is_wrapping, plain_class
from anyrank.state.digests import check_memory
from anyrank.tensors.sharded_tensor import ShardedTensor, as_sharded
from anyrank.tensors.spec import dtype_name
from anyrank.watching.findings import Finding
from anyrank.wording import count, join_first
from anyrank.world.device import rank_device

SHOWN = 4
# Classes with `p`, and names under which others keep the probability that they drop something.
PLAIN_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS = (*PLAIN_DROPOUTS, nn.AlphaDropout, nn.FeatureAlphaDropout)
PROBABILITIES = ("dropout", "attention_dropout", "dropout_p", "drop_prob", "attn_pdrop")
REENTRANT = re.compile(r"use_reentrant\s*=\s*True")


def some(names: Iterable[str]) -> str:
    """The first few names, each once, and how many more there are."""
    return join_first(list(dict.fromkeys(names)), SHOWN)


@dataclass(frozen=True)
class Place:
    """A module of the model: its name without wrappers, and the modules from the root to it."""

    name: str
    module: nn.Module
    path: tuple[nn.Module, ...]

    def names(self, attribute: str) -> str:
        """The name of something in it."""
        return f"{self.name}.{attribute}" if self.name else attribute

    def unit(self) -> nn.Module | None:
        """The FSDP2 unit that it belongs to."""
        return next((part for part in reversed(self.path) if isinstance(part, FSDPModule)), None)


@dataclass(frozen=True)
class Entry:
    """A parameter or buffer where the model has it; a tied one has several."""

    name: str
    kind: str
    tensor: torch.Tensor
    place: Place


@dataclass(frozen=True)
class Model:
    """A model, taken apart once."""

    places: list[Place]
    entries: list[Entry]

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The first wrapper of DDP."""
        wrappers = (place.module for place in self.places)
        return next((one for one in wrappers if isinstance(one, DistributedDataParallel)), None)

    def on_accelerator(self) -> bool:
        """Whether it computes on one, wherever its parameters are kept."""
        kinds = {
            getattr(entry.tensor, "device_mesh", entry.tensor.device) for entry in self.entries
        }
        return any(getattr(one, "device_type", getattr(one, "type", "")) != "cpu" for one in kinds)

    def parameters(self) -> list[Entry]:
        """Each parameter once, at its first place."""
        first: dict[int, Entry] = {}
        for entry in self.entries:
            if entry.kind == "parameter":
                first.setdefault(id(entry.tensor), entry)
        return list(first.values())

    def tensor_parallel(self) -> int:
        """Ranks that share one copy of the data: those along the axes behind FSDP's, or, without
        FSDP, of the whole mesh.
        """
        size, is_fsdp = 1, any(isinstance(place.module, FSDPModule) for place in self.places)
        for entry in self.parameters():
            tensor: Any = entry.tensor
            placements = getattr(tensor, "placements", None)
            if placements is None:
                continue
            shape = tuple(tensor.device_mesh.shape)
            cut = [axis for axis, one in enumerate(placements) if not one.is_replicate()]
            before = 0 if not is_fsdp else (cut[0] + 1 if cut else len(shape))
            size = max(size, math.prod(shape[before:]))
        return size


def take_apart(model: nn.Module) -> Model:
    """The modules and tensors of a model; FSDP2's units are resharded, as optimizers see them.

    Raises:
        AnyrankError: it is wrapped by FSDP1, whose parameters are not the model's.
    """
    places = list(_places(model, "", ()))
    if any(isinstance(place.module, FullyShardedDataParallel) for place in places):
        raise AnyrankError(
            "check(): the model is wrapped by FullyShardedDataParallel (FSDP1), whose flat "
            "parameters are not the model's: check before it is wrapped, or use fully_shard"
        )
    for place in places:
        if isinstance(place.module, FSDPModule):
            place.module.reshard()
    entries: list[Entry] = []
    for place in places:
        tables = ("parameter", "_parameters"), ("buffer", "_buffers")
        for kind, table in tables:
            held: dict[str, torch.Tensor | None] = place.module.__dict__[table]
            for attribute, tensor in held.items():
                if tensor is not None:
                    entries.append(Entry(place.names(attribute), kind, tensor, place))
    return Model(places, entries)


def _places(module: nn.Module, name: str, above: tuple[nn.Module, ...]) -> Iterator[Place]:
    if any(module is each for each in above):
        return
    path = (*above, module)
    yield Place(name, module, path)
    for key, child in module.__dict__["_modules"].items():
        if child is not None:
            below = name if is_wrapping(module, key) else f"{name}.{key}" if name else key
            yield from _places(child, below, path)


def kinds_of(model: Model) -> dict[str, str]:
    """What must be the same on all ranks of each parameter."""
    return {
        entry.name: f"{dtype_name(entry.tensor.dtype)}{list(entry.tensor.shape)}, "
        + ("trained" if entry.tensor.requires_grad else "not trained")
        for entry in model.parameters()
    }


def readable(model: Model, buffers: bool) -> list[ShardedTensor]:
    """What replicas hold alike: parameters, and buffers but for statistics of batches."""
    found: dict[int, ShardedTensor] = {}
    for entry in model.entries:
        counts = entry.kind == "parameter"
        if not counts and buffers:
            counts = not hasattr(entry.place.module, "track_running_stats")
        if not counts or id(entry.tensor) in found or entry.tensor.is_meta:
            continue
        try:
            held = as_sharded(entry.name, entry.tensor)
            check_memory(entry.name, held.local())
        except (AnyrankError, LoadError):
            continue  # quantised, nested or released: its values are not its bytes
        found[id(entry.tensor)] = held
    return list(found.values())


def active_dropout(model: Model) -> str:
    """Modules that draw random numbers in each forward."""
    return some(p.name or "the model" for p in model.places if _drops(p.module))


def own_findings(
    model: Model, optimizers: Sequence[Any], digests: Mapping[int, str], world_size: int
) -> Iterator[Finding]:
    """What this rank's rules find.

    Args:
        model: taken apart.
        optimizers: of it; none when they are not known.
        digests: id of each tensor -> of its values on this rank.
        world_size: ranks that check together.
    """
    yield from _ties(model, digests)
    if optimizers:
        yield from _optimizer(model, optimizers)
    yield from _device(model, world_size)
    yield from _frozen(model)
    yield from _reentrant(model)


def _ties(model: Model, digests: Mapping[int, str]) -> Iterator[Finding]:
    """Embeddings and heads with the same values that are two parameters, or lie in two units."""
    untied = any(_says_untied(place.module) for place in model.places)
    parameters = [] if untied else [e for e in model.entries if id(e.tensor) in digests]
    heads = [entry for entry in parameters if isinstance(entry.place.module, nn.Linear)]
    for one in parameters:
        if not isinstance(one.place.module, nn.Embedding):
            continue
        for other in heads:
            equal = digests[id(other.tensor)] == digests[id(one.tensor)]
            is_alike = equal and one.tensor.shape == other.tensor.shape and _varies(one.tensor)
            if not is_alike or one.tensor is other.tensor:
                continue
            a, b = one.place.unit(), other.place.unit()
            in_units = a is not b
            yield Finding(
                "ties",
                f"{other.name} has the same values as {one.name}, and is another Parameter"
                + (" in another FSDP unit" if in_units else ""),
                f"{one.name}, {other.name}",
                "each gets gradients of its own and they drift apart",
                "fully_shard([embedding, head])  # one unit; or leave both to the root's"
                if in_units
                else f"model.{other.name} = model.{one.name}  # or model.tie_weights()",
            )


def _says_untied(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    return getattr(config, "tie_word_embeddings", None) is False


def _varies(tensor: Any) -> bool:
    """Whether equal values cannot be chance: the local part has elements, and not all the same."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "placements") else local
    return bool(local.numel() > 1 and (local != local.flatten()[0]).any())


def _optimizer(model: Model, optimizers: Sequence[Any]) -> Iterator[Finding]:
    """Trainable parameters that no optimizer has, and what these have in their place."""
    held = {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = [e for e in model.parameters() if e.tensor.requires_grad and id(e.tensor) not in held]
    known = {id(entry.tensor) for entry in model.entries}
    shapes = {tuple(entry.tensor.shape) for entry in missing}
    stale = sum(n not in known and tuple(p.shape) in shapes for n, p in held.items())
    if missing:
        what = f"the optimizer misses {count(len(missing), 'trainable parameter')}"
        yield Finding(
            "optimizer",
            f"{what}, and holds {stale} of their shapes that the model no longer has"
            if stale
            else what,
            some(entry.name for entry in missing),
            "they get gradients and are never updated",
            "optimizer = AdamW(model.parameters())  # after the model is moved, adapted, sharded"
            if stale
            else "give them to the optimizer, or requires_grad_(False)",
        )


def _device(model: Model, world_size: int) -> Iterator[Finding]:
    """Tensors on meta, and tensors elsewhere than on the device of this rank."""
    own = rank_device()
    meta = [entry.name for entry in model.entries if entry.tensor.is_meta]
    if meta:
        yield Finding(
            "device",
            f"{count(len(meta), 'tensor')} on meta, without values",
            some(meta),
            "the forward fails, or computes nothing",
            "anyrank.load(model, path)  # or anyrank.materialize(model)",
        )
    used = {entry.tensor.device for entry in model.entries if not entry.tensor.is_meta}
    used = {device for device in used if device.type != "cpu"}
    off: list[str] = []
    for entry in model.entries:
        tensor: Any = entry.tensor
        mesh = getattr(tensor, "device_mesh", None)
        offloaded = mesh is not None and mesh.device_type != "cpu"  # FSDP2 keeps it on the CPU
        on_cpu = tensor.device.type == "cpu" and bool(used) and not offloaded
        foreign = tensor.device in used and world_size > 1 and tensor.device != own
        if on_cpu or foreign:
            off.append(f"{entry.name} ({tensor.device})")
    if off:
        yield Finding(
            "device",
            f"{count(len(off), 'tensor')} off the rank's device, {own}",
            some(off),
            "ranks share a device, or the forward stops at tensors of two",
            f'torch.accelerator.set_device_index(local_rank); model.to("{own}")',
        )


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    names = ("p",) if isinstance(module, DROPOUTS) else PROBABILITIES
    values = (getattr(module, name, None) for name in names)
    return any(isinstance(value, float) and value > 0 for value in values)


def _counts(module: nn.Module) -> bool:
    """Whether it is a norm that updates its statistics in each forward."""
    return module.training and bool(getattr(module, "track_running_stats", False))


def _frozen(model: Model) -> Iterator[Finding]:
    """Parts without a trained parameter: those in train mode where that matters, and those whose
    buffers DDP broadcasts. What an adapter is added to is none.
    """
    adapted = any(is_peft(p.module) for p in model.places)
    adapted |= any("lora_" in entry.name.lower() for entry in model.parameters())
    parts = [] if adapted else list(_frozen_parts(model))
    training = [p.name for p in parts if any(_drops(m) or _counts(m) for m in p.module.modules())]
    if training:
        yield Finding(
            "frozen",
            "a frozen part is in train mode",
            some(training),
            "its dropout draws and its norms move, though it is not trained",
            f"anyrank.freeze(model.{training[0]})  # stays in eval through train()",
        )
    broadcast: set[int] = set()
    if model.ddp is not None and model.ddp.broadcast_buffers:
        ignored = model.ddp.parameters_to_ignore
        named = model.ddp.module.named_buffers()
        broadcast = {id(buffer) for name, buffer in named if name not in ignored}
    sent = [p.name for p in parts if broadcast.intersection(map(id, p.module.buffers()))]
    if sent:
        yield Finding(
            "frozen",
            "DDP broadcasts the buffers of a frozen part in each forward",
            some(sent),
            "traffic for values that never change",
            f"anyrank.freeze(model.{sent[0]})  # before DDP",
        )


def _frozen_parts(model: Model) -> Iterator[Place]:
    """The outermost modules whose parameters all are frozen, in a model that is trained."""
    found: set[nn.Module] = set()
    for place in model.places:
        grads = [parameter.requires_grad for parameter in place.module.parameters()]
        if grads and not any(grads) and found.isdisjoint(place.path):
            found.add(place.module)
            if len(place.path) > 1:
                yield place


def _reentrant(model: Model) -> Iterator[Finding]:
    """Modules that checkpoint with use_reentrant=True, as far as attributes and code say so."""
    if model.ddp is None or model.ddp.static_graph:
        return
    parts = [
        place.name or "the model"
        for place in model.places
        if getattr(place.module, "gradient_checkpointing", True) is not False
        and (any(map(_is_reentrant, vars(place.module).values())) or _says_reentrant(place.module))
    ]
    if parts:
        yield Finding(
            "reentrant",
            "reentrant checkpointing under DDP",
            some(parts),
            "its inner backward makes DDP see parameters ready twice, or skip unused ones",
            "checkpoint(..., use_reentrant=False)  # or anyrank.recompute_",
        )


def _is_reentrant(value: object) -> bool:
    if not isinstance(value, functools.partial) or value.func is not checkpoint:
        return False
    return value.keywords.get("use_reentrant") in (True, None)


def _says_reentrant(module: nn.Module) -> bool:
    """Whether the text of its forward says so."""
    try:
        return bool(REENTRANT.search(inspect.getsource(plain_class(module).forward)))
    except (OSError, TypeError):
        return False
