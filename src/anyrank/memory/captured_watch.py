"""Captured tensors that are changed between forward and backward are refused where they are read.

Changed in place, one would change gradients without an error. So the first run records the tensors
that a function captures, with their versions. Where one has changed, the second run looks at each
operation, and refuses the first that reads it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Generator, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # documented, without a public module

from anyrank.errors import RecomputeError
from anyrank.memory.arguments import flatten
from anyrank.memory.captured import Captured
from anyrank.tensors.sharded_tensor import version_of


class CapturedWatch:
    """The captured tensors of a function, from before it runs for the first time.

    Tensors are held weakly. What the first run itself changes or replaces is not watched.
    """

    def __init__(self, captured: Captured) -> None:
        self.places = [
            (place, weakref.ref(tensor), version_of(tensor))
            for place in captured.tensors
            if isinstance(tensor := place.value(), torch.Tensor)
        ]
        self.variables = [(place, weakref.ref(place.value())) for place in captured.variables]

    def settle(self) -> None:
        """After the first run: what it changed is its own."""
        self.places = [
            (place, then, version)
            for place, then, version in self.places
            if (now := place.value()) is then() and version_of(now) == version
        ]
        self.variables = [
            (place, then) for place, then in self.variables if place.value() is then()
        ]

    def changed(self) -> list[tuple[torch.Tensor, str]]:
        """Tensors that differ now, and how."""
        found: list[tuple[torch.Tensor, str]] = []
        for place, then, version in self.places:
            now = place.value()
            if not isinstance(now, torch.Tensor):
                continue
            if now is then():
                if version_of(now) != version:
                    found.append((now, f"{place.name}, {text_of(now)}, was changed in place"))
            elif place.is_variable:  # an attribute may be a cache that has grown
                found.append((now, f"{place.name}, {text_of(now)}, was assigned anew"))
        return found

    @contextlib.contextmanager
    def refused(self, label: str) -> Generator[None]:
        """Inside, an operation that reads a tensor which has changed raises RecomputeError.

        Raises:
            RecomputeError: a variable has another module now, as after the next turn of a loop.
        """
        for place, then in self.variables:
            if isinstance(now := place.value(), nn.Module) and now is not then():
                raise changed_error(label, f"{place.name} was assigned another module")
        changed = self.changed()
        try:
            with _RefuseReads(changed, label) if changed else contextlib.nullcontext():
                yield
        except RecomputeError as error:  # compiled functions run otherwise while that looks on
            for _, how in changed:
                error.add_note(f"{how} between forward and backward")
            raise


class _RefuseReads(TorchDispatchMode):
    """Looks at each operation. Taking a view, or overwriting a tensor, reads nothing."""

    def __init__(self, changed: Iterable[tuple[torch.Tensor, str]], label: str) -> None:
        super().__init__()
        self.how = {_storage_of(tensor): how for tensor, how in changed}
        self.label = label

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = _storages_in((args, kwargs)) & self.how.keys()
        for each in read and read - _storages_in(result):
            raise changed_error(self.label, self.how[each])
        return result


def _storages_in(values: Any) -> set[Any]:
    return {_storage_of(each) for each in flatten(values)[0] if isinstance(each, torch.Tensor)}


def _storage_of(tensor: torch.Tensor) -> Any:
    """What a tensor and its views share; a tensor without a storage itself."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse
        return tensor


def text_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def changed_error(label: str, how: str) -> RecomputeError:
    """The error for a value that is no longer that of the first run."""
    return RecomputeError(
        f"{label}: {how} between forward and backward, and the recomputation would see different "
        "values: run backward first (before an optimizer step or a load), or write to a clone"
    )
