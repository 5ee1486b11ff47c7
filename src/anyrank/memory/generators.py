"""The random generators that a function uses: named by the user, or among its arguments."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch

from anyrank.checks import check_type
from anyrank.training.random_state.generators import (
    NumpyGenerator,
    PythonGenerator,
    Source,
    TorchGenerator,
    ambient,
)


def as_sources(generators: Iterable[Any]) -> tuple[Source, ...]:
    """Return generators as sources of random numbers.

    Raises:
        TypeError: one of them is not a generator whose state can be set.
    """
    check_type("generators", generators, Iterable, "a list of generators")
    sources: list[Source] = []
    for generator in generators:
        source = _global_source(generator) or source_of(generator)
        if source is None:
            raise TypeError(
                "generators=: expected a torch.Generator, a numpy generator, a random.Random, or "
                f"the module random or numpy.random, got {type(generator).__name__}"
            )
        sources.append(source)
    return tuple(sources)


def _global_source(value: Any) -> Source | None:
    """Return the global generator if the value is the module `random` or `numpy.random`."""
    modules = {"python": random, "numpy": getattr(sys.modules.get("numpy"), "random", None)}
    sources = (source for source in ambient() if value is modules.get(source.name, modules))
    return next(sources, None)


def source_of(value: Any) -> Source | None:
    """Return the random source behind a generator of torch, numpy or `random`.

    None for any other value, and for a generator without a state.
    """
    if isinstance(value, torch.Generator):
        return TorchGenerator("given", value)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return PythonGenerator(value)
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is None or not isinstance(value, numpy.Generator | numpy.RandomState):
        return None
    return _NumpyGenerator(value) if isinstance(value, numpy.Generator) else NumpyGenerator(value)


class _NumpyGenerator:
    """A generator from `numpy.random.default_rng`."""

    def __init__(self, generator: Any) -> None:
        self.bits = generator.bit_generator

    def get(self) -> Any:
        return self.bits.state

    def put(self, state: Any) -> None:
        self.bits.state = state
