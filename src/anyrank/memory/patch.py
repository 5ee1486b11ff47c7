"""`anyrank.recompute_` and `tile_`: replace `forward` of the modules that match a pattern."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pickle
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from anyrank.checks import check_model, check_type
from anyrank.memory.generators import as_sources
from anyrank.memory.offload import Offload
from anyrank.memory.recompute import RegionOptions, run_region
from anyrank.memory.region import Contexts
from anyrank.memory.tile import Tiled
from anyrank.memory.tiling_dims import check_dims
from anyrank.tensors.names import WRAPPERS, candidates
from anyrank.tensors.near_names import near
from anyrank.tensors.walk import walk

log = logging.getLogger("anyrank.memory")

Forward = Callable[..., Any]
# A function that runs a patched module, from its name, its own forward, args and kwargs.
Wrapper = Callable[[str, Forward, tuple[Any, ...], dict[str, Any]], Any]


class PatchedForward:
    """The replaced `forward` of an instance.

    It is an object, not a function, so that a deep copy of the module uses the copy's weights.

    Attributes:
        inner: the replaced forward: a bound method of the class, or an attribute of the instance.
        is_of_class: whether `inner` was the class's method; a call then uses the current method of
            the class.
    """

    def __init__(self, name: str, inner: Forward, wrapper: Wrapper, kind: str) -> None:
        self.name = name
        self.inner = inner
        self.run_with = wrapper
        self.kind = kind
        owner = getattr(inner, "__self__", None)
        of_class = getattr(type(owner), "forward", None)
        self.is_of_class = of_class is not None and of_class is getattr(inner, "__func__", None)
        self.is_taken_out = False
        functools.update_wrapper(self, inner, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inner: Any = self.inner
        if self.is_of_class:
            # Not with __get__, which Dynamo of torch 2.11 cannot follow.
            inner = types.MethodType(type(inner.__self__).forward, inner.__self__)
        return self.run_with(self.name, inner, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchedForward:
        inner = copy.deepcopy(self.inner, memo)
        return PatchedForward(self.name, inner, self.run_with, self.kind)

    def notice(self, module: nn.Module, args: Any) -> None:
        """Check, before each call, that no other `forward` has replaced this one.

        Fused kernels do that. The call has already started, so it would run the new forward without
        this patch: for a long sequence, all rows at once.

        Raises:
            ValueError: one has; the error names the module and the forward.
        """
        if torch.compiler.is_compiling():
            return
        now = vars(module).get("forward")
        if now is self or _leads_to(now, self, module):
            return
        if now is not None:
            name = getattr(now, "__qualname__", type(now).__name__)
            raise ValueError(
                f"{self.name}: {name} replaced its forward after {self.kind}, so {self.kind} would "
                f"have no effect. Replace the forward first, then call {self.kind}; here, call "
                f"remove() of its handle, and then {self.kind} again"
            )
        if not self.is_taken_out:
            self.is_taken_out = True
            log.warning(
                "%s: its forward was removed after %s, so this call runs without the patch. To "
                "remove a patch, call remove() of its handle",
                *(self.name, self.kind),
            )

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            f"{self.name} has a {self.kind} patch, which cannot be pickled. First call remove() of "
            "its handle, or save model.state_dict()"
        )


class Handle:
    """The handle that undoes a patch.

    Attributes:
        names: the patched modules.
    """

    def __init__(self, modules: dict[str, nn.Module], patches: list[PatchedForward]) -> None:
        self.names = list(modules)
        self._patched = list(zip(modules.values(), patches, strict=True))
        self._hooks = [module.register_forward_pre_hook(p.notice) for module, p in self._patched]

    def remove(self) -> None:
        """Restore the modules' own `forward`. A second call does nothing.

        Deep copies stay patched. A `forward` that has replaced the patch is kept.

        Raises:
            ValueError: a module was patched again later; remove the later patch first.
        """
        for name, (module, patch) in zip(self.names, self._patched, strict=False):
            now = vars(module).get("forward")
            if now is not patch and now is not None and _leads_to(now, patch, module):
                raise ValueError(
                    f"{name} was patched again after {patch.kind}. Remove the later patch first"
                )
        for hook in self._hooks:
            hook.remove()
        for module, patch in self._patched:
            if vars(module).get("forward") is not patch:
                continue
            if patch.is_of_class:
                del module.forward
            else:
                module.forward = patch.inner
        self._patched, self._hooks = [], []


def recompute_(
    model: nn.Module,
    pattern: str,
    *,
    offload: Offload | None = None,
    context_fn: Callable[[], Contexts] | None = None,
    generators: Iterable[Any] = (),
) -> Handle:
    """Patch all modules whose names match a pattern, so that backward recomputes them.

    See `recompute`. The model is patched in place, before or after wrapping in DDP, `fully_shard`
    or `torch.compile`; with `fully_shard` of the same modules, the region is inside the unit. No
    coordination between ranks is needed. The names of parameters, and so the state dict, do not
    change.

    Args:
        pattern: a name as in `named_modules`, in which `*` matches one part and `**` any number
            of parts: `"layers.*"`, `"**.mlp"`. Prefixes that wrappers add are ignored.
        offload, context_fn, generators: as in `recompute`.

    Returns:
        A handle whose `remove()` restores the modules, and whose `names` lists them.

    Raises:
        ValueError: no module matches, or a module that matches is never called or is already
            recomputed.
        TypeError: an option that `recompute` does not accept.

    Example::

        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        handle = anyrank.recompute_(model, "*")
        model(torch.randn(2, 8)).sum().backward()
        handle.remove()
    """
    modules = _find_modules(model, pattern)
    options = RegionOptions(offload, context_fn, as_sources(generators))
    if offload is not None:
        options.leave_buffers_of(model)
    # A transformers layer declares this for all its submodules.
    options.cache_readers = [name for name in modules if _is_in_cache_reader(model, name)]

    def call(name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run_region(forward, args, kwargs, name, options)

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
) -> Handle:
    """Patch all modules whose names match a pattern, so that they run in tiles.

    See `tile`. The model is patched in place, before or after wrapping, like with `recompute_`; no
    coordination between ranks is needed. With `fully_shard` of the same modules, the tiles run
    inside the unit, which gathers once for all tiles.

    Args:
        pattern: as in `recompute_`.
        dim: the dim of the first argument and of all results that is tiled; -2 is the dim before
            the features, whether the argument is [batch, tokens, width] or [tokens, width].
        in_dims, out_dims: as in `tile`, instead of `dim`.
        chunk_size, grad_dtype: as in `tile`.

    Returns:
        A handle whose `remove()` restores the modules, and whose `names` lists them.

    Raises:
        ValueError, TypeError: no module matches; a module that matches is never called or is
            already tiled; an option that `tile` does not accept.

    Example::

        mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        model = torch.nn.ModuleDict({"mlp": mlp})
        handle = anyrank.tile_(model, "mlp", chunk_size=256)
        mlp(torch.randn(2, 1000, 8)).sum().backward()
        handle.remove()
    """
    modules = _find_modules(model, pattern)
    check_dims("dim", dim)
    ins, outs = dim if in_dims is None else in_dims, dim if out_dims is None else out_dims
    for name, module in modules.items():  # wrong options must raise before a module is patched
        Tiled(module.forward, f"tile({name})", chunk_size, ins, outs, grad_dtype)

    def call(name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tiled = Tiled(forward, f"tile({name})", chunk_size, ins, outs, grad_dtype)
        return tiled(*args, **kwargs)

    return patch(modules, call, "tile_")


def patch(modules: dict[str, nn.Module], wrapper: Wrapper, kind: str) -> Handle:
    """Patch the `forward` of all modules, or of none if one already has a patch of this kind."""
    for name, module in modules.items():
        inner = module.__dict__.get("forward")
        while isinstance(inner, PatchedForward):
            if inner.kind == kind:
                raise ValueError(
                    f"{name} already has a {kind} patch. Call remove() of its handle first"
                )
            inner = inner.inner
    patches = [
        PatchedForward(name, module.forward, wrapper, kind) for name, module in modules.items()
    ]
    for module, patch in zip(modules.values(), patches, strict=True):
        module.__dict__["forward"] = patch
    return Handle(modules, patches)


def _leads_to(forward: Any, patch: PatchedForward, module: nn.Module) -> bool:
    """Return True if a `forward` visibly calls a patch.

    It may wrap the patch, hold it in a variable, or find it in an attribute of the module, as
    Accelerate does.
    """
    waiting, seen = [forward, *filter(callable, vars(module).values())], set[int]()
    while waiting:
        value = waiting.pop()
        if value is patch:
            return True
        if id(value) not in seen and len(seen) < 64:
            seen.add(id(value))
            waiting += _called_by(value)
    return False


def _called_by(value: Any) -> Iterator[Any]:
    """Yield the functions that a function visibly refers to."""
    yield getattr(value, "__wrapped__", None)
    if isinstance(value, PatchedForward):
        yield value.inner
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__func__
        yield None if isinstance(value.__self__, nn.Module) else value.__self__
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable without a value yet
                yield cell.cell_contents
    elif isinstance(value, list | tuple):
        yield from cast("Iterable[Any]", value)
    elif isinstance(value, dict):
        yield from cast("dict[Any, Any]", value).values()
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type | types.ModuleType):
        yield from vars(value).values()  # an object that calls its attributes


def _find_modules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Map names to modules, for the modules that match the pattern.

    Raises:
        TypeError: no model, or no pattern.
        ValueError: no module matches, or one that is never called.
    """
    check_model(model)
    check_type("pattern", pattern, str, "the name of a module, or a pattern of names")
    known = dict(walk(model))
    matches = matcher(pattern)
    hits = {name: module for name, module in known.items() if any(map(matches, candidates(name)))}
    hits = {name: module for name, module in hits.items() if not is_wrapped(name, hits)}
    if not hits:
        raise ValueError(
            f"{pattern!r} matches no module of {type(model).__name__}{near(pattern, list(known))}. "
            "In a pattern, * matches one part of a name, ** any number of parts"
        )
    called = {n: m for n, m in hits.items() if not isinstance(m, nn.ModuleList | nn.ModuleDict)}
    if not called:
        name, module = next(iter(hits.items()))
        raise ValueError(
            f"{name} is a {type(module).__name__}, which is never called. Did you mean {name}.*"
        )
    return called


def _is_in_cache_reader(model: nn.Module, name: str) -> bool:
    """Return True if a module, or one that contains it, only reads its cache."""
    parts = name.split(".")
    around = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1))
    return any(getattr(part, "_can_checkpoint_with_cache", False) for part in around)


def is_wrapped(name: str, names: Collection[str]) -> bool:
    """Return True if the wrapper of a module matches too, so that one patch suffices."""
    outer, _, part = name.rpartition(".")
    return part in WRAPPERS and (outer in names or is_wrapped(outer, names))


def matcher(pattern: str) -> Callable[[str], bool]:
    parts = {"*": r"[^.]+", "**": r"[^.]+(?:\.[^.]+)*"}
    steps = [
        parts.get(part, re.escape(part).replace(r"\*", "[^.]*")) for part in pattern.split(".")
    ]
    if steps[0] == parts["**"] and len(steps) > 1:  # also matches no part
        expression = rf"(?:{steps[0]}\.)?" + r"\.".join(steps[1:])
    else:
        expression = r"\.".join(steps)
    compiled = re.compile(expression)
    return lambda name: compiled.fullmatch(name) is not None
