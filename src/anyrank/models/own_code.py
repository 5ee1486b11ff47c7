"""Code of modules that `load_state_dict` or `state_dict` runs: hooks, overrides, extra state.

`load` moves bytes, and does not call `load_state_dict`. Modules whose code might have changed
values are named in the report and at WARNING; extra state is passed to its module. Code of torch
itself, which only renames keys and counts versions, is not needed. The loader of transformers does
not run code of its modules either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.files.content_hash import BLOCK_BYTES
from anyrank.files.listing import EXTRA_STATE, Listing
from anyrank.files.reader import Reader
from anyrank.models.tensors import ModelTensor, NamedModule, find_modules, tensors_of
from anyrank.models.wrappers import plain_class
from anyrank.tensors.names import candidates
from anyrank.tensors.wrapped import values_of
from anyrank.world.ranks import Ranks

LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
SAVE_METHODS = ("state_dict", "_save_to_state_dict")
SAVE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
NOT_RUN = "overrides load_state_dict, and this code was not run"
OF_LIBRARIES = ("torch.", "transformers.", "anyrank.")


@dataclass(frozen=True)
class OwnCodeRun:
    """The outcome for extra state and code of modules.

    Attributes:
        ran: extra state that was passed to its module.
        not_run: modules whose code `load_state_dict` would have run, and extra state that was not
            passed -> why.
    """

    ran: list[str] = field(default_factory=list[str])
    not_run: dict[str, str] = field(default_factory=dict[str, str])


class OwnCode:
    """The modules of a model with load_state_dict code, and the extra state in a source.

    Args:
        modules: the modules of a model.
        listing: the source; None for a source without extra state.
        rename: maps its keys to the model's names.

    Attributes:
        modules: the modules with code for `load_state_dict`, by name.
        tensor_keys: keys of extra state in the source that is a tensor.
        takers: name of extra state -> the module that receives it.
        extras: extra state by name, in the form of `Listing.extras`.
        tensors: extra state that is a tensor, by name.
    """

    def __init__(
        self,
        modules: Sequence[NamedModule] = (),
        listing: Listing | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        self.modules = {p.name or "the model": p.module for p in modules if _loads_by_own_code(p)}
        self.takers = {
            _extra_name(owner): owner.module for owner in modules if _takes_extra_state(owner)
        }

        def named(keys: Iterable[str]) -> dict[str, str]:
            """Map name to key, for keys of extra state that a module receives."""
            names = {name: key for key in keys for name in candidates(rename(key))}
            return {name: names[name] for name in self.takers if name in names}

        extras = {} if listing is None else listing.extras
        tensors = {} if listing is None else listing.tensors
        keys = named(filter(_is_extra, tensors))
        self.extras = {name: extras[key] for name, key in named(extras).items()}
        self.tensors = {name: tensors[key] for name, key in keys.items()}
        self.tensor_keys = set(keys.values())

    def read_extras(self, listing: Listing, ranks: Ranks, reader: int) -> None:
        """Read the extra state that is a tensor, on rank `reader` for all ranks. Collective."""
        if not self.tensors:
            return

        def read() -> dict[str, tuple[Any]]:
            with Reader(listing, buffer_bytes=BLOCK_BYTES) as files:
                return {name: (files.read(stored),) for name, stored in self.tensors.items()}

        self.extras |= ranks.run_on_one("reading extra state", read, reader)

    def hand_over(self, filled: Sequence[ModelTensor]) -> OwnCodeRun:
        """Pass extra state to its modules; note modules with code that are above filled tensors.

        Raises:
            LoadError: a module's `set_extra_state` fails.
        """
        above = {id(m) for target in filled for entry in target.registrations for m in entry.path}
        done = OwnCodeRun()
        done.not_run.update(
            {name: NOT_RUN for name, module in self.modules.items() if id(module) in above}
        )
        for name, module in self.takers.items():
            if name not in self.extras:
                done.not_run[name] = "is not in the source, so the module keeps its own"
                continue
            extra = self.extras[name]
            if extra is None:
                done.not_run[name] = "is not plain data, so it was not restored"
                continue
            try:
                module.set_extra_state(extra[0])
            except Exception as error:
                raise LoadError(f"{name}: set_extra_state failed: {error}") from error
            done.ran.append(name)
        return done


def _takes_extra_state(owner: NamedModule) -> bool:
    """Return whether `load_state_dict` passes extra state to a module."""
    return type(owner.module).set_extra_state is not nn.Module.set_extra_state


def _loads_by_own_code(owner: NamedModule) -> bool:
    """Return whether `load_state_dict` would run the user's code for a module."""
    methods = ["_load_from_state_dict"]
    if not owner.name:  # torch does not call it for submodules
        methods.append("load_state_dict")
    return _has_own_code(owner.module, methods, LOAD_HOOKS)


def _saves_by_own_code(modules: Sequence[NamedModule]) -> bool:
    """Return whether `state_dict()` of a model runs the user's code."""
    return any(_has_own_code(owner.module, SAVE_METHODS, SAVE_HOOKS) for owner in modules)


def _has_own_code(module: nn.Module, methods: Iterable[str], hooks: Iterable[str]) -> bool:
    """Return whether one of these methods, or a hook in one of these dicts, is not from torch."""
    classes = plain_class(module).__mro__
    entries = [next(kind for kind in classes if name in vars(kind)) for name in methods]
    entries += [hook for name in hooks for hook in vars(module)[name].values()]
    return any(not str(getattr(e, "__module__", "")).startswith(OF_LIBRARIES) for e in entries)


def added_to_state_dict(module: nn.Module) -> list[str]:
    """Return the keys that code of modules adds to `state_dict()` in addition to tensors.

    Extra state does not count, and neither do values that belong to a tensor and are named below
    it, such as the scales of a quantized weight.
    """
    modules = find_modules(module)
    if not _saves_by_own_code(modules):
        return []
    known: set[str] = set()
    packed: set[str] = set()  # prefixes of modules whose code also saves the scales of a parameter
    for target in tensors_of(modules, with_packed=True):
        known.update(target.flat_names() if target.packed is None else target.packed.names)
        if target.packed is not None:
            packed.update(name.rpartition(".")[0] + "." for name in target.packed.names)
    return [
        key
        for key in module.state_dict()
        if not _is_extra(key)
        and known.isdisjoint(candidates(key))
        and not any(key.startswith(f"{name}.") for name in known)
        and key[: key.rfind(".") + 1] not in packed
    ]


def changed_in_state_dict(module: nn.Module) -> list[str]:
    """Return the names of tensors that code of modules replaces in `state_dict()`."""
    modules = find_modules(module)
    if not _saves_by_own_code(modules):
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
    return values_of(local).is_set_to(target.local())


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Map the names of extra state in a model to the values."""
    return {
        _extra_name(owner): owner.module.get_extra_state()
        for owner in find_modules(model)
        if type(owner.module).get_extra_state is not nn.Module.get_extra_state
    }


def _extra_name(owner: NamedModule) -> str:
    """Return the key of a module's extra state."""
    return f"{owner.name}.{EXTRA_STATE}" if owner.name else EXTRA_STATE


def _is_extra(key: str) -> bool:
    """Return whether a key is for extra state."""
    return key.rpartition(".")[2] == EXTRA_STATE
