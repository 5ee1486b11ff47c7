"""Arguments that a function writes into: both runs start with the same contents.

Lists, dicts and all other types that pytree knows are saved with their tensors. Any other object,
such as a cache with its own class, is the same object in both runs: changes of the first run are
undone while the function runs again, and then restored.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from anyrank.errors import RecomputeError
from anyrank.memory.call import Call, function_name
from anyrank.tensors.sharded_tensor import version_of

log = logging.getLogger("anyrank.memory")

DEPTH = 6  # a cache of caches of layers
MOST = 4096  # objects that are inspected in one argument
# Types without contents that a function could change: most arguments.
PLAIN = (
    *(torch.Tensor, nn.Module, torch.dtype, torch.device, torch.Generator),
    *(str, bytes, int, float, complex, type(None), type, types.ModuleType, types.FunctionType),
)
Contents = dict[Any, Any] | list[Any]


class WrittenArguments:
    """The objects among a call's arguments, recorded before its first run."""

    def __init__(self, call: Call, label: str) -> None:
        self.fn, self.label = call.fn, label
        objects = [
            (position, leaf)
            for position, leaf in enumerate(call.leaves)
            if not isinstance(leaf, PLAIN)
        ]
        # Name of the argument, the path in it, the container, its contents.
        self.containers = [
            (call.name(position), where, container, _contents(container))
            for position, leaf in objects
            for where, container in _containers_in(leaf)
        ]
        self.versions = [
            (f"{name}{where}", tensor, version_of(tensor))
            for name, where, container, contents in self.containers
            for where, tensor in _named(where, container, contents)
            if isinstance(tensor, torch.Tensor)
        ]

    def end_first_run(self) -> None:
        """Keep the former contents of all objects that the first run changed.

        Raises:
            RecomputeError: it changed a tensor in place, which cannot be undone.
        """
        for name, tensor, version in self.versions:
            if version_of(tensor) != version:
                raise RecomputeError(
                    f"{self.label} modifies {name} in place, so recomputation would start from the "
                    "modified values. Store a new tensor there, pass no cache (use_cache=False), "
                    "or do not recompute it"
                )
        self.versions = []
        self.containers = [
            (name, where, container, before)
            for name, where, container, before in self.containers
            if not _is_same(before, _contents(container))
        ]
        for name, _, container, _ in self.containers:
            if any(isinstance(value, torch.Tensor) for value in _values(_contents(container))):
                _warn_once(function_name(self.fn), name)

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the objects have their contents at the call."""
        return self._restored() if self.containers else contextlib.nullcontext()

    @contextlib.contextmanager
    def _restored(self) -> Generator[None]:
        now = [(container, _contents(container)) for _, _, container, _ in self.containers]
        try:
            for _, _, container, before in self.containers:
                _put(container, before)
            yield
        finally:
            for container, contents in now:
                _put(container, contents)


@functools.lru_cache(maxsize=64)
def _warn_once(function: str, name: str) -> None:
    log.warning(
        "%s, which is recomputed, stores tensors in %s; they stay in memory as long as it does",
        function,
        name,
    )


def _containers_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object and its inner containers and objects, each as a user would write it."""
    waiting, seen = [("", value, 0)], set[int]()
    while waiting and len(seen) < MOST:
        where, part, depth = waiting.pop()
        if isinstance(part, PLAIN) or depth > DEPTH or id(part) in seen:
            continue
        seen.add(id(part))
        yield where, part
        for name, inner in _named(where, part, _contents(part)):
            waiting.append((name, inner, depth + 1))


def _contents(container: Any) -> Contents:
    """Return the current contents of a container, or the attributes of an object."""
    if isinstance(container, dict):
        return dict(cast("dict[Any, Any]", container))
    if isinstance(container, list | tuple | set | frozenset | deque):
        return list(cast("Iterable[Any]", container))
    names = [name for kind in type(container).__mro__ for name in _slots(kind)]
    slots = {name: getattr(container, name) for name in names if hasattr(container, name)}
    return {**slots, **getattr(container, "__dict__", {})}


def _named(where: str, container: Any, contents: Contents) -> Iterator[tuple[str, Any]]:
    """Yield the contents of a container, each as a user would write it."""
    is_object = isinstance(contents, dict) and not isinstance(container, dict)
    for key, value in contents.items() if isinstance(contents, dict) else enumerate(contents):
        yield f"{where}.{key}" if is_object else f"{where}[{key!r}]", value


def _slots(kind: type) -> Iterable[str]:
    slots: Any = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _values(contents: Contents) -> Iterable[Any]:
    return contents.values() if isinstance(contents, dict) else contents


def _is_same(before: Contents, after: Contents) -> bool:
    """Return True if the contents are the same objects under the same names."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(before[k] is after[k] for k in before)
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def _put(container: Any, contents: Contents) -> None:
    """Set the contents of a container, or the attributes of an object.

    Unchanged entries stay in place, because a different thread may read them.
    """
    if isinstance(contents, dict):
        now = _contents(container)
        assert isinstance(now, dict)
        is_dict = isinstance(container, dict)
        for key in now.keys() - contents.keys():
            container.pop(key) if is_dict else object.__delattr__(container, key)
        for key, value in contents.items():
            if key not in now or now[key] is not value:
                container.__setitem__(key, value) if is_dict else object.__setattr__(
                    container, key, value
                )
    elif isinstance(container, set):
        container.clear()
        cast("set[Any]", container).update(contents)
    elif isinstance(container, list | deque):
        container.clear()
        cast("list[Any]", container).extend(contents)
