"""The product that LoRA adds to a weight: scaling * B @ A, for any box of the weight.

Pure functions.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from anyrank.tensors.box import Box

# A matrix product of few rows or columns uses a different kernel, which rounds differently.
TILE_ROWS, TILE_COLUMNS = 32, 2048


def product(
    a: torch.Tensor, b: torch.Tensor, box: Box, scaling: float, *, transposed: bool
) -> torch.Tensor:
    """Compute a box of scaling * B @ A, or of its transpose.

    Args:
        a: tensor [rank, columns].
        b: tensor [rows, rank].
        box: box in the weight.
        scaling: factor as PEFT computes it.
        transposed: whether the weight is stored [in, out].
    """
    rows, columns = box.slices()
    values = (b[columns] @ a[:, rows]).T if transposed else b[rows] @ a[:, columns]
    return values * scaling


def tiles(shape: Sequence[int], box: Box) -> Iterator[Box]:
    """Yield the tiles of a matrix that a box touches. They depend only on the shape of the matrix.

    A product that is computed tile by tile has the same bits in every box, on every rank.
    """
    numel = TILE_ROWS * TILE_COLUMNS
    least = (max(TILE_ROWS, numel // shape[1]), max(TILE_COLUMNS, numel // shape[0]))
    by_dim = [
        _cuts(size, length, low, low + count)
        for size, length, low, count in zip(shape, least, box.offsets, box.sizes, strict=True)
    ]
    for (row, rows), (column, columns) in itertools.product(*by_dim):
        yield Box((row, column), (rows, columns))


def _cuts(size: int, least: int, low: int, high: int) -> list[tuple[int, int]]:
    """List the start and length of a dim's parts that touch [low, high); the last is longer."""
    count = max(1, size // least)
    first, last = min(low // least, count - 1), min((high - 1) // least, count - 1)
    return [
        (n * least, least if n < count - 1 else size - n * least) for n in range(first, last + 1)
    ]
