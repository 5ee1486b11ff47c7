"""Keep the caches of transformers models away from recomputed regions.

A layer writes its keys and values, or its state, into its cache. A recomputed layer would write
them twice, although the mask was built for one time, and the cache would keep alive the tensors
that recompute frees.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anyrank.errors import RecomputeError
from anyrank.memory.call import find_module

log = logging.getLogger("anyrank.memory")


def without_caches(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: str,
    reads_cache: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with None in place of a cache, and `use_cache` False.

    Args:
        fn: the function, without any `functools.partial`.
        label: the call, for messages.
        reads_cache: whether the layer only reads its cache, so that it may keep it.

    Raises:
        RecomputeError: the cache already contains tokens that the layer must see.
    """
    module = find_module(fn) or (args[0] if args and isinstance(args[0], nn.Module) else None)
    makes_cache = _is_model(type(module)) and getattr(getattr(module, "config", 0), "use_cache", 0)
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    caches = [(key, value) for key, value in places if _is_cache(type(value))]
    if not caches and not makes_cache:
        return args, kwargs
    changed: dict[int | str, Any] = {}
    if not (reads_cache or getattr(module, "_can_checkpoint_with_cache", False)):
        for key, cache in caches:
            if _holds_tokens(cache, module):
                raise RecomputeError(
                    f"a non-empty cache ({_name(fn, key)}, a {type(cache).__name__}) was passed to "
                    f"{label}, which is recomputed and runs without a cache. Prepend the cached "
                    "tokens to the batch, or do not recompute this layer"
                )
            changed[key] = None
    key = _place_of_use_cache(fn, args, kwargs, bool(makes_cache))
    if key is not None:
        changed[key] = False
    if not changed:
        return args, kwargs
    if not torch.compiler.is_compiling():  # a log would break the graph
        _warn_once(", ".join(f"{_name(fn, key)}={value}" for key, value in changed.items()))
    return (
        tuple(changed.get(n, arg) for n, arg in enumerate(args)),
        {**kwargs, **{key: value for key, value in changed.items() if isinstance(key, str)}},
    )


def _is_cache(kind: type) -> bool:
    """Return True if a class is a cache of transformers or of model code that it has loaded.

    Most caches derive from `Cache`, some from nothing. The check imports nothing.
    """
    return any(
        base.__name__.endswith("Cache") and base.__module__.startswith("transformers")
        for base in kind.__mro__
    )


def _is_model(kind: type) -> bool:
    """Return True if a class is a whole transformers model, which makes a cache by default."""
    return any(base.__name__ == "PreTrainedModel" for base in kind.__mro__)


def _place_of_use_cache(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], makes_cache: bool
) -> int | str | None:
    """Return the position of `use_cache` if it is True, or omitted and True by default."""
    if kwargs.get("use_cache"):
        return "use_cache"
    if not makes_cache and all(arg is not True for arg in args):
        return None
    names = _parameters(fn)
    number = names.index("use_cache") if "use_cache" in names else None
    if number is not None and number < len(args):
        return number if args[number] is True or (makes_cache and args[number] is None) else None
    is_left_out = number is not None and kwargs.get("use_cache") is None
    return "use_cache" if makes_cache and is_left_out else None


def _parameters(fn: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(getattr(fn, "forward", fn)).parameters)


def _name(fn: Callable[..., Any], key: int | str) -> str:
    """Return the name of an argument for messages."""
    if isinstance(key, str):
        return key
    names = _parameters(fn)
    return names[key] if key < len(names) else f"args[{key}]"


def _holds_tokens(cache: Any, module: nn.Module | None) -> bool:
    """Return True if the cache contains something for the layer before the layer is called.

    A trained or earlier computed prefix counts. Writes of other layers in the same forward do not.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    parts = module.modules() if module is not None else ()
    number = next(
        (n for part in parts if isinstance(n := getattr(part, "layer_idx", None), int)), 0
    )
    layers = getattr(cache, "layers", ())
    if number >= len(layers):
        return False
    layer = layers[number]
    # A layer with two parallel mixers writes the state of one before the keys of the other.
    if (length := getattr(layer, "get_seq_length", None)) is not None:
        return bool(length() > 0)
    return any(getattr(layer, "has_previous_state", {}).values())


@functools.lru_cache(maxsize=64)
def _warn_once(what: str) -> None:
    """Warn once per process, like transformers about its own caches."""
    log.warning(
        "recomputed layers get %s, because a cache would be filled twice and would keep the "
        "activations alive. Calls without gradients, such as generate(), keep their cache",
        what,
    )
