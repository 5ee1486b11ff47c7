"""A decorator that excludes anyrank's own functions from `torch.compile`.

A compiled model whose graph breaks at a tile or region runs that part eagerly, and would then
compile the small functions called there one by one, views and in-place writes included.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(fn: Callable[P, R]) -> Callable[P, R]:
    """Exclude a function that calls no user code. Does not import the compiler."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            return disabled(fn)(*args, **kwargs)
        return fn(*args, **kwargs)

    return run


@functools.cache
def disabled(fn: Callable[P, R]) -> Callable[P, R]:
    """The function, excluded from compilation."""
    return torch.compiler.disable()(fn)
