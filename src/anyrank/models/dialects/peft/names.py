"""PEFT's additions to a model's names, and which tensors belong to adapters.

PEFT has no public interface for these questions, so this package, and no other, reads attributes of
PEFT's modules. What a key in a file tells about PEFT is in `tensors/names.py`.
"""

from __future__ import annotations

from functools import cache

from torch import nn

from anyrank.models.wrappers import Path, Registration, plain_of
from anyrank.tensors.names import PEFT_SEGMENTS
from anyrank.versions import warn_if_untested

# Name of the table of prompt methods, without the adapter's.
PROMPTS = ["prompt_encoder", "embedding", "weight"]


def is_peft(module: nn.Module) -> bool:
    """Return whether a module's class belongs to PEFT."""
    return _is_peft_class(type(module))


@cache
def _is_peft_class(kind: type[nn.Module]) -> bool:
    return plain_of(kind).__module__.startswith("peft.")


def is_adapter_layer(module: nn.Module) -> bool:
    """Return whether a module is a PEFT layer around a layer of the model."""
    return is_peft(module) and hasattr(module, "active_adapters")


def part_of_name(module: nn.Module, child: str, path: Path) -> str:
    """Return what a child adds to names: "" if PEFT has inserted the module.

    A PEFT layer around another one, such as for two parameters of one module, keeps the inner one's
    `base_layer`, because both have a lora_A.

    Args:
        module: a module that belongs to PEFT or is below one that does.
        child: the child's attribute.
        path: the modules from the root to the module, both included.
    """
    if _hides(module, child):
        return ""
    return ".".join([*["base_layer"] * _layers_around(module, path), child])


def saved_names(name: str, unwrapped: str, path: Path) -> tuple[str, ...]:
    """Return the names, without the adapter's, under which PEFT saves a tensor.

    The arguments are those of a `Registration`.
    """
    warn_if_untested("peft")
    layer = next((m for m in path if is_adapter_layer(m)), None)
    active: set[str] = set(getattr(layer, "active_adapters", ()))
    if len(active) != 1 or active.isdisjoint(name.split(".")):
        return ()
    long, short = (
        [part for part in full.split(".") if part not in active] for full in (unwrapped, name)
    )
    names = [long, short, [part for part in short if part != "modules_to_save"]]
    if short[-2:] == ["lora_magnitude_vector", "weight"]:  # PEFT saves it as the vector
        names.append(short[:-1])
    if short == PROMPTS and _is_saved_whole(path[-2]):
        names.append(["prompt_embeddings"])
    return tuple(".".join(parts) for parts in names)


def is_in_adapter(entry: Registration) -> bool:
    """Return whether a tensor belongs to an adapter.

    Such tensors are below a PEFT layer, but not in the module that it wraps; or next to the model
    in the PEFT module around it (prompts, tables that layers share).
    """
    parts = entry.raw.split(".")
    for depth, module in enumerate(entry.path):
        below = parts[depth:]
        if not is_peft(module):
            continue
        if hasattr(module, "peft_config") or hasattr(module, "targeted_module_names"):
            if not _hides(module, below[0]):
                return True
        elif hasattr(module, "active_adapters") and not _hides(module, below[0]):
            return "modules_to_save" not in below
    return False


def _hides(module: nn.Module, child: str) -> bool:
    """Return whether a child's name is from PEFT, and not from the model's author."""
    if not is_peft(module):
        return False
    if child == "base_model":
        return hasattr(module, "peft_config")
    if child == "model":  # in PEFT's middle layer, between PeftModel and the user's model
        return hasattr(module, "targeted_module_names")
    return child in PEFT_SEGMENTS or child == "token_adapter"


def _layers_around(module: nn.Module, path: Path) -> int:
    """Return how many PEFT layers wrap the last layer of the path, one inside the other."""
    count = 0
    for outer in reversed(path[:-1]):
        if (
            not is_adapter_layer(outer)
            or outer.__dict__["_modules"].get("base_layer") is not module
        ):
            break
        module, count = outer, count + 1
    return count


def _is_saved_whole(encoder: nn.Module) -> bool:
    """Return whether PEFT saves a prompt encoder's embedding, and not values computed from it."""
    return all(name == "embedding" for name, _ in encoder.named_children()) and not any(
        True for _ in encoder.parameters(recurse=False)
    )
