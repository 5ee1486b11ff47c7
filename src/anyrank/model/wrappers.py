"""What wrappers put around a model, torch's and PEFT's, and the names that come of it."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from anyrank.tensors.names import PEFT_SEGMENTS, WRAPPERS

Path: TypeAlias = "tuple[nn.Module, ...]"
PROMPTS = ["prompt_encoder", "embedding", "weight"]  # of PEFT's prompt methods, but for the adapter


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


def names_in_peft(plain: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """The names, and those without the adapter's, under which PEFT saves it."""
    adapter = next((m for m in path if is_peft(m) and hasattr(m, "active_adapters")), None)
    known: set[str] = set(getattr(adapter, "active_adapters", ()))
    own = below_wrappers(plain[0], path)
    names = [*plain, own]
    if len(known) == 1 and known.intersection(plain[-1].split(".")):
        names.append(".".join(p for p in own.split(".") if p not in known))
        short = [p for p in plain[-1].split(".") if p not in known]
        names += [".".join(short), ".".join(p for p in short if p != "modules_to_save")]
        if short[-2:] == ["lora_magnitude_vector", "weight"]:  # PEFT saves it as the vector
            names.append(".".join(short[:-1]))
        if short == PROMPTS and _is_saved_whole(path[-2]):
            names.append("prompt_embeddings")
    return tuple(dict.fromkeys(names))


def _is_saved_whole(encoder: nn.Module) -> bool:
    """Whether PEFT saves the embedding of a prompt encoder, and not what others compute of it."""
    return all(name == "embedding" for name, _ in encoder.named_children()) and not any(
        True for _ in encoder.parameters(recurse=False)
    )


def is_peft(module: nn.Module) -> bool:
    """Whether a module's class is of PEFT."""
    return is_peft_class(type(module))


@cache
def is_peft_class(kind: type[nn.Module]) -> bool:
    return plain_of(kind).__module__.startswith("peft.")


def is_wrapping(module: nn.Module, child: str) -> bool:
    """Whether a child's name is a wrapper's doing, and not the model's."""
    if child in WRAPPERS:
        return True
    if child == "module" and isinstance(module, DistributedDataParallel):
        return True
    if is_peft(module):
        inner = child == "base_model" and hasattr(module, "peft_config")
        outer = child in PEFT_SEGMENTS or child == "token_adapter"
        return inner or outer or (child == "model" and _is_tuner(module))
    return False


def _is_tuner(module: nn.Module) -> bool:
    """PEFT's middle layer between PeftModel and the user's model."""
    return hasattr(module, "targeted_module_names")


def is_adapter(name: str, path: Path) -> bool:
    """Whether the tensor belongs to an adapter: below a PEFT layer, and not in what that wraps, or
    beside the model in what holds all of it (prompts, tables that layers share).
    """
    parts = name.split(".")
    for depth, module in enumerate(path):
        below = parts[depth:]
        if not is_peft(module):
            continue
        if hasattr(module, "peft_config") or _is_tuner(module):
            if not is_wrapping(module, below[0]):
                return True
        elif hasattr(module, "active_adapters"):
            return not PEFT_SEGMENTS.intersection(below) and "modules_to_save" not in below
    return False


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote, without those that FSDP2 and `freeze` put in front of it."""
    return plain_of(type(module))


def plain_copy(module: nn.Module, made: dict[int, nn.Module] | None = None) -> Any:
    """The same module tree in the classes that the user wrote; the copies share all else.

    Args:
        module: stays as it is.
        made: gets the copy of each module, by the module's id.
    """
    made = {} if made is None else made
    if id(module) not in made:
        kind = plain_class(module)
        copy: Any = kind.__new__(kind)
        made[id(module)] = copy
        copy.__dict__ = dict(module.__dict__)
        copy.__dict__["_modules"] = {
            name: None if child is None else plain_copy(child, made)
            for name, child in module.__dict__["_modules"].items()
        }
    return made[id(module)]


def plain_of(kind: type[nn.Module]) -> type[nn.Module]:
    """`plain_class` of a class."""
    while True:
        order = kind.__mro__
        if "anyrank_plain_class" in vars(kind):
            kind = vars(kind)["anyrank_plain_class"]
        elif FSDPModule in order[1:2]:
            kind = order[2]
        else:
            return kind
