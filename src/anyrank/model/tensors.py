"""The tensors of a model: their names, their layouts on the ranks, and which are tied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from anyrank.errors import LoadError
from anyrank.tensors.names import PEFT_SEGMENTS, WRAPPERS, TensorNames
from anyrank.tensors.sharded_tensor import ShardedTensor, layout_of

Kind = Literal["parameter", "buffer", "derived"]  # derived: a buffer that state_dict leaves out


@dataclass(slots=True)
class Registration:
    """A module's entry for a tensor: `module.<attribute>`.

    Attributes:
        names: the names that mean this entry, `named_parameters()`'s first.
        path: the modules from the root to `module`, both included.
    """

    names: tuple[str, ...]
    module: nn.Module
    attribute: str
    path: tuple[nn.Module, ...]

    @property
    def name(self) -> str:
        """The name below the wrappers: the one that the model's author knows."""
        return self.names[min(1, len(self.names) - 1)]


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
        """All names that a source may have for it."""
        return tuple([place.names for place in self.registrations])


def find_tensors(model: nn.Module) -> list[ModelTensor]:
    """Every parameter and buffer of the model, in registration order, ties joined.

    FSDP2 units that hold their parameters unsharded are resharded first, so that what is found is
    what the optimizer updates.

    Raises:
        LoadError: FSDP1, quantised or otherwise unreadable tensors, named with their type.
    """
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            raise LoadError(
                f"{path or 'the model'}: is wrapped by FullyShardedDataParallel (FSDP1), whose "
                "flat parameters are not the model's: load before it is wrapped, or use "
                "fully_shard (FSDP2)"
            )
    found: dict[int, ModelTensor] = {}
    for tensor, place, kind, is_adapter, frozen in _walk(model):
        known = found.get(id(tensor))
        if known is not None:
            known.registrations.append(place)
            if known.kind == "derived" and kind != "derived":
                known.kind = kind
            continue
        if is_lazy(tensor):
            raise LoadError(
                f"{place.name}: is a lazy parameter without a shape: run the model once on an "
                "input, or build it with its sizes"
            )
        layout, coordinate = layout_of(tensor, place.names[0])
        held = (place.name, tensor, tuple(tensor.shape), layout, coordinate)
        found[id(tensor)] = ModelTensor(*held, kind, [place], is_adapter, frozen)
    return list(found.values())


# What is registered, where, as what, whether by an adapter, and in which frozen part.
Registered = tuple[torch.Tensor, Registration, Kind, bool, nn.Module | None]


def _walk(model: nn.Module) -> Iterator[Registered]:
    """Tensors by module, parameters before buffers, through the children that frozen parts hide."""
    seen: set[int] = set()

    def visit(
        module: nn.Module,
        raw: str,
        clean: str,
        path: tuple[nn.Module, ...],
        frozen: nn.Module | None,
    ) -> Iterator[Registered]:
        if id(module) in seen:  # a module used twice holds the same tensors: one place is enough
            return
        seen.add(id(module))
        path = (*path, module)
        in_peft = any(map(_is_peft, path))
        frozen = frozen or (module if hasattr(module, "anyrank_frozen") else None)
        hidden: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        tables: tuple[tuple[Kind, dict[str, Any]], ...] = (
            ("parameter", module.__dict__["_parameters"]),  # named_parameters() takes 15 us
            ("buffer", module.__dict__["_buffers"]),
        )
        for kind, table in tables:
            for name, tensor in [*table.items()]:
                if tensor is None:
                    continue
                names = tuple(dict.fromkeys((raw + name, clean + name)))
                if in_peft:
                    names = _names_in_peft(names, path)
                is_adapter = in_peft and _is_adapter(names[0], path)
                place = Registration(names, module, name, path)
                yield tensor, place, "derived" if name in hidden else kind, is_adapter, frozen
        for name, child in module.__dict__["_modules"].items():
            if child is not None:
                step = "" if _is_wrapping(module, name) else f"{name}."
                yield from visit(child, f"{raw}{name}.", clean + step, path, frozen)

    yield from visit(model, "", "", (), None)


def _names_in_peft(plain: tuple[str, ...], path: tuple[nn.Module, ...]) -> tuple[str, ...]:
    """The names, and those without the adapter's, under which PEFT saves it."""
    adapter = next((m for m in path if _is_peft(m) and hasattr(m, "active_adapters")), None)
    names = [*plain]
    if adapter is not None:
        parts = plain[-1].split(".")
        known: set[str] = set(getattr(adapter, "active_adapters", ()))
        short = [p for p in parts if p not in known]
        if len(known) == 1 and len(short) != len(parts):
            names += [".".join(short), ".".join(p for p in short if p != "modules_to_save")]
            if short[-2:] == ["lora_magnitude_vector", "weight"]:  # PEFT saves it as the vector
                names.append(".".join(short[:-1]))
    return tuple(dict.fromkeys(names))


def _is_peft(module: nn.Module) -> bool:
    return _is_peft_class(type(module))


@cache
def _is_peft_class(kind: type[nn.Module]) -> bool:
    return _plain_of(kind).__module__.startswith("peft.")


def _is_wrapping(module: nn.Module, child: str) -> bool:
    """Whether a child's name is a wrapper's doing, and not the model's."""
    if child in WRAPPERS:
        return True
    if child == "module" and isinstance(module, DistributedDataParallel):
        return True
    if _is_peft(module):
        inner = child == "base_model" and hasattr(module, "peft_config")
        return inner or child in PEFT_SEGMENTS or (child == "model" and _is_tuner(module))
    return False


def _is_tuner(module: nn.Module) -> bool:
    """PEFT's middle layer between PeftModel and the user's model."""
    return hasattr(module, "targeted_module_names")


def _is_adapter(name: str, path: tuple[nn.Module, ...]) -> bool:
    """Whether the tensor belongs to an adapter: below a PEFT layer, and not in what that wraps."""
    parts = name.split(".")
    for depth, module in enumerate(path):
        below = parts[depth:]
        layer = _is_peft(module) and not hasattr(module, "peft_config")
        if layer and not _is_tuner(module) and hasattr(module, "active_adapters"):
            return not PEFT_SEGMENTS.intersection(below) and "modules_to_save" not in below
    return False


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote, without those that FSDP2 and `freeze` put in front of it."""
    return _plain_of(type(module))


def _plain_of(kind: type[nn.Module]) -> type[nn.Module]:
    """`plain_class` of a class."""
    while True:
        order = kind.__mro__
        if "anyrank_plain_class" in vars(kind):
            kind = vars(kind)["anyrank_plain_class"]
        elif FSDPModule in order[1:2]:
            kind = order[2]
        else:
            return kind
