"""What one rank's model and optimizer show of the mistakes that `check` knows. No collectives."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from anyrank.world.device import rank_device

SHOWN = 4
# Classes with `p`, and names under which others keep the probability that they drop something.
PLAIN_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS = (*PLAIN_DROPOUTS, nn.AlphaDropout, nn.FeatureAlphaDropout)
PROBABILITIES = ("dropout", "attention_dropout", "dropout_p", "drop_prob", "attn_pdrop")


@dataclass(frozen=True)
class Some:
    """Names, of which the first few travel: none are falsy."""

    names: tuple[str, ...] = ()
    total: int = 0

    def __bool__(self) -> bool:
        return bool(self.total)

    def __str__(self) -> str:
        more = self.total - len(self.names)
        return ", ".join(self.names) + (f" and {more} more" if more else "")


def some(names: Iterable[str]) -> Some:
    """The first few names, each once, and how many there are."""
    every = list(dict.fromkeys(names))
    return Some(tuple(every[:SHOWN]), len(every))


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

    root: nn.Module
    places: list[Place]
    entries: list[Entry]

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The first wrapper of DDP."""
        wrappers = (place.module for place in self.places)
        return next((one for one in wrappers if isinstance(one, DistributedDataParallel)), None)

    @property
    def is_fsdp(self) -> bool:
        return any(isinstance(place.module, FSDPModule) for place in self.places)

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
        size = 1
        for entry in self.parameters():
            tensor: Any = entry.tensor
            placements = getattr(tensor, "placements", None)
            if placements is None:
                continue
            shape = tuple(tensor.device_mesh.shape)
            cut = [axis for axis, one in enumerate(placements) if not one.is_replicate()]
            before = 0 if not self.is_fsdp else (cut[0] + 1 if cut else len(shape))
            size = max(size, functools.reduce(lambda a, b: a * b, shape[before:], 1))
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
    return Model(model, places, entries)


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


# -- the rules' own facts -------------------------------------------------------------------------


def left_out(model: Model, optimizers: Sequence[Any]) -> tuple[Some, Some]:
    """Trainable parameters that no optimizer has, and what these have in their place."""
    held = {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    missing = [e for e in model.parameters() if e.tensor.requires_grad and id(e.tensor) not in held]
    known = {id(entry.tensor) for entry in model.entries}
    strangers = [p for number, p in held.items() if number not in known]
    shapes = {tuple(entry.tensor.shape) for entry in missing}
    stale = [p for p in strangers if tuple(p.shape) in shapes]
    texts = [f"{dtype_name(p.dtype)}{list(p.shape)}" for p in stale]
    return some(e.name for e in missing), Some(tuple(texts[:SHOWN]), len(texts))


def broken_ties(model: Model, digests: dict[int, int]) -> list[tuple[str, str, str]]:
    """Pairs of parameters that were one: their names, and how that is known.

    Args:
        model: taken apart.
        digests: id of each tensor -> of its values on this rank.
    """
    found: dict[frozenset[int], tuple[str, str, str]] = {}

    def add(one: Entry, other: Entry, how: str) -> None:
        if one.tensor is not other.tensor:
            a, b = one.place.unit(), other.place.unit()
            how = "units" if a is not b and {a, b} - {None} else how
            pair = frozenset((id(one.tensor), id(other.tensor)))
            found.setdefault(pair, (one.name, other.name, how))

    parameters = [entry for entry in model.entries if entry.kind == "parameter"]
    by_name = {entry.name: entry for entry in parameters}
    for place in model.places:
        declared = getattr(place.module, "all_tied_weights_keys", None)
        for target, source in declared.items() if isinstance(declared, dict) else ():
            one, other = by_name.get(place.names(source)), by_name.get(place.names(target))
            if one is not None and other is not None:
                add(one, other, "declared")
    at: dict[Any, Entry] = {}
    for entry in parameters:
        if type(entry.tensor) is nn.Parameter and entry.tensor.requires_grad:
            key = entry.tensor.data_ptr(), entry.tensor.shape, entry.tensor.stride()
            if key[0]:  # it has memory
                add(at.setdefault(key, entry), entry, "memory")
    untied = any(_says_untied(place.module) for place in model.places)
    heads = [] if untied else [e for e in parameters if isinstance(e.place.module, nn.Linear)]
    for one in parameters:
        if isinstance(one.place.module, nn.Embedding) and id(one.tensor) in digests:
            for other in heads:
                equal = digests.get(id(other.tensor)) == digests[id(one.tensor)]
                if equal and one.tensor.shape == other.tensor.shape and _varies(one.tensor):
                    add(one, other, "values")
    return list(found.values())


def _says_untied(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    return getattr(config, "tie_word_embeddings", None) is False


def _varies(tensor: Any) -> bool:
    """Whether equal values cannot be chance: the local part has elements, and not all the same."""
    local = tensor.detach()
    local = local.to_local() if hasattr(local, "placements") else local
    return bool(local.numel() > 1 and (local != local.flatten()[0]).any())


def misplaced(model: Model, world_size: int) -> tuple[Some, Some, str]:
    """Tensors on meta, tensors elsewhere than they should be, and the device of this rank."""
    own = rank_device()
    meta = [entry.name for entry in model.entries if entry.tensor.is_meta]
    devices = {entry.tensor.device for entry in model.entries if not entry.tensor.is_meta}
    used = {device for device in devices if device.type != "cpu"}
    off: list[str] = []
    for entry in model.entries:
        tensor: Any = entry.tensor
        mesh = getattr(tensor, "device_mesh", None)
        offloaded = mesh is not None and mesh.device_type != "cpu"  # FSDP2 keeps it on the CPU
        on_cpu = tensor.device.type == "cpu" and bool(used) and not offloaded
        foreign = tensor.device in used and world_size > 1 and tensor.device != own
        if on_cpu or foreign:
            off.append(f"{entry.name} ({tensor.device})")
    return some(meta), some(off), str(own)


def active_dropout(model: Model) -> Some:
    """Modules that draw random numbers in each forward."""
    return some(p.name or "the model" for p in model.places if _drops(p.module))


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    names = ("p",) if isinstance(module, DROPOUTS) else PROBABILITIES
    values = (getattr(module, name, None) for name in names)
    return any(isinstance(value, float) and value > 0 for value in values)


def frozen_parts(model: Model) -> tuple[Some, Some]:
    """Parts without a trained parameter: those in train mode where that matters, and those whose
    buffers DDP broadcasts. What an adapter is added to is none.
    """
    training: list[str] = []
    sent: list[str] = []
    trained = any(entry.tensor.requires_grad for entry in model.parameters())
    adapted = any(is_peft(p.module) for p in model.places)
    adapted |= any("lora_" in entry.name.lower() for entry in model.parameters())
    if not trained or adapted:
        return Some(), Some()
    broadcast: set[int] = set()
    if model.ddp is not None and model.ddp.broadcast_buffers:
        ignored = model.ddp.parameters_to_ignore
        named = model.ddp.module.named_buffers()
        broadcast = {id(buffer) for name, buffer in named if name not in ignored}
    own: dict[str, list[Entry]] = {}
    for entry in model.entries:
        own.setdefault(entry.place.name, []).append(entry)
    number = 0
    while number < len(model.places):
        place, inner = model.places[number], _below(model.places, number)
        tensors = [entry for one in inner for entry in own.get(one.name, ())]
        parameters = [entry.tensor for entry in tensors if entry.kind == "parameter"]
        if not parameters or any(tensor.requires_grad for tensor in parameters):
            number += 1
            continue
        number += len(inner)
        if any(_drops(one.module) or _counts(one.module) for one in inner):
            training.append(place.name)
        if any(id(entry.tensor) in broadcast for entry in tensors):
            sent.append(place.name)
    return some(training), some(sent)


def _below(places: Sequence[Place], number: int) -> Sequence[Place]:
    """A module and all in it, as parents come first."""
    end = number + 1
    while end < len(places) and len(places[end].path) > len(places[number].path):
        end += 1
    return places[number:end]


def _counts(module: nn.Module) -> bool:
    """Whether it is a norm that updates its statistics in each forward."""
    return module.training and bool(getattr(module, "track_running_stats", False))


def reentrant_parts(model: Model) -> Some:
    """Modules that checkpoint with use_reentrant=True, as far as attributes and code say so."""
    return some(
        place.name or "the model"
        for place in model.places
        if getattr(place.module, "gradient_checkpointing", True) is not False
        and (
            any(_is_reentrant(value) for value in vars(place.module).values())
            or _calls_reentrant(plain_class(place.module))
        )
    )


def _is_reentrant(value: object) -> bool:
    if not isinstance(value, functools.partial) or value.func is not checkpoint:
        return False
    return value.keywords.get("use_reentrant") in (True, None)


@functools.lru_cache(maxsize=1024)
def _calls_reentrant(kind: type[nn.Module]) -> bool:
    """Whether the text of a class's forward calls torch's checkpoint so; literals alone count."""
    forward: Callable[..., Any] = kind.forward
    try:
        source = inspect.getsource(forward)
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        return False
    known: dict[str, Any] = getattr(forward, "__globals__", {})
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _named(node.func, known) is not checkpoint:
            continue
        given = {one.arg: one.value for one in node.keywords}
        value = given.get("use_reentrant")
        if isinstance(value, ast.Constant) and value.value is True:
            return True
        if value is None and None not in given:  # without **kwargs: torch's default is True
            return True
    return False


def _named(node: ast.expr, known: dict[str, Any]) -> Any:
    """What a dotted name in a function means."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_named(node.value, known), node.attr, None)
    return None
