"""Stored tensors to which views, stacks and concatenations are applied before they are read.

A converter that was written for tensors (stack the experts, fuse gate and up, transpose) runs on
them unchanged: each step only rewrites boxes, offsets and strides. A step that computes values
raises LoadError, which names the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from anyrank.errors import LoadError
from anyrank.tensors.box import Box
from anyrank.tensors.spec import Chunk, StoredTensor


class SymbolicTensor:
    """A stored tensor with torch's methods and functions that only move elements."""

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
        function = FUNCTIONS.get(func)
        if function is None:
            raise LoadError(
                f"a conversion calls {getattr(func, '__name__', func)}, which computes values, but "
                "anyrank converts only names and layouts. Convert the checkpoint with the library "
                "that created it, save it, and load the result."
            )
        return function(*args, **(kwargs or {}))

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Converters distinguish tensors from lists of tensors by isinstance.
        return torch.Tensor

    def __getattr__(self, name: str) -> Any:
        raise LoadError(
            f"a conversion uses .{name} of a tensor, which anyrank does not know without reading "
            "the tensor. Convert the checkpoint with the library that created it, save it, and "
            "load the result."
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

    clone = detach = contiguous

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
        return self._with_chunks(tuple(sizes), chunks)

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
        return self._with_chunks(pick(self.shape), chunks)

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
        return self._with_dims(lambda values, new: (*values[:dim], new, *values[dim:]))

    def squeeze(self, dim: int) -> SymbolicTensor:
        dim = _dim(dim, self.ndim)
        if self.shape[dim] != 1:
            return self
        return self._with_dims(lambda values, new: (*values[:dim], *values[dim + 1 :]))

    def reshape(self, *shape: Any) -> SymbolicTensor:
        """Return the elements in a different shape, if that is a view of the stored bytes."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        known = math.prod(n for n in sizes if n != -1)
        sizes = tuple(self.numel() // known if n == -1 else int(n) for n in sizes)
        if sizes == tuple(self.shape):
            return self
        if len(self.stored.chunks) != 1:
            raise LoadError(
                f"a conversion reshapes {self.stored.name}, whose bytes are in several pieces"
            )
        (chunk,) = self.stored.chunks
        try:  # torch knows which views are possible
            strides = torch.empty_strided(self.shape, chunk.strides, device="meta").view(sizes)
        except RuntimeError as error:
            raise LoadError(
                f"a conversion reshapes {self.stored.name} from {list(self.shape)} to "
                f"{list(sizes)}, which is not a view of its bytes. Convert the checkpoint with the "
                "library that created it, save it, and load the result."
            ) from error
        return self._with_chunks(
            sizes, [replace(chunk, box=Box.whole(sizes), strides=strides.stride())]
        )

    view = reshape

    def _with_dims(
        self, change: Callable[[tuple[int, ...], int], tuple[int, ...]]
    ) -> SymbolicTensor:
        chunks = [
            replace(
                chunk,
                box=Box(change(chunk.box.offsets, 0), change(chunk.box.sizes, 1)),
                strides=change(chunk.strides, 1),
            )
            for chunk in self.stored.chunks
        ]
        return self._with_chunks(change(tuple(self.shape), 1), chunks)

    def _with_chunks(self, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> SymbolicTensor:
        return SymbolicTensor(StoredTensor(self.stored.name, shape, self.dtype, tuple(chunks)))


def _cat(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    """Concatenate the tensors along a dim."""
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
        shift = tuple(position if d == dim else 0 for d in range(first.ndim))
        chunks += (replace(chunk, box=chunk.box.shifted(shift)) for chunk in tensor.stored.chunks)
        position += tensor.shape[dim]
    shape = tuple(position if d == dim else n for d, n in enumerate(first.shape))
    return SymbolicTensor(StoredTensor(first.stored.name, shape, first.dtype, tuple(chunks)))


def _stack(tensors: Sequence[SymbolicTensor], dim: int = 0) -> SymbolicTensor:
    """Stack the tensors along a new dim."""
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


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
