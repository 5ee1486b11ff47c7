"""Keeps `torch.compile` off functions of ours.

A compiled model whose graph breaks at a tile or region runs that part as it is, and would then
compile our own small functions one by one, views and in-place writes included.
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
    """Decorates a function that calls nothing of the user's. The compiler is not loaded for it."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            return disabled(fn)(*args, **kwargs)
        return fn(*args, **kwargs)

    return run


@functools.cache
def disabled(fn: Callable[P, R]) -> Callable[P, R]:
    """The function as the compiler leaves it alone."""
    return torch.compiler.disable()(fn)
