"""Caches of transformers models: a region that is recomputed gets none.

A layer writes its keys and values, or its state, into the cache that it gets. Where it is
recomputed it would do so twice, behind a mask that was made for one time, and the cache would keep
what recompute frees.
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
    """The arguments of a call, with None in place of a cache, and `use_cache` False.

    Args:
        fn: the function, without any `functools.partial`.
        label: the call, for messages.
        reads_cache: its layer reads the cache and writes nothing: it keeps it.

    Raises:
        RecomputeError: the cache holds what the layer would have to see.
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
                    f"{label} gets a cache that holds tokens already ({_name(fn, key)}, a "
                    f"{type(cache).__name__}), and a layer that is recomputed gets no cache: "
                    "put these tokens before the others of the batch, or leave the layers out of "
                    "recompute"
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
    """Whether a class is one of transformers' caches, or of a model's code that it has loaded. Most
    derive from its `Cache`, those of some models from nothing; no name imports transformers.
    """
    return any(
        base.__name__.endswith("Cache") and base.__module__.startswith("transformers")
        for base in kind.__mro__
    )


def _is_model(kind: type) -> bool:
    """Whether a class is a whole model of transformers, which makes its own cache by default."""
    return any(base.__name__ == "PreTrainedModel" for base in kind.__mro__)


def _place_of_use_cache(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], makes_cache: bool
) -> int | str | None:
    """Where `use_cache` is true, or left out of the call of a model whose default is true."""
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
    """How messages call an argument."""
    if isinstance(key, str):
        return key
    names = _parameters(fn)
    return names[key] if key < len(names) else f"args[{key}]"


def _holds_tokens(cache: Any, module: nn.Module | None) -> bool:
    """Whether the layer has something in the cache before it is called: a prefix that was trained
    or computed before. What other layers have written in this forward does not count.
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
    # In a layer of two mixers side by side, the one has its state before the other has its keys.
    if (length := getattr(layer, "get_seq_length", None)) is not None:
        return bool(length() > 0)
    return any(getattr(layer, "has_previous_state", {}).values())


@functools.lru_cache(maxsize=64)
def _warn_once(what: str) -> None:
    """Once in a process, as transformers warns of the same."""
    log.warning(
        "layers that are recomputed in backward get %s: they would fill the cache twice, and it "
        "would keep what recompute frees; without gradients, as in generate(), they have it",
        what,
    )
