"""The public interface: what the API reference lists, and what has an example in its docstring."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import anyrank
from anyrank import integrations

# Documented as for anyrank's own use: what is there is no part of the interface.
INTERNAL = ("position",)


def public_names() -> dict[str, Any]:
    """Name in `anyrank` -> function, class or value."""
    return {name: getattr(anyrank, name) for name in anyrank.__all__ if name != "__version__"}


def integration_names() -> dict[str, Any]:
    """The same, as `integrations.peft.load`, of the frameworks that are installed."""
    found: dict[str, Any] = {}
    for framework in integrations.FRAMEWORKS:
        try:
            module = importlib.import_module(f"anyrank.integrations.{framework}")
        except ImportError:
            continue
        own = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and name[0] not in "_T"
        ]
        names = getattr(module, "__all__", own)
        found |= {f"integrations.{framework}.{name}": getattr(module, name) for name in names}
    return found


def members(thing: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines."""
    for name, value in vars(thing).items() if inspect.isclass(thing) else ():
        if name in INTERNAL:
            continue
        if not name.startswith("_") and (callable(value) or isinstance(value, property)):
            yield name, value
        elif not name.startswith("_") and isinstance(value, classmethod | staticmethod):
            yield name, getattr(thing, name)


def returned_classes(things: Iterable[Any]) -> dict[str, type]:
    """Path below `anyrank` -> class that these return or have as fields, and so on from there."""
    todo, found = list(things), dict[str, type]()
    public = {id(thing) for thing in todo}
    while todo:
        thing = todo.pop()
        for kind in (each for hint in _hints(thing) for each in _classes(hint)):
            path = f"{kind.__module__}.{kind.__qualname__}".removeprefix("anyrank.")
            is_ours = kind.__module__.startswith("anyrank.") and not kind.__name__.startswith("_")
            if is_ours and id(kind) not in public and path not in found:
                found[path] = kind
                todo.append(kind)
    return found


def described(thing: Any) -> set[str]:
    """The names that a docstring, which is on the page of the API, says something of."""
    heads = re.findall(r"^ *(\w+(?:, \w+)*): ", inspect.getdoc(thing) or "", flags=re.M)
    return {name for head in heads for name in head.split(", ")}


def _hints(thing: Any) -> Iterator[Any]:
    """What a function returns; of a class, its fields and what its methods return."""
    if inspect.isclass(thing):
        yield from (hint for name, hint in get_type_hints(thing).items() if name[0] != "_")
        for _, member in members(thing):
            yield from _hints(getattr(member, "fget", member))
    elif callable(thing):
        function: Any = inspect.unwrap(thing)
        hints = {"return": function.__annotations__.get("return")}
        yield get_type_hints(SimpleNamespace(__annotations__=hints), function.__globals__)["return"]


def _classes(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint):
        yield hint
    for part in get_args(hint):
        yield from _classes(part)
