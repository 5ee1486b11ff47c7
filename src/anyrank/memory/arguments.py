"""The arguments of a call as a flat list, so that tensors at any depth are seen and packed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch's containers have no public module


class Call:
    """A function, and its arguments as a flat list.

    Attributes:
        fn: the function, without any `functools.partial`, whose arguments are among the others.
        leaves: the arguments in order, at any depth of lists, tuples, dicts and registered types;
            the contents of any other container reach the function unchanged.
        spec: their structure.
    """

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.fn, self.args, self.kwargs = unwrap(fn, args, kwargs)
        self.leaves, self.spec = flatten((self.args, self.kwargs))

    def __call__(self) -> Any:
        """Call the function with the caller's own containers: it may fill them."""
        return self.fn(*self.args, **self.kwargs)

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Given leaves, as args and kwargs."""
        return pytree.tree_unflatten(leaves, self.spec)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Call the function with the given leaves."""
        args, kwargs = self.arguments(leaves)
        return self.fn(*args, **kwargs)

    def name(self, position: int) -> str:
        """How a user would write the argument at a position."""
        return _argument_name(position, len(self.leaves), self.spec)


class TensorlessCall:
    """A call without its tensors, which a region may keep while an offload moves the tensors away.

    A tensor that occurs twice among the arguments is kept once, and is the same object when the
    function runs again: some functions compare identities.

    Attributes:
        tensors: the tensors of the call, each once. `drop_tensors` drops them.
        positions: where each of them occurs first.
    """

    def __init__(self, call: Call) -> None:
        self.fn, self.spec = call.fn, call.spec
        self.tensors: list[torch.Tensor] = []
        self.positions: list[int] = []
        self.index: dict[int, int] = {}
        first: dict[int, int] = {}
        for position, leaf in enumerate(call.leaves):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) not in first:
                    first[id(leaf)] = len(self.tensors)
                    self.tensors.append(leaf)
                    self.positions.append(position)
                self.index[position] = first[id(leaf)]
        self.leaves = [None if n in self.index else leaf for n, leaf in enumerate(call.leaves)]

    def drop_tensors(self) -> None:
        self.tensors = []

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """All leaves, with the given tensors in place of the call's own."""
        return [
            tensors[self.index[n]] if n in self.index else leaf
            for n, leaf in enumerate(self.leaves)
        ]

    def run(self, leaves: Sequence[Any]) -> Any:
        """Call the function with the given leaves."""
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.fn(*args, **kwargs)

    def tensor_name(self, number: int) -> str:
        """How a user would write the argument that is tensor `number`."""
        return _argument_name(self.positions[number], len(self.leaves), self.spec)


def _argument_name(position: int, count: int, spec: Any) -> str:
    """How a user would write the argument at a position of `count` leaves."""
    numbers = pytree.tree_unflatten(range(count), spec)
    path, _ = pytree.tree_flatten_with_path(numbers)[0][position]
    root = "args" if str(path[0]) == "[0]" else "kwargs"
    return root + "".join(str(key) for key in path[1:])


def unwrap(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Unwrap a `functools.partial`, with its arguments added to the others."""
    while isinstance(fn, functools.partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    return fn, args, kwargs


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Leaves and structure; None is a leaf."""
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], spec: Any) -> Any:
    """The inverse of `flatten`."""
    return pytree.tree_unflatten(leaves, spec)


def name_of(fn: Callable[..., Any]) -> str:
    """A function's or a module's name in messages."""
    fn = unwrap(fn, (), {})[0]
    owner = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return getattr(fn, "__qualname__", None) or type(fn).__name__
