"""Code of modules that runs in `load_state_dict` or `state_dict`: hooks, overrides, extra state.

`load` moves bytes and does not go through `load_state_dict`. A module that would change values on
the way is given the loaded values again, through its own code, where it holds its tensors whole;
where it does not, the report and a WARNING name it. Code of torch itself, which only renames and
counts versions, is not needed; transformers' own loader does not run its modules' either.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from anyrank.tensors.names import WRAPPERS, candidates
from anyrank.tensors.walk import places

LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
OF_LIBRARIES = ("torch.", "transformers.", "anyrank.")


@dataclass(frozen=True)
class OwnCodeRun:
    """What became of the modules' own code.

    Attributes:
        ran: names of the modules whose code was run.
        not_run: modules whose code `load_state_dict` would have run as well -> why it was not.
    """

    ran: list[str] = field(default_factory=list[str])
    not_run: dict[str, str] = field(default_factory=dict[str, str])


class OwnCode:
    """The modules of a model that have such code, and what a source holds for them.

    Attributes:
        tensor_keys: keys of the source that are the extra state of a module, and tensors.
        extras: extra state by name, as `Listing.extras` has it.
    """

    def __init__(self, model: nn.Module, listing: Listing, rename: Callable[[str], str]) -> None:
        path, top = _below_wrappers(model)
        own = _is_own(_definer(plain_class(top), "load_state_dict"))
        self.whole = top if own else None
        self.modules = list(_outermost(model, set())) if self.whole is None else [(path, top)]
        self.takers = [(n, m) for n, m in places(model) if _takes_extra(type(m))]
        self.extras = {
            name: value for key, value in listing.extras.items() for name in candidates(rename(key))
        }
        known = {name for path, _ in self.takers for name in candidates(_extra_key(path))}
        found = [(key, t) for key, t in listing.tensors.items() if _is_extra(key)]
        named = [(key, name, t) for key, t in found for name in candidates(rename(key))]
        self.tensor_keys = {key for key, name, _ in named if name in known}
        self.tensors = {name: stored for _, name, stored in named if name in known}
        self.versions = {
            name: version for path, version in listing.versions.items() for name in candidates(path)
        }

    def read_extras(self, listing: Listing) -> dict[str, tuple[Any]]:
        """The extra state that is a tensor, by the names that a module may have for it."""
        with Reader(listing, buffer_bytes=BLOCK_BYTES) as reader:
            return {name: (reader.read(stored),) for name, stored in self.tensors.items()}

    def run(self, filled: list[ModelTensor]) -> OwnCodeRun:
        """Run it on what was loaded, which is in place.

        Raises:
            LoadError: the code of a module fails.
        """
        ours = {id(module): path for path, module in self.modules}
        inside: dict[int, list[tuple[ModelTensor, str]]] = {}
        for target in filled if ours else ():
            for place in target.registrations:
                owner = next((id(m) for m in place.path if id(m) in ours), None)
                below = f"{ours[owner]}." if owner is not None and ours[owner] else ""
                if owner is not None and place.names[0].startswith(below):
                    entry = (target, place.names[0].removeprefix(below))
                    inside.setdefault(owner, []).append(entry)
        done = OwnCodeRun()
        for path, module in self.modules:
            mine = inside.get(id(module), [])
            obstacle = _obstacle(mine)
            if module is self.whole and _takes_others(module):
                obstacle = "has a load_state_dict of other arguments, which was not run"
            if obstacle:
                done.not_run[_title(path)] = obstacle
            elif mine:
                # Copies: the code may exchange names, or give back views.
                given = {name: target.tensor.detach().clone() for target, name in mine}
                self._run(path, module, given)
                done.ran.append(_title(path))
        for path, module in self.takers:
            self._give_extra(path, module, done)
        return done

    def _run(self, path: str, module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        given: Any = OrderedDict(state)
        given._metadata = {
            inner: {"version": version}
            for inner, _ in module.named_modules()
            if (version := self.versions.get(_plain(f"{path}.{inner}".strip(".")))) is not None
        }
        try:
            load = type(module) if module is self.whole else nn.Module
            load.load_state_dict(module, given, strict=False)
        except Exception as error:
            raise LoadError(
                f"{_title(path)}: its own load_state_dict code fails: {error}"
            ) from error

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


def _saves_by_own_code(module: nn.Module) -> bool:
    names = ("_state_dict_hooks", "_state_dict_pre_hooks")
    return any(
        _is_own(_definer(plain_class(inner), method))
        for inner in module.modules()
        for method in ("state_dict", "_save_to_state_dict")
    ) or any(_is_own(hook) for inner in module.modules() for hook in _hooks(inner, names))


def _extra_key(path: str) -> str:
    return f"{path}.{EXTRA_STATE}".lstrip(".")


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA_STATE


def _below_wrappers(model: nn.Module) -> tuple[str, nn.Module]:
    """The module whose `load_state_dict` a user calls, below those of torch's."""
    path: list[str] = []
    while type(model).__module__.startswith("torch."):
        inner = [(n, m) for n, m in model.named_children() if n in (*WRAPPERS, "module")]
        if not inner:
            break
        (name, model), *_ = inner
        path.append(name)
    return ".".join(path), model


def _takes_others(module: nn.Module) -> bool:
    """Whether it has a `load_state_dict` that cannot be called as torch's."""
    try:
        inspect.signature(type(module).load_state_dict).bind(module, {}, strict=False)
    except TypeError:
        return True
    return False


def _outermost(
    model: nn.Module, seen: set[nn.Module], path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The first modules from the root, each once, that have such code."""
    override = _is_own(_definer(plain_class(model), "_load_from_state_dict"))
    if model in seen:
        return
    seen.add(model)
    if override or any(map(_is_own, _hooks(model))):
        yield path, model
        return
    for name, child in model.named_children():
        yield from _outermost(child, seen, f"{path}.{name}".lstrip("."))


def _hooks(module: nn.Module, names: Sequence[str] = LOAD_HOOKS) -> list[Any]:
    return [hook for name in names for hook in vars(module)[name].values()]


def _is_own(entry: Any) -> bool:
    return not str(getattr(entry, "__module__", "")).startswith(OF_LIBRARIES)


@cache
def _definer(kind: type[nn.Module], method: str) -> type:
    """The class that a method of a module is from."""
    return next(c for c in kind.__mro__ if method in vars(c))


@cache
def _gives_extra(kind: type[nn.Module]) -> bool:
    return kind.get_extra_state is not nn.Module.get_extra_state


@cache
def _takes_extra(kind: type[nn.Module]) -> bool:
    return kind.set_extra_state is not nn.Module.set_extra_state


def _obstacle(mine: list[tuple[ModelTensor, str]]) -> str:
    if any(target.layout is not None for target, _ in mine):
        return "is sharded, and its own load_state_dict code was not run"
    if any(_has_source(target.frozen) for target, _ in mine):
        return "is frozen, and its own load_state_dict code was not run"
    if any(WRAPPERS.intersection(name.split(".")) for _, name in mine):
        return "has wrapped parts, and its own load_state_dict code was not run"
    return ""


def _has_source(part: Any) -> bool:
    """Whether a frozen part's values are not its parent's to load."""
    return part is not None and part.anyrank_frozen.source is not None


def _plain(path: str) -> str:
    return list(candidates(path))[-1]


def _title(path: str) -> str:
    return _plain(path) or "the model"
