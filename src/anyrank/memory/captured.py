"""What a function uses besides its arguments: modules, random generators, and captured tensors.

Found by name: in the function's cells, globals and defaults, and in the attributes that it names.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from anyrank.memory.uncompiled import uncompiled
from anyrank.random_state.streams import Source, source_of
from anyrank.tensors.walk import walk

INTERNAL = frozenset(vars(nn.Module()))
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
LOADS = ("LOAD_DEREF", "LOAD_GLOBAL", *ATTRIBUTES)
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype})
MAX_OBJECTS = 1000  # visited in one search


class Place(NamedTuple):
    """Where a function finds a value: in a cell, or in an entry of a dict, list or tuple.

    `names` are those by which the function uses parts of the value; None for all of it. Those in
    `whole` are parts of which it uses all.
    """

    owner: Any
    key: Any
    name: str
    names: Collection[str] | None = None
    whole: Collection[str] = ()
    is_variable: bool = False

    def value(self) -> Any:
        """What is there now; None for nothing."""
        try:
            return self.owner.cell_contents if self.key is None else self.owner[self.key]
        except (KeyError, IndexError, ValueError):  # deleted; an empty cell
            return None

    def part(self, owner: Any, key: Any, name: str = "") -> Place:
        """The place of a part of the value."""
        names = None if key in self.whole else self.names
        return Place(owner, key, f"{self.name}{name or f'.{key}'}", names, self.whole)


class Captured:
    """What can be seen of it: a function's own module, its arguments, captured variables, used
    globals, defaults, and the attributes that it names.

    Attributes:
        modules: those that the function runs. If it names children of a captured module
            (`self.block(x)`), these children alone.
        named: these modules and all in them, each once, with its name.
        tensors: where tensors are, besides the parameters and buffers of these modules.
        variables: those that hold modules.
        generators: random generators of torch, numpy and `random`.
    """

    @uncompiled
    def __init__(self, fn: Callable[..., Any], leaves: Iterable[Any] = ()) -> None:
        self.modules: list[nn.Module] = []
        self.named: list[tuple[str, nn.Module]] = []
        self.tensors: list[Place] = []
        self.variables: list[Place] = []
        self.generators: list[Source] = []
        others = (leaf for leaf in leaves if type(leaf) not in PLAIN)
        given = [fn, *(leaf for leaf in others if not isinstance(leaf, torch.Tensor))]
        waiting = [Place(given, n, type(each).__name__) for n, each in enumerate(given)]
        seen = set[tuple[int, int]]()
        seen_modules = set[nn.Module]()
        while waiting and len(seen) < MAX_OBJECTS:
            place = waiting.pop()
            value = place.value()
            if self.keep(place, value) or (id(value), id(place.names)) in seen:
                continue
            seen.add((id(value), id(place.names)))
            if isinstance(value, nn.Module):
                self.variables += [place] if place.is_variable else []
                children = named_children(place, value)
                waiting += children
                if not children:
                    self.add_module(value, seen_modules)
            else:
                waiting += _reached_from(place, value)

    def keep(self, place: Place, value: Any) -> bool:
        """Whether the value is a tensor or a generator, which is kept then."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(place)
        elif (source := source_of(value)) is not None:
            self.generators.append(source)
        else:
            return False
        return True

    def add_module(self, top: nn.Module, seen: set[nn.Module]) -> None:
        """A module with all its submodules, and what their plain attributes hold."""
        if any(top is each for each in self.modules):
            return
        self.modules.append(top)
        for name, module in walk(top, "", seen):
            self.named.append((name, module))
            own = vars(module)
            for key in own.keys() - INTERNAL:
                value = own[key]
                if type(value) not in PLAIN:
                    place = Place(own, key, f"attribute {name}.{key}".replace(" .", " "))
                    if not self.keep(place, value):
                        for item in items_of(place, value):
                            self.keep(item, item.value())


def _reached_from(place: Place, value: Any) -> list[Place]:
    """The parts of a value, which is not a module, that the function may use."""
    if isinstance(value, functools.partial):
        whole = place._replace(names=None)
        given = (*items_of(whole, value.args), *items_of(whole, value.keywords))
        return [Place((value.func,), 0, place.name), *given]
    if isinstance(value, types.MethodType):
        if isinstance(value.__self__, nn.Module):
            return [Place((value.__self__,), 0, place.name)]
        return [*_used_by(value.__func__, value.__self__)]
    if isinstance(value, types.FunctionType):
        return [*_captured_by(value)]
    if isinstance(value, list | tuple | dict):
        return [*items_of(place, value)]
    if isinstance(value, type | types.ModuleType):
        return []
    reached = list[Place]()
    known: dict[str, Any] = getattr(value, "__dict__", {})
    if place.names is not None:
        reached += [place.part(known, name) for name in place.names if name in known]
        named = [getattr(type(value), name, None) for name in place.names]
        for method in named:
            if isinstance(method, types.FunctionType):
                reached += _used_by(method, value)
    else:  # of an argument, tensors and generators: not all that a config or a trainer holds
        shown = list(known.items())[:MAX_OBJECTS]
        kept = [key for key, part in shown if isinstance(part, torch.Tensor) or source_of(part)]
        reached += [place.part(known, key) for key in kept]
    if callable(value):
        reached += _used_by(getattr(type(value), "__call__", None), value)  # noqa: B004
    return reached


def items_of(place: Place, value: Any) -> Generator[Place]:
    """The places of the items of a list, tuple or dict, without those of plain data."""
    if isinstance(value, list | tuple):
        for n, item in enumerate(cast("list[Any]", value)[:MAX_OBJECTS]):
            if type(item) not in PLAIN:
                yield place.part(value, n, f"[{n}]")
    elif isinstance(value, dict):
        for key, item in list(cast("dict[Any, Any]", value).items())[:MAX_OBJECTS]:
            if type(item) not in PLAIN:
                yield place.part(value, key, f"[{key!r}]")


def _used_by(method: Any, owner: Any) -> Generator[Place]:
    """What a method captures, and the attributes it uses of its owner, which is not a module."""
    if not isinstance(method, types.FunctionType):
        yield Place((getattr(owner, "__wrapped__", None),), 0, type(owner).__name__)
        return
    methods = _called_by(method, type(owner))
    for each in methods:
        yield from _captured_by(each)
    known: dict[str, Any] = getattr(owner, "__dict__", {})
    names = tuple(dict.fromkeys(name for each in methods for name in _names_in(each.__code__)))
    whole = frozenset[str]().union(*(_used_whole(each.__code__) for each in methods))
    used = Place(owner, None, f"attribute of {type(owner).__name__}", names, whole)
    yield from (used.part(known, name) for name in names if name in known)


def _called_by(method: types.FunctionType, kind: type) -> list[types.FunctionType]:
    """A method, and those of its class that it names, and so on."""
    found = [method]
    for each in found:  # which grows
        named = (getattr(kind, name, None) for name in _names_in(each.__code__))
        found += [m for m in named if isinstance(m, types.FunctionType) and m not in found]
    return found


def _captured_by(fn: types.FunctionType) -> Generator[Place]:
    """The places of a function's globals, cells and defaults."""
    if (fn.__module__ or "").partition(".")[0] == "torch":
        return
    names, whole = _names_in(fn.__code__), _used_whole(fn.__code__)
    for name in names:
        if name in fn.__globals__:
            parts = None if name in whole else names
            yield Place(fn.__globals__, name, f"variable {name}", parts, whole, is_variable=True)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        parts = None if name in whole else names
        yield Place(cell, None, f"variable {name}", parts, whole, is_variable=True)
    for n in range(len(fn.__defaults__ or ())):
        yield Place(fn.__defaults__, n, f"default {n} of {fn.__name__}", names)
    for name in fn.__kwdefaults__ or ():
        yield Place(fn.__kwdefaults__, name, f"default {name} of {fn.__name__}", names)


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Globals and attributes that a function names, in functions and comprehensions in it too."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys(name for names in (code.co_names, *inner) for name in names))


@functools.lru_cache(maxsize=1024)
def _used_whole(code: types.CodeType) -> frozenset[str]:
    """Variables and attributes that a function uses otherwise than for an attribute of theirs."""
    inner = [_used_whole(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    steps = itertools.pairwise(dis.get_instructions(code))
    own = [a.argval for a, b in steps if a.opname in LOADS and b.opname not in ATTRIBUTES]
    return frozenset(own).union(*inner)


def named_children(place: Place, module: nn.Module) -> list[Place]:
    """Children of a captured module that the function names, and what else of it that names.

    None if it names no child, or a method of the module's class, which may use any of them.
    """
    own = vars(module)
    names = place.names or ()
    inner: dict[str, Any] = own.get("_modules", {})  # a traced module has no dict of them
    children = [place.part(inner, name) for name in names if name in inner]
    if not children or any(
        isinstance(getattr(type(module), name, None), types.FunctionType)
        and not hasattr(nn.Module, name)
        for name in names
    ):
        return []
    for group in (own.get("_parameters", {}), own.get("_buffers", {}), own):
        children += [place.part(group, name) for name in names if name in group]
    return children
