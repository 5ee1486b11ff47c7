"""What torch's wrappers put around a model, and the names that come of it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from anyrank.frozen.freeze import without_answers
from anyrank.tensors.names import WRAPPERS

Path: TypeAlias = "tuple[nn.Module, ...]"


class Registration(NamedTuple):
    """A module's entry for a tensor: `module.<attribute>`.

    Attributes:
        names: the names that mean this entry, `named_parameters()`'s first.
        path: the modules from the root to `module`, both included.
    """

    names: tuple[str, ...]
    module: nn.Module
    attribute: str
    path: Path

    @property
    def name(self) -> str:
        """The name below the wrappers: the one that the model's author knows."""
        return self.names[1 if len(self.names) > 1 else 0]


def below_wrappers(name: str, path: Path) -> str:
    """A tensor's name without what torch's wrappers add; what PEFT adds is kept, or a dict's key.

    Args:
        name: of the tensor below the root, with the wrappers.
        path: the modules from the root to its owner.
    """
    parts = name.split(".")
    owners = (*path, *[None] * len(parts))
    return ".".join(
        part for part, owner in zip(parts, owners, strict=False) if not _is_torchs(owner, part)
    )


def _is_torchs(module: nn.Module | None, child: str) -> bool:
    """Whether a child's name is the doing of a wrapper of torch's."""
    if child in WRAPPERS:
        return module is not None and child in module.__dict__["_modules"]
    return child == "module" and isinstance(module, DistributedDataParallel)


def is_wrapping(module: nn.Module, child: str) -> bool:
    """Whether a child's name is a wrapper's doing, and not the model's."""
    return child in WRAPPERS or (child == "module" and isinstance(module, DistributedDataParallel))


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote, without what FSDP2 puts in front of it."""
    return plain_of(type(module))


def plain_copy(module: nn.Module, made: dict[int, nn.Module] | None = None) -> Any:
    """The same module tree, not frozen, in the classes that the user wrote; all else is shared.

    Args:
        module: stays as it is.
        made: gets the copy of each module, by the module's id.
    """
    made = {} if made is None else made
    if id(module) not in made:
        kind = plain_class(module)
        copy: Any = kind.__new__(kind)
        made[id(module)] = copy
        copy.__dict__ = without_answers(module.__dict__)
        copy.__dict__["_modules"] = {
            name: None if child is None else plain_copy(child, made)
            for name, child in module.__dict__["_modules"].items()
        }
    return made[id(module)]


def plain_of(kind: type[nn.Module]) -> type[nn.Module]:
    """`plain_class` of a class."""
    while True:
        order = kind.__mro__
        if FSDPModule not in order[1:2]:
            return kind
        kind = order[2]
