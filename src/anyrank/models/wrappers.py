"""The places of a tensor in a model, and torch's wrappers around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anyrank.models.frozen_parts import frozen_info
from anyrank.tensors.names import WRAPPERS, TensorNames
from anyrank.tensors.sharded_tensor import ShardedTensor
from anyrank.tensors.torch_classes import fsdp2_class

Kind = Literal["parameter", "buffer", "derived"]  # derived: a buffer that is not in state_dict()
Path: TypeAlias = "tuple[nn.Module, ...]"


class Registration(NamedTuple):
    """A module's entry for a tensor: `module.<attribute>`.

    Attributes:
        raw: its name with all additions of wrappers, as in `named_parameters()`.
        unwrapped: its name without the additions of torch's wrappers.
        name: its name also without PEFT's additions: the one that the model's author knows.
        aliases: additional names under which PEFT saves it.
        module: the owning module.
        attribute: attribute of the owner.
        path: the modules from the root to the owner, both included.
        inner: its name in the model that the root only wraps; "" if the root is not a wrapper.
    """

    raw: str
    unwrapped: str
    name: str
    aliases: tuple[str, ...]
    module: nn.Module
    attribute: str
    path: Path
    inner: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a source may have for it, each once, the best first."""
        if self.raw == self.name and not self.aliases and not self.inner:
            return (self.raw,)
        names = (self.raw, self.name, self.unwrapped, *self.aliases, self.inner)
        return tuple(dict.fromkeys(filter(None, names)))


@dataclass
class ModelTensor(ShardedTensor):
    """One tensor of the model, with all its names.

    Attributes:
        kind: parameter, buffer, or derived (a non-persistent buffer).
        registrations: its places in the model; several if it is tied.
        adapter: whether it belongs to an adapter of PEFT, which a base checkpoint does not have.
        frozen: the module passed to `freeze()` to which it belongs, if any.
        packed: the parameter whose class computes its values from this tensor, if any.
    """

    kind: Kind
    registrations: list[Registration]
    adapter: bool = False
    frozen: nn.Module | None = None
    packed: Registration | None = None

    @property
    def is_pinned(self) -> bool:
        """True if it is never written to: it is real, and in a whole frozen part with a source."""
        info = None if self.frozen is None else frozen_info(self.frozen)
        if info is None or info.source is None:
            return False
        return info.tensors is not None and not self.is_meta

    def all_names(self) -> TensorNames:
        """Return the names that a source may have for it, by registration."""
        return tuple([entry.names for entry in self.registrations])

    def flat_names(self) -> list[str]:
        """Return the names that a source may have for it."""
        return [name for entry in self.registrations for name in entry.names]


def is_whole_wrapper(module: nn.Module) -> bool:
    """Return whether a root only wraps a model whose names then start with "module.": torch's
    AveragedModel, timm's ModelEma. Files also have such an average under the model's names.
    """
    has_more = [*module.__dict__["_modules"]] != ["module"] or module.__dict__["_parameters"]
    return not has_more and not is_wrapping(module, "module")


def is_wrapping(module: nn.Module, child: str) -> bool:
    """Return whether a child's name comes from a wrapper, and not from the model."""
    return child in WRAPPERS or (child == "module" and isinstance(module, DistributedDataParallel))


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the user wrote, without the class that FSDP2 adds."""
    return plain_of(type(module))


def plain_of(kind: type[nn.Module]) -> type[nn.Module]:
    """Do what `plain_class` does, for a class."""
    while True:
        order = kind.__mro__
        if fsdp2_class() not in order[1:2]:
            return kind
        kind = order[2]
