"""The tensors of a model: their names, their layouts on the ranks, and which are tied."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from anyrank.errors import LoadError
from anyrank.model.peft import is_adapter, is_peft, is_peft_class, is_peft_wrapping, names_in_peft
from anyrank.model.wrappers import Path, Registration, is_wrapping, plain_of
from anyrank.tensors.layout import Layout
from anyrank.tensors.names import TensorNames
from anyrank.tensors.sharded_tensor import ShardedTensor, global_shape, layout_of, places_in_groups

Kind = Literal["parameter", "buffer", "derived"]  # derived: a buffer that state_dict leaves out
# Of nn.Module; named_parameters() takes 15 us a tensor.
TABLES: tuple[tuple[Kind, str], ...] = (("parameter", "_parameters"), ("buffer", "_buffers"))


@dataclass
class ModelTensor(ShardedTensor):
    """One tensor of the model, with all its names.

    Attributes:
        kind: parameter, buffer, or derived (a non-persistent buffer).
        registrations: where the model has it; several when it is tied.
        adapter: it belongs to an adapter (PEFT), which a base checkpoint does not hold.
        frozen: the module passed to `freeze()` that it belongs to, if any.
    """

    kind: Kind
    registrations: list[Registration]
    adapter: bool = False
    frozen: nn.Module | None = None

    def all_names(self) -> TensorNames:
        """All names that a source may have for it, by place."""
        return tuple([place.names for place in self.registrations])

    def flat_names(self) -> list[str]:
        """All names that a source may have for it."""
        return [name for place in self.registrations for name in place.names]


@dataclass(frozen=True, slots=True)
class Walk:
    """The modules and tensors of a model, before anything is made of them.

    Attributes:
        modules: parents first; one that is registered under several names, once for each.
        paths: of each module, the modules from the root to it, both included.
        frozen: of each module, the one passed to `freeze()` that it belongs to, if any: the
            innermost with a source of its own, else the outermost.
        steps: of each module, its class, the number of its parent, and its name there.
        places: of each entry, the number of its module, its name there, its kind, and the number of
            its tensor.
        tensors: each once, in the order in which they are found.
    """

    modules: list[nn.Module]
    paths: list[Path]
    frozen: list[nn.Module | None]
    steps: list[tuple[type[nn.Module], int, str]]
    places: list[tuple[int, str, Kind, int]]
    tensors: list[Any]


@dataclass(frozen=True, slots=True)
class Description:
    """What a walk found, in words: the same for models of the same modules, names and layouts.

    Attributes:
        names: of each place, see `Registration`.
        held: of each tensor, its global shape, layout and this rank's coordinate.
        adapters: of each tensor, whether it belongs to an adapter.
    """

    names: list[tuple[str, ...]]
    held: list[tuple[tuple[int, ...], Layout | None, tuple[int, ...] | None]]
    adapters: list[bool]


def find_tensors(model: nn.Module) -> list[ModelTensor]:
    """Every parameter and buffer of the model, in registration order, ties joined.

    Raises:
        LoadError: FSDP1, quantised or otherwise unreadable tensors, named with their type.
    """
    walk = walk_tensors(model)
    return put_together(walk, describe(walk))


def in_state_dict(targets: Iterable[ModelTensor]) -> list[ModelTensor]:
    """Those that a checkpoint holds or checks: all but derived buffers."""
    return [target for target in targets if target.kind != "derived"]


def walk_tensors(model: nn.Module) -> Walk:
    """Go through a model, also through the children that frozen parts hide.

    FSDP2 units that hold their parameters unsharded are resharded first, so that what is found is
    what the optimizer updates.
    """
    walk = Walk([], [], [], [], [], [])
    pending: list[tuple[nn.Module, int, str, Path, nn.Module | None]] = [(model, 0, "", (), None)]
    while pending:  # a call for each module would take half as long again
        module, parent, name, path, frozen = pending.pop()
        number, own = len(walk.modules), module.__dict__
        children: dict[str, nn.Module | None] = own["_modules"]
        if children and any(module is each for each in path):
            continue  # it refers to a parent, which torch allows
        info = own.get("anyrank_frozen")
        if info is not None and (frozen is None or info.source is not None):
            frozen = module
        path = (*path, module)
        walk.modules.append(module)
        walk.paths.append(path)
        walk.frozen.append(frozen)
        walk.steps.append((type(module), parent, name))
        for key, child in reversed(children.items()):
            if child is not None:
                pending.append((child, number, key, path, frozen))
    for module in walk.modules:
        if isinstance(module, FSDPModule):
            module.reshard()
    numbers: dict[int, int] = {}
    for number, module in enumerate(walk.modules):
        own = module.__dict__
        hidden: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for kind, table in TABLES:
            for name, tensor in own[table].items():
                if tensor is not None:
                    known = numbers.setdefault(id(tensor), len(numbers))
                    if known == len(walk.tensors):
                        walk.tensors.append(tensor)
                    place = (number, name, "derived" if name in hidden else kind, known)
                    walk.places.append(place)
    return walk


def facts_of(walk: Walk) -> Any:
    """All that `describe` asks of a walk and of its tensors, as a key of plain values.

    None where the key would not show all: PEFT's layers change in ways of their own, and a tensor
    without a shape is an error.
    """
    if any(map(is_peft_class, {kind for kind, _, _ in walk.steps})):
        return None
    meshes: dict[int, tuple[Any, ...]] = {}
    facts: list[tuple[Any, ...]] = []
    for tensor in walk.tensors:
        placements = getattr(tensor, "placements", None)
        if placements is None:
            if is_lazy(tensor) or tensor.is_nested or hasattr(tensor, "global_shape"):
                return None
            kind = type(tensor)
            facts.append((tensor.shape, tensor.dtype, tensor.is_meta, tensor.layout, kind))
            continue
        mesh = tensor.device_mesh  # alive, as the tensor is
        on = meshes.get(id(mesh))
        if on is None:
            at = tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), places_in_groups(mesh)
            on = meshes[id(mesh)] = (len(meshes), *at)
        facts.append((tensor.shape, tensor.dtype, tensor.is_meta, placements, on))
    parts: list[bool] = []  # whether each module belongs to a frozen part that is never written to
    for part in walk.frozen:
        info = None if part is None else part.__dict__["anyrank_frozen"]
        parts.append(info is not None and info.tensors is not None and info.source is not None)
    return tuple(walk.steps), tuple(parts), tuple(walk.places), tuple(facts)


def describe(walk: Walk) -> Description:
    """The names and layouts of a model's tensors.

    Raises:
        LoadError: as `find_tensors`.
    """
    prefixes: list[tuple[str, str]] = []  # with torch's wrappers, and without
    for (kind, parent, name), frozen in zip(walk.steps, walk.frozen, strict=True):
        raw, clean = prefixes[parent] if prefixes else ("", "")
        if prefixes:
            raw += f"{name}."
            above = walk.modules[parent]
            hides = is_wrapping(above, name) or is_peft_wrapping(above, name)
            clean += "" if hides else f"{name}."
        prefixes.append((raw, clean))
        if frozen is None and _is_packed(kind):
            raise LoadError(
                f"{clean[:-1] or 'the model'}: is a {kind.__module__}.{kind.__name__}, whose "
                "weights are packed and no tensors of the model: load or save before it is "
                "quantised"
            )
        if issubclass(kind, FullyShardedDataParallel):
            raise LoadError(
                f"{raw[:-1] or 'the model'}: is wrapped by FullyShardedDataParallel (FSDP1), whose "
                "flat parameters are not the model's: load before it is wrapped, or use "
                "fully_shard (FSDP2)"
            )
    in_peft = [any(map(is_peft, path)) for path in walk.paths]
    found = Description([], [], [])
    for number, attribute, _, index in walk.places:
        raw, clean = prefixes[number]
        names = (raw + attribute,)
        if raw != clean:
            names += (clean + attribute,)
        if in_peft[number]:
            names = names_in_peft(names, walk.paths[number])
        found.names.append(names)
        if index < len(found.held):
            continue
        tensor = walk.tensors[index]
        if is_lazy(tensor):
            raise LoadError(
                f"{clean}{attribute}: is a lazy parameter without a shape: run the model once on "
                "an input, or build it with its sizes"
            )
        layout, coordinate = layout_of(tensor, names[0])
        found.held.append((global_shape(tensor), layout, coordinate))
        found.adapters.append(in_peft[number] and is_adapter(names[0], walk.paths[number]))
    return found


def put_together(walk: Walk, description: Description) -> list[ModelTensor]:
    """The tensors of a walk, as a description of it has them."""
    found: list[ModelTensor] = []
    for (number, attribute, kind, index), names in zip(walk.places, description.names, strict=True):
        place = Registration(names, walk.modules[number], attribute, walk.paths[number])
        if index < len(found):
            known = found[index]
            known.registrations.append(place)
            if known.kind == "derived":
                known.kind = kind
            continue
        held, adapter = description.held[index], description.adapters[index]
        tensor, frozen = walk.tensors[index], walk.frozen[number]
        found.append(ModelTensor(place.name, tensor, *held, kind, [place], adapter, frozen))
    return found


@cache
def _is_packed(kind: type[nn.Module]) -> bool:
    """Whether a class is of those that torch.ao puts in place of a quantised layer."""
    path = plain_of(kind).__module__
    return path.startswith("torch.ao.nn.") and "quantized" in path and "reference" not in path
