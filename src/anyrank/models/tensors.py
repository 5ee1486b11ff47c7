"""The tensors of a model: their names, their layouts on the ranks, and which are tied."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from anyrank.errors import LoadError
from anyrank.models.dialects.peft.names import (
    is_in_adapter,
    is_peft,
    part_of_name,
    saved_names,
)
from anyrank.models.dtensors import Lay, global_shape, layout_of
from anyrank.models.frozen_parts import frozen_info
from anyrank.models.wrappers import (
    Kind,
    ModelTensor,
    Path,
    Registration,
    is_whole_wrapper,
    is_wrapping,
    plain_of,
)
from anyrank.tensors.names import WRAPPERS
from anyrank.tensors.torch_classes import is_fsdp1, is_fsdp2
from anyrank.tensors.wrapped import packed_parts

# nn.Module registers its tensors in these dicts; named_parameters() would take 15 us per tensor.
REGISTRIES: tuple[tuple[Kind, str], ...] = (("parameter", "_parameters"), ("buffer", "_buffers"))


def in_state_dict(targets: Iterable[ModelTensor]) -> list[ModelTensor]:
    """Return the tensors that a checkpoint holds or checks: all except derived buffers."""
    return [target for target in targets if target.kind != "derived"]


class NamedModule(NamedTuple):
    """A module and its position in the model.

    Attributes:
        module: in several places if it is registered under several names.
        raw, unwrapped, name: its name with all additions of wrappers; without torch's additions;
            and also without PEFT's. Empty for the model.
        path: the modules from the root to it, both included.
        in_peft: whether a module of the path belongs to PEFT.
        frozen: the module passed to `freeze()` to which it belongs, if any: the innermost with its
            own source, else the outermost.
        is_inner: whether it belongs to a model that the root only wraps.
    """

    module: nn.Module
    raw: str
    unwrapped: str
    name: str
    path: Path
    in_peft: bool
    frozen: nn.Module | None
    is_inner: bool = False

    def registration(self, attribute: str) -> Registration:
        """Return the entry of one of the module's tensors."""
        name, unwrapped = _join(self.name, attribute), _join(self.unwrapped, attribute)
        aliases = saved_names(name, unwrapped, self.path) if self.in_peft else ()
        raw = _join(self.raw, attribute)
        inner = name.removeprefix("module.") if self.is_inner else ""
        return Registration(raw, unwrapped, name, aliases, self.module, attribute, self.path, inner)


class ModelTree(NamedTuple):
    """A model's modules and tensors, which one call finds once.

    Attributes:
        modules: the modules, as `find_modules` returns them: the model first.
        tensors: the tensors, as `find_tensors` returns them.
    """

    modules: Sequence[NamedModule]
    tensors: list[ModelTensor]

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self.modules[0].module


def find_tree(model: nn.Module, *, with_packed: bool = False) -> ModelTree:
    """Find the modules and tensors of a model; see `find_modules` and `find_tensors`, also for the
    errors.
    """
    modules = find_modules(model)
    return ModelTree(modules, tensors_of(modules, with_packed=with_packed))


def find_modules(model: nn.Module) -> list[NamedModule]:
    """Return the modules of a model, parents first, including the children of frozen parts.

    The walk stops at a module that refers to a parent, which torch allows.

    Raises:
        LoadError: an FSDP1 or quantized module, whose tensors are not those of the model.
    """
    modules: list[NamedModule] = []
    pending = [NamedModule(model, "", "", "", (), False, None)]
    has_peft = "peft" in sys.modules  # otherwise no module belongs to it
    while pending:
        module, raw, unwrapped, name, path, in_peft, frozen, is_inner = pending.pop()
        children: dict[str, nn.Module | None] = module.__dict__["_modules"]
        if children and any(module is above for above in path):
            continue
        info = frozen_info(module)
        # A part with a source takes its weights from that source, even inside a larger frozen part.
        if info is not None and (frozen is None or info.source is not None):
            frozen = module
        _check_class(module, raw, name, frozen)
        path = (*path, module)
        in_peft = in_peft or (has_peft and is_peft(module))
        modules.append(NamedModule(module, raw, unwrapped, name, path, in_peft, frozen, is_inner))
        is_inner = is_inner or (name == "" and is_whole_wrapper(module))
        for key, child in reversed(children.items()):
            if child is not None:
                of_torch = is_wrapping(module, key)
                part = part_of_name(module, key, path) if in_peft else key
                names = (
                    _join(raw, key),
                    unwrapped if of_torch else _join(unwrapped, key),
                    name if of_torch or not part else _join(name, part),
                )
                pending.append(NamedModule(child, *names, path, in_peft, frozen, is_inner))
    return modules


def _check_class(module: nn.Module, raw: str, name: str, frozen: nn.Module | None) -> None:
    """Raise LoadError if the class is FSDP1's or quantized."""
    kind = type(module)
    if frozen is None and _is_packed(kind):
        raise LoadError(
            f"{name or 'the model'}: is a {kind.__module__}.{kind.__name__}, whose weights are "
            "packed and are not tensors of the model. Load or save the model before you quantize "
            "it."
        )
    if is_fsdp1(module):
        raise LoadError(
            f"{raw or 'the model'}: is wrapped by FullyShardedDataParallel (FSDP1), whose flat "
            "parameters are not those of the model. Load the model before you wrap it, or use "
            "fully_shard (FSDP2)."
        )


def find_tensors(model: nn.Module, *, with_packed: bool = False) -> list[ModelTensor]:
    """Return every parameter and buffer of the model, in registration order, ties joined.

    FSDP2 units whose parameters are unsharded are resharded first, so that the tensors are those
    that the optimizer updates.

    Args:
        model: the model.
        with_packed: whether to list the plain tensors that frozen quantized parameters are made
            of, in place of an error.

    Raises:
        LoadError: FSDP1, quantized or otherwise unreadable tensors, named with their type; two
            tensors whose names differ only in the additions of wrappers.
    """
    return tensors_of(find_modules(model), with_packed=with_packed)


def tensors_of(modules: Sequence[NamedModule], *, with_packed: bool = False) -> list[ModelTensor]:
    """Do what `find_tensors` does, for a model whose modules are known."""
    for owner in modules:
        if is_fsdp2(owner.module):
            owner.module.reshard()
    tensors: dict[int, ModelTensor] = {}
    layouts: dict[Any, Lay] = {}  # a model has few layouts, and torch takes 7 us for one
    is_wrapped = False
    for owner in modules:
        is_wrapped = is_wrapped or owner.raw != owner.unwrapped
        module = owner.module
        derived: set[str] = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        for kind, registry in REGISTRIES:
            for attribute, tensor in module.__dict__[registry].items():
                if tensor is None:
                    continue
                kind_there: Kind = "derived" if attribute in derived else kind
                known = tensors.get(id(tensor))
                if known is None:
                    parts = _packed_targets(tensor, owner, attribute) if with_packed else []
                    for target in parts or [
                        _model_tensor(tensor, kind_there, owner, attribute, layouts)
                    ]:
                        tensors[id(target.tensor)] = target
                    continue
                known.registrations.append(owner.registration(attribute))
                if known.kind == "derived":  # a checkpoint has it if one of its modules saves it
                    known.kind = kind_there
    if is_wrapped:  # otherwise names are paths to tensors, which are unique
        _check_names(tensors.values())
    return list(tensors.values())


def _check_names(tensors: Iterable[ModelTensor]) -> None:
    """Check that no two tensors have names that differ only in the additions of wrappers.

    Raises:
        LoadError: two tensors have such names; the error names both.
    """
    known: dict[str, tuple[ModelTensor, str]] = {}  # the tensor, and its whole name
    for tensor in tensors:
        for entry in tensor.registrations:
            first, raw = known.setdefault(entry.unwrapped, (tensor, entry.raw))
            if first is not tensor:
                raise LoadError(
                    f"{raw} and {entry.raw} have the same name, {entry.unwrapped}, without the "
                    f"prefixes of torch's wrappers ({', '.join(sorted(WRAPPERS))}), so no file can "
                    "distinguish them. Rename the inner module."
                )


def _packed_targets(tensor: Any, owner: NamedModule, attribute: str) -> list[ModelTensor]:
    """Return the tensors that a frozen quantized parameter is made of; none for other tensors."""
    if not isinstance(tensor, nn.Parameter) or tensor.requires_grad or is_lazy(tensor):
        return []
    packed = owner.registration(attribute)
    return [
        replace(
            _model_tensor(part, "parameter", owner, f"{attribute}.{name}".rstrip("."), {}),
            packed=packed,
        )
        for name, part in packed_parts(tensor).items()
    ]


def _model_tensor(
    tensor: Any, kind: Kind, owner: NamedModule, attribute: str, layouts: dict[Any, Lay]
) -> ModelTensor:
    """Make a tensor's entry for the first module that has it.

    Raises:
        LoadError: it has no shape yet, or its layout cannot be read.
    """
    entry = owner.registration(attribute)
    if is_lazy(tensor):
        raise LoadError(
            f"{entry.name}: is a lazy parameter without a shape. Run the model once on an input, "
            "or build it with its sizes."
        )
    layout, coordinate = layout_of(tensor, entry.raw, layouts)
    return ModelTensor(
        name=entry.name,
        tensor=tensor,
        shape=global_shape(tensor),
        layout=layout,
        coordinate=coordinate,
        kind=kind,
        registrations=[entry],
        adapter=owner.in_peft and is_in_adapter(entry),
        frozen=owner.frozen,
    )


def _join(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute


@cache
def _is_packed(kind: type[nn.Module]) -> bool:
    """Return whether a class of torch.ao replaces quantized layers."""
    path = plain_of(kind).__module__
    return path.startswith("torch.ao.nn.") and "quantized" in path and "reference" not in path
