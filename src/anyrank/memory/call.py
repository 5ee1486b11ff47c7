"""The arguments of a call as a flat list, so that tensors at any depth are found and saved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch has no public module for nested containers


class Call:
    """A function, and its arguments as a flat list.

    A tensor that occurs twice among the arguments is kept once, and is the same object when the
    function runs again, because some functions compare identities.

    Attributes:
        fn: the function, without any `functools.partial`, whose arguments are among the leaves.
        leaves: the arguments in order, at any depth of lists, tuples, dicts and registered types;
            the contents of any other container reach the function unchanged.
        tensors: the tensors among the leaves, each once.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.fn, self.args, self.kwargs = unwrap(fn, args, kwargs)
        self.leaves, self.spec = flatten((self.args, self.kwargs))
        # Most calls have no containers, and flattening costs more than the rest of a tile.
        values = (*self.args, *self.kwargs.values())
        self.is_flat = len(values) == len(self.leaves) and all(map(is_, values, self.leaves))
        self.positional, self.names = len(self.args), list(self.kwargs)
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}  # position of a leaf -> number of the tensor there
        known: dict[int, int] = {}
        for position, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in known:
                    known[id(leaf)] = len(self.tensors)
                    self.tensors.append(leaf)
                self.numbers[position] = known[id(leaf)]

    def __call__(self) -> Any:
        """Call the function with the caller's own containers, because it may fill them."""
        return self.fn(*self.args, **self.kwargs)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Call the function with these leaves."""
        args, kwargs = self.arguments(leaves)
        return self.fn(*args, **kwargs)

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert leaves to args and kwargs."""
        if self.is_flat:
            count = self.positional
            return tuple(leaves[:count]), dict(zip(self.names, leaves[count:], strict=True))
        return pytree.tree_unflatten(leaves, self.spec)

    def filled(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the leaves with these tensors in place of the call's own."""
        return [
            tensors[self.numbers[n]] if n in self.numbers else leaf
            for n, leaf in enumerate(self.leaves)
        ]

    def drop_tensors(self) -> None:
        """Keep only what backward needs to run the function on tensors stored elsewhere.

        An offload may then move the tensors away. Afterwards the call cannot run again.
        """
        self.args, self.kwargs, self.tensors = (), {}, []
        self.leaves = [None if n in self.numbers else leaf for n, leaf in enumerate(self.leaves)]

    def name(self, position: int) -> str:
        """Return the argument at a position as a user would write it."""
        numbers = pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        path, _ = pytree.tree_flatten_with_path(numbers)[0][position]
        root = "args" if str(path[0]) == "[0]" else "kwargs"
        return root + "".join(str(key) for key in path[1:])

    def tensor_name(self, number: int) -> str:
        """Return the argument that is the tensor of this number as a user would write it."""
        return self.name(next(p for p, n in self.numbers.items() if n == number))


def unwrap(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Unwrap a `functools.partial`; add its arguments to `args` and `kwargs`."""
    while isinstance(fn, functools.partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    return fn, args, kwargs


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a value and its structure, which is None for a tensor.

    None is a leaf.
    """
    return ([value], None) if isinstance(value, torch.Tensor) else pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """Rebuild a value from its leaves and structure."""
    return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)


def find_module(fn: Callable[..., Any]) -> torch.nn.Module | None:
    """Return the module that a function is or belongs to; else None."""
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


def function_name(fn: Callable[..., Any]) -> str:
    """Return the name of a function or a module for messages."""
    fn = unwrap(fn, (), {})[0]
    if (owner := find_module(fn)) is not None:
        return type(owner).__name__
    return getattr(fn, "__qualname__", None) or type(fn).__name__
