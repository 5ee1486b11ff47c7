"""The options of `load` and `plan`: checked by each rank, and compared over the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from anyrank.errors import LoadError
from anyrank.files.formats import Source
from anyrank.loading.strategy import STRATEGIES
from anyrank.tensors.names import Rename, renamer
from anyrank.world.ranks import Ranks

CHOICES: Mapping[str, tuple[str, ...]] = {
    "missing": ("error", "init", "keep"),
    "unexpected": ("error", "ignore"),
    "cast": ("float", "any"),
    "strategy": STRATEGIES,
}


@dataclass(frozen=True)
class Options:
    """What the caller of `load` or `plan` asked for; see `load` for each."""

    missing: str = "error"
    unexpected: str = "error"
    cast: str = "float"
    rename: Rename = None
    strategy: str = "auto"
    buffer_bytes: int | None = None
    progress: bool | Callable[[int, int], None] | None = None
    verify: bool = False

    def check(self) -> None:
        """Refuse options that are wrong in themselves.

        Raises:
            ValueError: an unknown choice, a regex that does not compile, no positive number.
            TypeError: an option of another type.
        """
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        renamer(self.rename)
        if self.buffer_bytes is not None:
            check_count("buffer_bytes", self.buffer_bytes)
        verify: Any = self.verify  # whatever was given
        if not isinstance(verify, bool):
            raise TypeError(f"verify={verify!r}: give True or False")
        if not (
            self.progress is None or isinstance(self.progress, bool) or callable(self.progress)
        ):
            raise TypeError(f"progress={self.progress!r}: give True, False, None or a function")

    def agree(self, ranks: Ranks, call: str, model: nn.Module, source: Source | None) -> None:
        """Check a call's arguments, and compare them over the ranks. All ranks.

        `buffer_bytes` and `progress` may differ between ranks: the smallest buffer counts, and the
        first rank's progress.

        Raises:
            ValueError, TypeError: an argument that is wrong in itself; on all ranks.
            LoadError: arguments that differ between ranks; on all ranks.
        """

        def check() -> None:
            check_model(model)
            check_source(source)
            self.check()

        names = (*CHOICES, "rename", "verify")
        ranks.same_arguments(call, {n: getattr(self, n) for n in names}, LoadError, check)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse what is not one of the choices.

    Raises:
        ValueError: names the choices.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: give one of {', '.join(choices)}")


def check_count(name: str, value: object) -> None:
    """Refuse what is not a positive whole number.

    Raises:
        TypeError: not an int.
        ValueError: below 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: give a whole number")
    if value < 1:
        raise ValueError(f"{name}={value} is not a positive number")


def check_model(model: object) -> None:
    """Refuse what is not a module.

    Raises:
        TypeError: names the type.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model= takes a torch.nn.Module, not {type(model).__name__}")


def check_source(source: object) -> None:
    """Refuse what names no weights.

    Raises:
        TypeError: names the type.
    """
    if source is None or isinstance(source, (str, os.PathLike, Mapping)):
        return
    paths: Sequence[object] = source if isinstance(source, Sequence) else [source]  # pyright: ignore[reportUnknownVariableType]
    for path in paths:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                "source= takes a path, a list of paths, or a dict of tensors, not "
                f"{type(path).__name__}"
            )
