"""The products that adapters add to weights of `src` while the weights are read (`merge=True`).

Each rank that sends has the whole factors. Their product is computed tile by tile, so that an
element has the same bits whichever rank sends it, and in whichever box.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch

from anyrank.live.ends import Added
from anyrank.loading.sharing.flows import Flow
from anyrank.loading.sharing.places import LocalMemory, turned
from anyrank.loading.sharing.transfers import Transfer
from anyrank.tensors.box import Box

KEPT_TILES = (
    8  # of at most 1 MiB in float32: a box may end within a tile, where the next one starts
)

# A matrix product of few rows or columns uses a different kernel, which rounds differently.
TILE_ROWS, TILE_COLUMNS = 32, 2048


class Adapters:
    """The adapters of this rank's source tensors.

    Args:
        factors: number of the source tensor -> the whole factor.
        added: number of a source tensor -> products added to it, with the numbers of A and B.
    """

    def __init__(
        self,
        factors: Mapping[int, torch.Tensor],
        added: Mapping[int, Sequence[tuple[Added, int, int]]],
    ) -> None:
        self.factors = factors
        self.added = added
        self.kept: OrderedDict[tuple[int, int, Box], torch.Tensor] = OrderedDict()

    def add_to(self, view: torch.Tensor, number: int, box: Box) -> torch.Tensor:
        """Return the elements of a box of a source tensor, merged and rounded as PEFT does.

        PEFT adds the adapters one by one to the weight, in the weight's dtype. A product of float32
        factors is added in float32; for an embedding, it is rounded first.
        """
        merged = view.clone()
        for low, a, b in self.added[number]:
            shape = (self.factors[b].shape[0], self.factors[a].shape[1])
            for tile in tiles(shape[::-1] if low.transposed else shape, box):
                common = tile.intersect(box)
                assert common is not None
                part = self._tile(low, a, b, tile)[common.relative_to(tile.offsets).slices()]
                part = part.to(merged.dtype) if low.narrows else part
                merged[common.relative_to(box.offsets).slices()].add_(part)
        return merged

    def _tile(self, low: Added, a: int, b: int, tile: Box) -> torch.Tensor:
        known = self.kept.get((a, b, tile))
        if known is None:
            known = _rounded_product(self.factors[a], self.factors[b], tile, low)
            self.kept[a, b, tile] = known
            if len(self.kept) > KEPT_TILES:
                self.kept.popitem(last=False)
        return known


def _rounded_product(a: torch.Tensor, b: torch.Tensor, box: Box, low: Added) -> torch.Tensor:
    """Compute scaling * B @ A. As in PEFT, a CPU computes in float32 and rounds to B's dtype."""
    is_wide = not b.is_cpu or b.dtype not in (torch.float16, torch.bfloat16)
    wide = (a, b) if is_wide else (a.float(), b.float())
    return product(*wide, box, low.scaling, transposed=low.transposed).to(b.dtype)


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


class LiveMemory(LocalMemory):
    """This rank's memory of `src` and `dst`, if adapters may add to `src`.

    Args:
        sources: number of a source tensor -> this rank's part of it.
        targets: position in `dst` -> the part that this rank fills.
        adapters: adapters that are added to sources while they are read.
    """

    def __init__(
        self,
        sources: Mapping[int, torch.Tensor],
        targets: Mapping[int, torch.Tensor],
        adapters: Adapters,
    ) -> None:
        super().__init__(sources, targets)
        self.adapters = adapters

    def source_view(self, flow: Flow, transfer: Transfer, box: Box) -> torch.Tensor:
        """Return the elements of a box, merged, in the order of `dst`."""
        if not self.is_computed(flow, transfer):
            return super().source_view(flow, transfer, box)
        strip = flow.strips[transfer.strip]
        view = self.view_of(transfer, strip, box)
        merged = self.adapters.add_to(view, strip.source, strip.to_source(box))
        return turned(merged, strip, box.sizes)

    def is_computed(self, flow: Flow, transfer: Transfer) -> bool:
        """Return True if adapters are added to the values, so that they are not in memory."""
        return flow.strips[transfer.strip].source in self.adapters.added
