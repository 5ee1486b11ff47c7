"""The in-place forms: patched `forward` of the modules that a pattern names, and the way back."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from anyrank.memory.offload import Offload
from anyrank.memory.recompute import Settings, record, resident_in
from anyrank.memory.region import Contexts
from anyrank.memory.tile import Tiled
from anyrank.tensors.names import WRAPPERS, candidates, near
from anyrank.tensors.walk import walk

Forward = Callable[..., Any]
# Runs a patched module: its name, its own forward, args and kwargs.
Around = Callable[[str, Forward, tuple[Any, ...], dict[str, Any]], Any]


class Switch:
    """Whether a patch is in force: one for all copies of the patched model."""

    def __init__(self) -> None:
        self.on = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        return self


class Patched:
    """Stands as an instance's `forward`. An object and not a function, so that a deep copy of the
    module calls the copy's weights. Pickled it is the `forward` that it wraps: a file has the model
    alone, and whoever loads it patches it again.
    """

    def __init__(self, name: str, inner: Forward, around: Around, kind: str) -> None:
        self.name = name
        self.inner = inner
        self.around = around
        self.kind = kind
        self.switch = Switch()
        functools.update_wrapper(self, inner, updated=())

    @property
    def active(self) -> bool:
        return self.switch.on

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.inner(*args, **kwargs)
        return self.around(self.name, self.inner, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Patched:
        twin = Patched(self.name, copy.deepcopy(self.inner, memo), self.around, self.kind)
        twin.switch = self.switch
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        inner = self.inner
        while isinstance(inner, Patched):
            inner = inner.inner
        owner = getattr(inner, "__self__", None)
        return (getattr, (owner, "forward")) if owner is not None else (functools.partial, (inner,))


class Handle:
    """Undoes a patch.

    Attributes:
        names: the modules that were patched.
    """

    def __init__(self, modules: dict[str, nn.Module], patches: list[Patched]) -> None:
        self.names = list(modules)
        self.modules = list(modules.values())
        self.patches = patches

    def remove(self) -> None:
        """Give the modules their own `forward` back. Again does nothing. Deep copies that were made
        of them while they were patched run their own `forward` again, too.

        Below a later patch of the same module it stays in place and passes calls on.
        """
        for module, patch in zip(self.modules, self.patches, strict=True):
            patch.switch.on = False
            while isinstance(top := module.__dict__.get("forward"), Patched) and not top.active:
                restore(module, top)


def restore(module: nn.Module, patch: Patched) -> None:
    own = getattr(patch.inner, "__self__", None) is module
    if own:  # the class's method: without an entry of its own the instance finds it
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = patch.inner


def recompute_(
    model: nn.Module,
    pattern: str,
    *,
    offload: Offload | None = None,
    context_fn: Callable[[], Contexts] | None = None,
    generators: Iterable[torch.Generator] = (),
) -> Handle:
    """Recompute the modules that a pattern names, wherever they are called: see `recompute`.

    Each rank by itself, before or after wrapping in DDP, `fully_shard` or `torch.compile`; with
    `fully_shard` of the same modules, the region lies inside the unit. Names of parameters, and so
    the state dict, stay.

    Args:
        pattern: a name as in `named_modules`, in which `*` stands for one part and `**` for any
            number: `"layers.*"`, `"**.mlp"`. What wrappers put into names is left out.
        offload, context_fn, generators: as in `recompute`.

    Returns:
        A handle whose `remove()` undoes it, and whose `names` are those of the modules.

    Raises:
        ValueError: no module of that name, or one that is never called, or recomputed already.
    """
    modules = find_modules(model, pattern)
    settings = Settings(offload, context_fn, tuple(generators), resident_in(model))

    def call(name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return record(forward, args, kwargs, name, settings)

    return patch(modules, call, "recompute_")


def tile_(
    model: nn.Module,
    pattern: str,
    *,
    chunk_size: int = 8192,
    dim: int = -2,
    in_dims: Any = None,
    out_dims: Any = None,
    grad_dtype: torch.dtype | None = None,
    check: bool = False,
) -> Handle:
    """Tile the modules that a pattern names, wherever they are called: see `tile`.

    Each rank by itself, before or after wrapping, as `recompute_`. Under `fully_shard` of the same
    modules the tiles run inside the unit: one gather for all.

    Args:
        pattern: as in `recompute_`.
        dim: the dim of the first argument and of all results that is tiled: -2 is the one before
            the features, whether the argument is [batch, tokens, width] or [tokens, width].
        in_dims, out_dims: instead, as in `tile`.
        chunk_size, grad_dtype, check: as in `tile`; the check is made in each module.

    Returns:
        A handle whose `remove()` undoes it, and whose `names` are those of the modules.

    Raises:
        ValueError: no module of that name, or one that is never called, or tiled already.
    """
    modules = find_modules(model, pattern)
    ins, outs = dim if in_dims is None else in_dims, dim if out_dims is None else out_dims
    unchecked = set(modules) if check else set[str]()

    def call(name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tiled = Tiled(forward, name, chunk_size, ins, outs, grad_dtype, name in unchecked)
        result = tiled(*args, **kwargs)
        if not tiled.check:
            unchecked.discard(name)
        return result

    return patch(modules, call, "tile_")


def patch(modules: dict[str, nn.Module], around: Around, kind: str) -> Handle:
    """Wrap the `forward` of each module, of none if one has been wrapped in the same way."""
    for name, module in modules.items():
        inner = module.__dict__.get("forward")
        while isinstance(inner, Patched):
            if inner.active and inner.kind == kind:
                raise ValueError(f"{name} has a {kind} already: call remove() of its handle first")
            inner = inner.inner
    patches = [Patched(name, module.forward, around, kind) for name, module in modules.items()]
    for module, each in zip(modules.values(), patches, strict=True):
        module.__dict__["forward"] = each
    return Handle(modules, patches)


def find_modules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Name -> module, of those that the pattern names."""
    known = dict(walk(model))
    matches = matcher(pattern)
    found = {name: module for name, module in known.items() if any(map(matches, candidates(name)))}
    found = {name: module for name, module in found.items() if not is_wrapped(name, found)}
    if not found:
        raise ValueError(
            f"{pattern!r} names no module of {type(model).__name__}{near(pattern, list(known))}: "
            "* stands for one part of a name, ** for any number of parts"
        )
    called = {n: m for n, m in found.items() if not isinstance(m, nn.ModuleList | nn.ModuleDict)}
    if not called:
        name, module = next(iter(found.items()))
        raise ValueError(
            f"{name} is a {type(module).__name__}, which is never called: did you mean {name}.*"
        )
    return called


def is_wrapped(name: str, found: Collection[str]) -> bool:
    """Whether a module stands in a wrapper of its own that was found as well: one patch will do."""
    outer, _, part = name.rpartition(".")
    return part in WRAPPERS and (outer in found or is_wrapped(outer, found))


def matcher(pattern: str) -> Callable[[str], bool]:
    parts = {"*": r"[^.]+", "**": r"[^.]+(?:\.[^.]+)*"}
    steps = [
        parts.get(part, re.escape(part).replace(r"\*", "[^.]*")) for part in pattern.split(".")
    ]
    if steps[0] == parts["**"] and len(steps) > 1:  # also no part at all
        expression = rf"(?:{steps[0]}\.)?" + r"\.".join(steps[1:])
    else:
        expression = r"\.".join(steps)
    compiled = re.compile(expression)
    return lambda name: compiled.fullmatch(name) is not None
