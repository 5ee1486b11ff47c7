"""Stored tensors that views, stacks and concatenations can be applied to before anything is read.

A converter written for tensors (stack the experts, fuse gate and up, transpose) runs on these
unchanged: each step only rewrites boxes, offsets and strides. A step that computes values raises
LoadError, which names it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyrank.errors import LoadError
from anyrank.tensors.box import Box, row_major
from anyrank.tensors.spec import Chunk, StoredTensor

MAX_PIECES = 1 << 16  # of a tensor that is reshaped; each takes a separate read


class SymbolicTensor:
    """A stored tensor with the methods and functions of torch that only move elements."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self.shape = torch.Size(stored.shape)
        self.dtype = stored.dtype
        self.device = torch.device("cpu")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        own = FUNCTIONS.get(func)
        if own is None:
            raise LoadError(
                f"a conversion calls {getattr(func, '__name__', func)}, which computes values; "
                "anyrank converts names and layouts only: convert the checkpoint with the library "
                "that made it, save it, and load the result"
            )
        return own(*args, **(kwargs or {}))

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Converters distinguish tensors from lists of tensors by isinstance.
        return torch.Tensor

    def __getattr__(self, name: str) -> Any:
        raise LoadError(
            f"a conversion uses .{name} of a tensor, which anyrank does not know without reading "
            "the tensor: convert the checkpoint with the library that made it, save it, and load "
            "the result"
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.stored.numel

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> SymbolicTensor:
        return self

    def clone(self) -> SymbolicTensor:
        return self

    def detach(self) -> SymbolicTensor:
        return self

    def to(self, *args: Any, **kwargs: Any) -> SymbolicTensor:
        wanted = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
        if any(dtype != self.dtype for dtype in wanted):
            raise LoadError(f"a conversion casts {self.stored.name} to {wanted[0]}")
        return self

    def narrow(self, dim: int, start: int, length: int) -> SymbolicTensor:
        dim = _dim(dim, self.ndim)
        sizes = list(self.shape)
        sizes[dim] = length
        offsets = [0] * self.ndim
        offsets[dim] = start
        window = Box(tuple(offsets), tuple(sizes))
        chunks = [
            Chunk(
                common.relative_to(offsets),
                chunk.file,
                chunk.offset + chunk.element_offset(common) * self.dtype.itemsize,
                chunk.strides,
            )
            for chunk in self.stored.chunks
            if (common := chunk.box.intersect(window)) is not None
        ]
        return self._made(tuple(sizes), chunks)

    def chunk(self, chunks: int, dim: int = 0) -> tuple[SymbolicTensor, ...]:
        return self.split(max(1, -(-self.shape[dim] // chunks)), dim)

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> tuple[SymbolicTensor, ...]:
        total = self.shape[dim]
        if isinstance(split_size, int):
            sizes = [min(split_size, total - low) for low in range(0, total, split_size)]
        else:
            sizes = list(split_size)
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        if sum(sizes) != total:
            raise LoadError(f"a conversion splits {self.stored.name} of {total} rows into {sizes}")
        return tuple(self.narrow(dim, a, n) for a, n in zip(starts, sizes, strict=True))

    def permute(self, *dims: Any) -> SymbolicTensor:
        order = [_dim(d, self.ndim) for d in (dims[0] if len(dims) == 1 else dims)]

        def pick(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[d] for d in order)

        chunks = [
            replace(
                chunk,
                box=Box(pick(chunk.box.offsets), pick(chunk.box.sizes)),
                strides=pick(chunk.strides),
            )
            for chunk in self.stored.chunks
        ]
        return self._made(pick(self.shape), chunks)

    def transpose(self, dim0: int, dim1: int) -> SymbolicTensor:
        order = list(range(self.ndim))
        first, second = _dim(dim0, self.ndim), _dim(dim1, self.ndim)
        order[first], order[second] = second, first
        return self.permute(order)

    def t(self) -> SymbolicTensor:
        return self.transpose(0, 1) if self.ndim == 2 else self

    @property
    def T(self) -> SymbolicTensor:
        return self.permute(list(reversed(range(self.ndim))))

    def unsqueeze(self, dim: int) -> SymbolicTensor:
        dim = _dim(dim, self.ndim + 1)
        return self._each(lambda values, new: (*values[:dim], new, *values[dim:]))

    def squeeze(self, dim: int) -> SymbolicTensor:
        dim = _dim(dim, self.ndim)
        if self.shape[dim] != 1:
            return self
        return self._each(lambda values, new: (*values[:dim], *values[dim + 1 :]))

    def reshape(self, *shape: Any) -> SymbolicTensor:
        """The same elements in another shape: a view, or rows regrouped piece by piece."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        known = math.prod(n for n in sizes if n != -1)
        sizes = tuple(self.numel() // known if n == -1 else int(n) for n in sizes)
        if sizes == tuple(self.shape):
            return self
        whole = len(self.stored.chunks) == 1
        if not whole:
            raise LoadError(f"a conversion reshapes {self.stored.name}, whose bytes lie in pieces")
        chunks = _regrouped(self.stored.chunks[0], sizes, self.dtype.itemsize)
        if chunks is None or len(chunks) > MAX_PIECES:
            raise LoadError(
                f"a conversion reshapes {self.stored.name} from {list(self.shape)} to "
                f"{list(sizes)} across its memory layout"
            )
        return self._made(sizes, chunks)

    view = reshape

    def _each(self, change: Callable[[tuple[int, ...], int], tuple[int, ...]]) -> SymbolicTensor:
        chunks = [
            replace(
                chunk,
                box=Box(change(chunk.box.offsets, 0), change(chunk.box.sizes, 1)),
                strides=change(chunk.strides, 1),
            )
            for chunk in self.stored.chunks
        ]
        return self._made(change(tuple(self.shape), 1), chunks)

    def _made(self, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> SymbolicTensor:
        return SymbolicTensor(StoredTensor(self.stored.name, shape, self.dtype, tuple(chunks)))


def _cat(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    """The tensors one after the other along a dim."""
    first = tensors[0]
    dim = _dim(dim, first.ndim)
    chunks: list[Chunk] = []
    position = 0
    for tensor in tensors:
        rest = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
        if tensor.dtype != first.dtype or rest != (*first.shape[:dim], *first.shape[dim + 1 :]):
            raise LoadError(
                f"a conversion joins {first.stored.name} {list(first.shape)} {first.dtype} and "
                f"{tensor.stored.name} {list(tensor.shape)} {tensor.dtype}"
            )
        by = tuple(position if d == dim else 0 for d in range(first.ndim))
        chunks += (replace(chunk, box=chunk.box.shifted(by)) for chunk in tensor.stored.chunks)
        position += tensor.shape[dim]
    shape = tuple(position if d == dim else n for d, n in enumerate(first.shape))
    return SymbolicTensor(StoredTensor(first.stored.name, shape, first.dtype, tuple(chunks)))


def _stack(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    """The tensors side by side along a new dim."""
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _regrouped(chunk: Chunk, sizes: Sequence[int], itemsize: int) -> list[Chunk] | None:
    """A whole tensor's chunk in another shape, cut where one stride cannot span a new dim.

    Returns None for a shape whose dims cut across those of the chunk.
    """
    groups = _common_groups(chunk.box.sizes, sizes)
    if groups is None:
        return None
    parts = [_regrouped_dims(chunk, old, [sizes[d] for d in new]) for old, new in groups]
    if any(part is None for part in parts):
        return None
    made: list[Chunk] = []
    for choice in itertools.product(*(part for part in parts if part is not None)):
        jump = sum(part.jump for part in choice)
        box = Box(sum((p.offsets for p in choice), ()), sum((p.sizes for p in choice), ()))
        strides = sum((p.strides for p in choice), ())
        made.append(Chunk(box, chunk.file, chunk.offset + jump * itemsize, strides))
    return made


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of some new dims: its box in them, and where it starts in the chunk, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    jump: int


def _regrouped_dims(chunk: Chunk, old: Sequence[int], new: Sequence[int]) -> list[_Part] | None:
    """The pieces of some new dims that hold the same elements as some old ones."""
    old = [d for d in old if chunk.box.sizes[d] != 1]
    lengths, strides = [chunk.box.sizes[d] for d in old], [chunk.strides[d] for d in old]
    inner = len(old)  # dims from here on follow one another, so that one stride spans them
    while inner > 0 and (
        inner == len(old) or strides[inner - 1] == lengths[inner] * strides[inner]
    ):
        inner -= 1
    if inner == 0:  # one dim, or as good as one
        step = strides[-1] if strides else 1
        return [_Part((0,) * len(new), tuple(new), tuple(s * step for s in row_major(new)), 0)]
    if sum(n != 1 for n in new) > 1:
        return None
    long = next(n for n, size in enumerate(new) if size != 1)
    run = math.prod(lengths[inner:])
    steps = tuple(strides[-1] if n == long else 0 for n in range(len(new)))
    made: list[_Part] = []
    for number, at in enumerate(itertools.product(*map(range, lengths[:inner]))):
        offsets = tuple(number * run if n == long else 0 for n in range(len(new)))
        piece = tuple(run if n == long else 1 for n in range(len(new)))
        jump = sum(i * s for i, s in zip(at, strides, strict=False))
        made.append(_Part(offsets, piece, steps, jump))
    return made


def _common_groups(
    old: Sequence[int], new: Sequence[int]
) -> list[tuple[list[int], list[int]]] | None:
    """Runs of old and of new dims that hold equally many elements, in order."""
    groups: list[tuple[list[int], list[int]]] = []
    if 0 in old or math.prod(old) != math.prod(new):
        return None
    i = j = 0
    while i < len(old) or j < len(new):
        have, want = list[int](), list[int]()
        held = wanted = 1
        while not have + want or held != wanted:
            if held <= wanted and i < len(old):
                held, i = held * old[i], i + 1
                have.append(i - 1)
            else:
                wanted, j = wanted * new[j], j + 1
                want.append(j - 1)
        groups.append((have, want))
    return groups


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < max(ndim, 1):
        raise LoadError(f"a conversion uses dim {dim} of a tensor with {ndim} dims")
    return dim % max(ndim, 1)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.stack: _stack,
    torch.chunk: SymbolicTensor.chunk,
    torch.split: SymbolicTensor.split,
    torch.narrow: SymbolicTensor.narrow,
    torch.transpose: SymbolicTensor.transpose,
    torch.permute: SymbolicTensor.permute,
    torch.unsqueeze: SymbolicTensor.unsqueeze,
    torch.squeeze: SymbolicTensor.squeeze,
    torch.reshape: SymbolicTensor.reshape,
    torch.t: SymbolicTensor.t,
}
