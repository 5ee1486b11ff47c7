"""A dialect in one file: 4-bit weights as compressed-tensors packs them.

anyrank itself does not read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from anyrank.errors import LoadError
from anyrank.files.listing import Fetch, FileInfo, Listing
from anyrank.models.dialects.computed import ITEM, ComputedFile
from anyrank.models.dialects.dialect import Dialect
from anyrank.sources.tables.renaming import Renamer
from anyrank.tensors.spec import StoredTensor


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A float32 weight [rows, columns]: eight numbers in each int32, a scale for each group."""

    packed: StoredTensor  # int32 [rows, columns / 8], the lowest bits first, each number plus 8
    scales: StoredTensor  # float32 [rows, groups]
    method: str = "int4"

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.packed, self.scales

    @property
    def numel(self) -> int:
        return self.packed.numel * 8

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes

    @property
    def unit(self) -> int:
        return self.packed.shape[1] * 8  # a row is decoded at a time

    def with_file_offset(self, base: int) -> PackedWeight:
        return PackedWeight(*(part.with_file_offset(base) for part in self.parts))

    def open(self, path: str, fetch: Fetch) -> ComputedFile:
        return ComputedFile(path, self, fetch)

    def decode(self, start: int, stop: int, fetch: Fetch) -> torch.Tensor:
        groups, rows = self.scales.shape[1], (start // self.unit, stop // self.unit)
        words = fetch(self.packed, start // 2, stop // 2).view(torch.int32)
        numbers = (words[:, None] >> torch.arange(0, 32, 4)).bitwise_and(15) - 8
        first, last = (row * groups * ITEM for row in rows)
        scales = fetch(self.scales, first, last).view(torch.float32)
        return (numbers.view(len(scales), -1) * scales[:, None]).view(-1)


class PackedNumbers(Dialect):
    """The packed weights of a source."""

    @staticmethod
    def values(listing: Listing, dtypes: Mapping[str, torch.dtype], rename: Renamer) -> Listing:
        """Read what config.json says is packed by this method."""
        if listing.quantization.get("quant_method") != "compressed-tensors":
            return listing
        tensors, files = dict(listing.tensors), list(listing.files)
        for key in [key for key in tensors if key.endswith("_packed")]:
            name = key.removesuffix("_packed")
            packed, scales = tensors.pop(key), tensors.pop(f"{name}_scale", None)
            if scales is None:
                raise LoadError(f"{key}: {name}_scale is not in the source: fetch it again")
            weight, source = PackedWeight(packed, scales), files[packed.chunks[0].file]
            info = FileInfo(name, weight.numel * ITEM, source.version, computed=weight)
            shape = (packed.shape[0], weight.unit)
            tensors[name] = StoredTensor.contiguous(name, shape, torch.float32, len(files), 0)
            files.append(info)
        # Else a match would refuse a method that nobody has handled.
        return replace(listing, tensors=tensors, files=tuple(files), quantization={})
