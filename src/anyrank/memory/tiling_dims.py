"""Cut a call into tiles along dims, and join the tiles' results.

Cutting with `split` and joining with `cat` would each hold a second tensor of full size. Instead,
two autograd functions pass one tensor from tile to tile: `TakeTile` returns one tile of the input,
`PlaceTile` writes one tile into the output. Backward visits them in reverse order with one
gradient buffer for each, so one tile's tensors are alive at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from anyrank.memory.call import Call, flatten, unflatten, unwrap
from anyrank.tensors.torch_classes import is_dtensor
from anyrank.wording import count

Dims = list[int | None]  # one entry per leaf


class Tiling:
    """The tiles of one call.

    Attributes:
        dims: for each leaf the dim along which it is tiled, or None.
        size: total number of rows.
        starts: first row of each tile.
    """

    def __init__(self, call: Call, dims: Dims, chunk_size: int, label: str) -> None:
        sizes: dict[int, int] = {}
        self.dims: Dims = []
        for n, (leaf, dim) in enumerate(zip(call.leaves, dims, strict=True)):
            if dim is None or not isinstance(leaf, torch.Tensor):
                self.dims.append(None)
                continue
            if is_dtensor(leaf):
                raise ValueError(
                    f"{label}: {call.name(n)} is a DTensor ({leaf.placements} on "
                    f"{leaf.device_mesh}), but only plain tensors can be tiled. Tile an inner "
                    "module, which gets plain tensors, or pass to_local() or full_tensor()"
                )
            self.dims.append(_nonnegative_dim(dim, leaf, f"{label}: {call.name(n)}"))
            sizes[n] = leaf.shape[dim]
        if not sizes:
            raise ValueError(f"{label}: in_dims names no tensor among the arguments of this call")
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{call.name(n)} has {size}" for n, size in sizes.items())
            raise ValueError(
                f"{label}: tiled arguments must have the same number of rows, but {counts}. Set "
                "None in in_dims for arguments to pass whole"
            )
        self.size = next(iter(sizes.values()))
        self.chunk_size = chunk_size
        self.starts = list(range(0, self.size, chunk_size)) or [0]

    def length(self, k: int) -> int:
        """Return the number of rows of tile `k`."""
        return min(self.chunk_size, self.size - self.starts[k])

    def tile(self, k: int, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of tile `k`."""
        return [
            leaf if dim is None else _take_rows(leaf, dim, self.starts[k], self.length(k))
            for leaf, dim in zip(leaves, self.dims, strict=True)
        ]


def _nonnegative_dim(dim: Any, tensor: torch.Tensor, where: str) -> int:
    if not isinstance(dim, int):
        raise TypeError(f"{where}: expected a dim (an int or None), got {dim!r}")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"{where}: dim {dim} does not exist in the shape {list(tensor.shape)}")
    return dim % tensor.ndim


def _expand_dims(dims: Any, value: Any, where: str) -> Dims:
    """Return the dims of a value's leaves.

    An int or None applies to all leaves; a list, tuple or dict has one entry per part.
    """
    if dims is None or isinstance(dims, int):
        return [dims] * len(flatten(value)[0])
    parts = members(value)
    entries = members(dims)
    if parts is None or entries is None or parts.keys() != entries.keys():
        raise ValueError(
            f"{where}: dims {dims!r} do not match the structure of a {type(value).__name__}"
        )
    return [dim for key in parts for dim in _expand_dims(entries[key], parts[key], where)]


def members(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value)
    if isinstance(value, list | tuple):
        return dict(enumerate(cast("Sequence[Any]", value)))
    return None


def check_dims(name: str, dims: Any) -> None:
    """Raise TypeError if an entry is not a dim."""
    for dim in flatten(dims)[0]:
        if isinstance(dim, bool) or not (dim is None or isinstance(dim, int)):
            raise TypeError(f"{name}={dims!r}: expected dims (an int or None), got {dim!r}")


def check_chunk_size(chunk_size: Any, unit: str) -> None:
    """Raise TypeError or ValueError if this is not the size of a tile."""
    if isinstance(chunk_size, bool) or not hasattr(chunk_size, "__index__"):
        raise TypeError(
            f"chunk_size={chunk_size!r}: expected an int, got {type(chunk_size).__name__}"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1 {unit}")


class TiledArguments:
    """The arguments of a function to which `in_dims` applies.

    Attributes:
        fn: the function, without any `functools.partial`, whose own arguments are not tiled.
    """

    def __init__(self, fn: Callable[..., Any], in_dims: Any, label: str) -> None:
        if isinstance(in_dims, bool) or not isinstance(in_dims, int | tuple | dict):
            raise TypeError(
                f"in_dims={in_dims!r}: expected an int, a tuple or a dict of names, got "
                f"{type(in_dims).__name__}"
            )
        check_dims("in_dims", in_dims)
        self.fn, self.args, self.kwargs = unwrap(fn, (), {})
        self.in_dims: Any = in_dims
        self.label = label
        if isinstance(in_dims, dict) and not any(
            p.kind is p.VAR_KEYWORD for p in self.parameters()
        ):
            self.check_names(cast("dict[str, Any]", in_dims))

    def values(self) -> list[Any]:
        """Return the arguments in the `functools.partial`."""
        return [*self.args, *self.kwargs.values()]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Dims]:
        """Return the call, and the dims of its leaves."""
        positional, named = self.entries(args, kwargs)
        positional = [None] * len(self.args) + positional
        args, kwargs = (*self.args, *args), {**self.kwargs, **kwargs}
        dims = [
            dim
            for entry, value in zip(positional, args, strict=True)
            for dim in _expand_dims(entry, value, self.label)
        ]
        for name, value in kwargs.items():
            dims += _expand_dims(named.get(name), value, f"{self.label}: {name}")
        return Call(self.fn, args, kwargs), dims

    def entries(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the entries of `in_dims` for positional and for keyword arguments."""
        if isinstance(self.in_dims, tuple):
            entries: tuple[Any, ...] = cast("tuple[Any, ...]", self.in_dims)
            if len(entries) != len(args):
                raise ValueError(
                    f"{self.label}: in_dims= has {count(len(entries), 'entry', 'entries')}, but "
                    f"the call has {count(len(args), 'positional argument')}. For keyword "
                    "arguments, pass a dict"
                )
            return list(entries), {}
        if isinstance(self.in_dims, int):
            if args:
                return [self.in_dims, *[None] * (len(args) - 1)], {}
            return [], dict.fromkeys(list(kwargs)[:1], self.in_dims)
        return self.by_name(args, kwargs)

    def parameters(self) -> list[inspect.Parameter]:
        """Return the parameters of the function that a `functools.partial` has not filled."""
        forward: Any = getattr(self.fn, "forward", self.fn)
        return list(inspect.signature(forward).parameters.values())[len(self.args) :]

    def check_names(self, names: Iterable[str], others: Iterable[str] = ()) -> None:
        """Raise ValueError if a name is not an argument."""
        known = [p.name for p in self.parameters()]
        if unknown := set(names) - {*known, *others}:
            raise ValueError(
                f"{self.label}: in_dims= names {sorted(unknown)}, but the arguments are "
                f"{', '.join(known)}"
            )

    def by_name(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        named: dict[str, Any] = self.in_dims
        self.check_names(named, kwargs)
        known = [p.name for p in self.parameters()]
        names = known[: len(args)] + [""] * (len(args) - len(known))
        return [named.get(name) for name in names], {k: v for k, v in named.items() if k in kwargs}


class JoinedResults:
    """The results of the tiles, each written at once into a tensor of full size.

    Raises:
        ValueError: from `add`: a result does not match `out_dims`, or that of the first tile.
    """

    def __init__(self, out_dims: Any, tiling: Tiling, label: str) -> None:
        self.out_dims = out_dims
        self.tiling = tiling
        self.label = label
        self.leaves: list[Any] = []
        self.dims: list[int | None] = []
        self.spec: Any = None

    def add(self, k: int, result: Any) -> None:
        leaves, spec = flatten(result)
        if k == 0:
            self.start(result, leaves, spec)
        elif spec != self.spec:
            raise ValueError(f"{self.label}: tile {k} returns a different structure than tile 0")
        for n, (leaf, dim) in enumerate(zip(leaves, self.dims, strict=True)):
            if dim is None:
                self.check_same(k, leaf, self.leaves[n])
            else:
                self.check_rows(k, leaf, dim, self.leaves[n])
                self.leaves[n] = PlaceTile.apply(self.leaves[n], leaf, dim, self.tiling.starts[k])

    def start(self, result: Any, leaves: list[Any], spec: Any) -> None:
        self.spec = spec
        for leaf, dim in zip(leaves, _expand_dims(self.out_dims, result, self.label), strict=True):
            if not isinstance(leaf, torch.Tensor):
                self.dims.append(None)
                self.leaves.append(leaf)
                continue
            if dim is None:
                raise ValueError(
                    f"{self.label}: a result of shape {list(leaf.shape)} has None in out_dims. Set "
                    "the dim along which the tiles' results are joined"
                )
            dim = _nonnegative_dim(dim, leaf, f"{self.label}: a result")
            shape = [*leaf.shape[:dim], self.tiling.size, *leaf.shape[dim + 1 :]]
            self.dims.append(dim)
            self.leaves.append(torch.empty(shape, dtype=leaf.dtype, device=leaf.device))

    def check_same(self, k: int, leaf: Any, first: Any) -> None:
        try:
            differs = isinstance(leaf, torch.Tensor) or bool(leaf != first)
        except RuntimeError as error:  # == on a container compares its tensors
            raise ValueError(
                f"{self.label}: returns a {type(leaf).__name__}, whose tensors cannot be joined. "
                "Return a tensor, or a tuple, list or dict of tensors"
            ) from error
        if differs:
            raise ValueError(
                f"{self.label}: tile {k} returns {leaf!r}, but tile 0 returned {first!r} in its "
                "place. Results that are not tensors must be equal for all tiles"
            )

    def check_rows(self, k: int, leaf: Any, dim: int, whole: torch.Tensor) -> None:
        expected = list(whole.shape)
        expected[dim] = self.tiling.length(k)
        shape = list(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
        if isinstance(leaf, torch.Tensor) and shape == expected and leaf.dtype != whole.dtype:
            raise ValueError(
                f"{self.label}: tile {k} returns {leaf.dtype}, but tile 0 {whole.dtype} in its "
                "place"
            )
        if shape != expected:
            raise ValueError(
                f"{self.label}: tile {k} returns shape {shape}, expected {expected}: its "
                f"{self.tiling.length(k)} rows in dim {dim} (out_dims), and the other dims as in "
                "tile 0. (A result that is sharded over the ranks, such as that of sequence "
                "parallel layers, cannot be joined.)"
            )

    def cat(self, parts: list[Any]) -> Any:
        """Join all results at once, with operations that torch.compile supports."""
        flat = [flatten(part)[0] for part in parts]
        dims = _expand_dims(self.out_dims, parts[0], self.label)
        joined = [
            torch.cat(leaves, dim or 0) if isinstance(leaves[0], torch.Tensor) else leaves[0]
            for leaves, dim in zip(zip(*flat, strict=True), dims, strict=True)
        ]
        return unflatten(joined, flatten(parts[0])[1])

    def result(self) -> Any:
        return unflatten(self.leaves, self.spec)


class TakeTile(torch.autograd.Function):
    """(x) -> (tile of x, x)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, start: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.cut = (dim, start, length)
        ctx.like = (x.shape, x.dtype, x.device)
        return _take_rows(x, dim, start, length), x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        tile, rest = grads
        dim, start, length = ctx.cut
        if tile is None and rest is None:
            return None, None, None, None
        shape, dtype, device = ctx.like
        if rest is None:  # the last tile that has a gradient; later tiles have none
            rest = torch.empty(shape, dtype=dtype, device=device)
            end = start + length
            rest.narrow(dim, end, shape[dim] - end).zero_()
        # Only this link uses `rest`, the gradient from the next link: it is the chain's only
        # buffer.
        rows = rest.narrow(dim, start, length)
        rows.zero_() if tile is None else rows.copy_(tile)
        return rest, None, None, None


class PlaceTile(torch.autograd.Function):
    """(y, tile) -> y, with the tile written into it."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, tile: torch.Tensor, dim: int, start: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cut = (dim, start, tile.shape[dim])
        ctx.mark_dirty(y)
        y.narrow(*ctx.cut).copy_(tile)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        (grad,) = grads
        # Returned whole, because each earlier link uses only its own rows.
        return grad, None if grad is None else _take_rows(grad, *ctx.cut), None, None


def _take_rows(tensor: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    """Return a tile of a tensor, contiguous if the tensor is, because functions may call `view`."""
    rows = tensor.narrow(dim, start, length)
    return rows.contiguous() if tensor.is_contiguous() else rows
