"""What modules' own code adds to `state_dict()`, or changes in it, and their extra state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anyrank.files.listing import EXTRA_STATE
from anyrank.models.own_code import save_by_own_code
from anyrank.models.tensors import ModelTensor, NamedModule, find_modules, tensors_of
from anyrank.tensors.names import candidates


def added_to_state_dict(module: nn.Module) -> list[str]:
    """Keys that its modules' own code adds to `state_dict()`, and that are no tensors of it.

    Extra state is no such key, nor what belongs to a tensor and is named below it, as the scales
    of a quantised weight.
    """
    modules = find_modules(module)
    if not save_by_own_code(modules):
        return []
    known = {name for target in tensors_of(modules) for name in target.flat_names()}
    return [
        key
        for key in module.state_dict()
        if not is_extra(key)
        and known.isdisjoint(candidates(key))
        and not any(key.startswith(f"{name}.") for name in known)
    ]


def changed_in_state_dict(module: nn.Module) -> list[str]:
    """Names of tensors that its modules' own code replaces in `state_dict()`."""
    modules = find_modules(module)
    if not save_by_own_code(modules):
        return []
    state: dict[str, Any] = module.state_dict()
    by_name = {target.registrations[0].raw: target for target in tensors_of(modules)}
    return [
        name
        for name, target in by_name.items()
        if isinstance(value := state.get(name), torch.Tensor) and not _is_same(target, value)
    ]


def _is_same(target: ModelTensor, value: Any) -> bool:
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.is_set_to(target.local())


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Name of extra state -> its value, of the modules of a model that have some."""
    return {
        extra_name(owner): owner.module.get_extra_state()
        for owner in find_modules(model)
        if type(owner.module).get_extra_state is not nn.Module.get_extra_state
    }


def extra_name(owner: NamedModule) -> str:
    """The key of a module's extra state."""
    return f"{owner.name}.{EXTRA_STATE}" if owner.name else EXTRA_STATE


def is_extra(key: str) -> bool:
    """Whether a key is of extra state."""
    return key.rpartition(".")[2] == EXTRA_STATE
