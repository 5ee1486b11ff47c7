"""Code of modules that `load_state_dict` or `state_dict` would run: hooks, overrides, extra state.

`load` moves bytes and does not go through `load_state_dict`. Modules whose code might have changed
values on the way are named in the report and at WARNING; extra state is handed to its module. Code
of torch itself, which only renames and counts versions, is not needed; transformers' own loader
does not run its modules' either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from anyrank.errors import LoadError
from anyrank.files.content_hash import BLOCK_BYTES
from anyrank.files.listing import EXTRA_STATE, Listing
from anyrank.files.reader import Reader
from anyrank.model.tensors import ModelTensor, find_tensors
from anyrank.model.wrappers import plain_class
from anyrank.tensors.names import candidates
from anyrank.tensors.walk import places

LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
SAVES = ("state_dict", "_save_to_state_dict")
SAVE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
OF_LIBRARIES = ("torch.", "transformers.", "anyrank.")
WHOLE = "the model"
NOT_RUN = "has load_state_dict code of its own, which was not run"


@dataclass(frozen=True)
class OwnCodeRun:
    """What became of the modules' own code.

    Attributes:
        ran: the extra state that was handed over.
        not_run: modules whose code `load_state_dict` would have run, and extra state that was not
            handed over -> why.
    """

    ran: list[str] = field(default_factory=list[str])
    not_run: dict[str, str] = field(default_factory=dict[str, str])


class OwnCode:
    """The modules of a model that have such code, and what a source holds for them.

    Attributes:
        modules: those with code for `load_state_dict`, by name without wrappers.
        tensor_keys: keys of the source that are the extra state of a module, and tensors.
        extras: extra state by name, as `Listing.extras` has it.
    """

    def __init__(self, model: nn.Module, listing: Listing, rename: Callable[[str], str]) -> None:
        self.modules = [
            (_title(path), module)
            for path, module in places(model)
            if _loads_by_own_code(path, module)
        ]
        self.takers = [(n, m) for n, m in places(model) if _takes_extra(type(m))]
        self.extras = {
            name: value for key, value in listing.extras.items() for name in candidates(rename(key))
        }
        known = {name for path, _ in self.takers for name in candidates(_extra_key(path))}
        found = [(key, t) for key, t in listing.tensors.items() if _is_extra(key)]
        named = [(key, name, t) for key, t in found for name in candidates(rename(key))]
        self.tensor_keys = {key for key, name, _ in named if name in known}
        self.tensors = {name: stored for _, name, stored in named if name in known}

    def read_extras(self, listing: Listing) -> dict[str, tuple[Any]]:
        """The extra state that is a tensor, by the names that a module may have for it."""
        with Reader(listing, buffer_bytes=BLOCK_BYTES) as reader:
            return {name: (reader.read(stored),) for name, stored in self.tensors.items()}

    def hand_over(self, filled: Sequence[ModelTensor]) -> OwnCodeRun:
        """Give modules their extra state, and name those above what was filled that have code.

        Raises:
            LoadError: `set_extra_state` of a module fails.
        """
        places_filled = [place for target in filled for place in target.registrations]
        above = {id(module) for place in places_filled for module in place.path}
        not_run = {name: NOT_RUN for name, module in self.modules if id(module) in above}
        done = OwnCodeRun(not_run=not_run)
        for path, module in self.takers:
            self._give_extra(path, module, done)
        return done

    def _give_extra(self, path: str, module: nn.Module, done: OwnCodeRun) -> None:
        key = _extra_key(path)
        name = next((name for name in candidates(key) if name in self.extras), None)
        if name is None:
            done.not_run[_title(key)] = "is not in the source, and the module keeps its own"
            return
        extra = self.extras[name]
        if extra is None:
            done.not_run[_title(key)] = "is not plain data, and was not restored"
            return
        try:
            module.set_extra_state(extra[0])
        except Exception as error:
            raise LoadError(f"{_title(path)}: set_extra_state fails: {error}") from error
        done.ran.append(_title(key))


def added_to_state_dict(module: nn.Module) -> list[str]:
    """Keys that its modules' own code adds to `state_dict()`, and that are no tensors of it.

    Extra state is no such key, nor what belongs to a tensor and is named below it, as the scales
    of a quantised weight.
    """
    if not _saves_by_own_code(module):
        return []
    known = {name for target in find_tensors(module) for name in target.flat_names()}
    return [
        key
        for key in module.state_dict()
        if not _is_extra(key)
        and known.isdisjoint(candidates(key))
        and not any(key.startswith(f"{name}.") for name in known)
    ]


def changed_in_state_dict(module: nn.Module) -> list[str]:
    """Names of tensors that its modules' own code replaces in `state_dict()`."""
    if not _saves_by_own_code(module):
        return []
    own = {t.flat_names()[0]: t for t in find_tensors(module)}
    given: dict[str, Any] = module.state_dict()
    return [
        name
        for name, held in own.items()
        if isinstance(value := given.get(name), torch.Tensor) and not _is_same(held, value)
    ]


def _is_same(held: ModelTensor, value: Any) -> bool:
    local = value.to_local() if hasattr(value, "to_local") else value
    mine = held.local()
    return (local.data_ptr(), local.shape, local.stride()) == (
        mine.data_ptr(),
        mine.shape,
        mine.stride(),
    )


def extra_states(model: nn.Module) -> list[str]:
    """The keys of extra state that modules of a model have."""
    return [_title(_extra_key(path)) for path, m in places(model) if _gives_extra(type(m))]


def _loads_by_own_code(path: str, module: nn.Module) -> bool:
    methods = ["_load_from_state_dict"]
    if _title(path) == WHOLE:  # of modules inside, torch does not call it
        methods.append("load_state_dict")
    return _has_own_code(module, methods, LOAD_HOOKS)


def _saves_by_own_code(module: nn.Module) -> bool:
    return any(_has_own_code(inner, SAVES, SAVE_HOOKS) for inner in module.modules())


def _has_own_code(module: nn.Module, methods: Iterable[str], hooks: Iterable[str]) -> bool:
    """Whether one of these methods, or a hook in one of these tables, is of the user's."""
    entries = [_definer(plain_class(module), method) for method in methods]
    return any(
        map(_is_own, (*entries, *(h for name in hooks for h in vars(module)[name].values())))
    )


def _is_own(entry: Any) -> bool:
    return not str(getattr(entry, "__module__", "")).startswith(OF_LIBRARIES)


@cache
def _definer(kind: type[nn.Module], method: str) -> type:
    """The class that a method of a module is from."""
    return next(c for c in kind.__mro__ if method in vars(c))


def _extra_key(path: str) -> str:
    return f"{path}.{EXTRA_STATE}".lstrip(".")


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA_STATE


@cache
def _gives_extra(kind: type[nn.Module]) -> bool:
    return kind.get_extra_state is not nn.Module.get_extra_state


@cache
def _takes_extra(kind: type[nn.Module]) -> bool:
    return kind.set_extra_state is not nn.Module.set_extra_state


def _title(path: str) -> str:
    """A module's or a key's name without what wrappers add."""
    return list(candidates(path))[-1] or WHOLE
