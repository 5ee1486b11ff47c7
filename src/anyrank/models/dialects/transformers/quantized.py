"""Weights that are stored as small numbers with scales for blocks, and how they are decoded."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyrank.errors import LoadError
from anyrank.files.listing import Fetch
from anyrank.models.dialects.computed import ComputedFile
from anyrank.tensors.box import row_major
from anyrank.tensors.spec import StoredTensor

METHODS = ("mxfp4", "fp8")
BLOCK = (128, 128)  # DeepSeek's size, which is the default of `quantization_config` for fp8
BLOCK_SIZE = "weight_block_size"
BLOCK_UNIT = 32  # sizes of blocks are multiples of it, if no configuration states them
BLOCKS, SCALES, SCALE_INV = "_blocks", "_scales", "_scale_inv"  # suffixes of keys
# Words in the names of scales of 8-bit weights, for any tool.
SCALE_WORDS = re.compile(
    r"scal(?:e|ing)|amax|absmax|scb|quant|zero_point|(?:^|[._])(?:s|sc|sf|zp|zeros?)$",
    re.IGNORECASE,
)
# Scales that are parameters of a model (CLIP, ConvNeXt, PixArt), and not part of another tensor.
OWN_SCALES = re.compile(
    r"(?:^|[._])(?:(?:logit|layer|residual)_?scal(?:e|ing)|scale_shift)", re.IGNORECASE
)
# Words in the names of packed weights, for any tool.
PACKED_WORDS = re.compile(r"weight|packed|blocks|^_data$|^W_q$|^codes$")
SCALE_DEPTH = 3  # levels below the weight's module, such as weight.quant_state.nf4

# The 16 values of e2m1, and from them the two values of each byte, the low half first.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A float32 tensor that is computed from two stored tensors, each row-major in one file.

    Attributes:
        method: "mxfp4" (two e2m1 values per byte, with an exponent for each group) or "fp8".
        values: the small numbers.
        scales: scales of the blocks.
        shape: shape of the tensor, with the dims in the order of the small numbers.
        block: number of rows and columns that share a scale.
    """

    method: str
    values: StoredTensor
    scales: StoredTensor
    shape: tuple[int, ...]
    block: tuple[int, int]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The tensors that are read for it."""
        return self.values, self.scales

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of stored bytes."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def unit(self) -> int:
        """The number of elements that are computed together: a group of mxfp4, a row of fp8."""
        return self.block[1] if self.method == "mxfp4" else self.shape[-1]

    def with_file_offset(self, base: int) -> Quantized:
        """Return the tensor for a listing whose files start `base` later."""
        return replace(
            self,
            values=self.values.with_file_offset(base),
            scales=self.scales.with_file_offset(base),
        )

    def open(self, path: str, fetch: Fetch) -> ComputedFile:
        """Return its values as a file."""
        return ComputedFile(path, self, fetch)

    def decode(self, start: int, stop: int, fetch: Fetch) -> torch.Tensor:
        """Return elements [start, stop) in row-major order, in whole units, as float32."""
        if self.method == "mxfp4":
            return self._groups(start, stop, fetch)
        return self._rows(start // self.unit, stop // self.unit, fetch)

    def _groups(self, start: int, stop: int, fetch: Fetch) -> torch.Tensor:
        group = self.block[1]
        halves = torch.tensor(E2M1, device="cpu")
        pairs = torch.stack([halves.repeat(16), halves.repeat_interleave(16)], dim=1)
        data = fetch(self.values, start // 2, stop // 2)
        numbers = pairs[data.to(torch.int32)].view(-1, group)
        exponents = fetch(self.scales, start // group, stop // group).to(torch.int32) - 127
        return torch.ldexp(numbers, exponents[:, None], out=numbers).view(-1)

    def _rows(self, start: int, stop: int, fetch: Fetch) -> torch.Tensor:
        rows, columns = self.shape[-2:]
        high, wide = self.block
        grid_rows, grid_columns = -(-rows // high), -(-columns // wide)

        def grid_row(row: int) -> int:
            return row // rows * grid_rows + row % rows // high

        size = self.values.dtype.itemsize
        data = fetch(self.values, start * columns * size, stop * columns * size)
        numbers = data.view(self.values.dtype).to(torch.float32).view(-1, columns)
        first, last, step = grid_row(start), grid_row(stop - 1) + 1, grid_columns
        step *= self.scales.dtype.itemsize
        scales = _as_float(fetch(self.scales, first * step, last * step), self.scales.dtype)
        row = start
        while row < stop:
            matrix, inside = divmod(row, rows)
            end = min(stop, matrix * rows + min(rows, (inside // high + 1) * high))
            row_scales = scales.view(-1, grid_columns)[grid_row(row) - first]
            numbers[row - start : end - start] *= row_scales.repeat_interleave(wide)[:columns]
            row = end
        return numbers.view(-1)


def _as_float(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales as float32; bytes are exponents of two."""
    stored_dtype = torch.float8_e8m0fnu if dtype == torch.uint8 else dtype
    return data.view(stored_dtype).to(torch.float32)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two keys of a source that form one tensor.

    Attributes:
        method: as for `Quantized`.
        values, scales: the keys.
        name: the key of the tensor that they form.
    """

    method: str
    values: str
    scales: str
    name: str

    def quantized(self, tensors: Mapping[str, StoredTensor], sizes: object) -> Quantized:
        """Interpret the two tensors by their shapes.

        Args:
            tensors: the tensors of the source.
            sizes: for fp8, rows and columns of its blocks; see `blocks_of`.

        Raises:
            LoadError: the scales do not match, the sizes are not known, or the bytes are in several
                pieces.
        """
        values, scales = tensors[self.values], tensors[self.scales]
        if self.method == "mxfp4":
            *rest, groups, width = values.shape
            shape, block, grid = (*rest, groups * width * 2), (1, width * 2), (*rest, groups)
        else:
            shape = values.shape
            *rest, rows, columns = shape
            block = self._block(values, scales, sizes)
            grid = (*rest, -(-rows // block[0]), -(-columns // block[1]))
        one_a_matrix = self.method == "fp8" and block == shape[-2:]
        if scales.shape != grid and not (one_a_matrix and scales.numel == math.prod(rest)):
            raise LoadError(
                f"{self.scales}: has shape {list(scales.shape)}, but {self.values} of shape "
                f"{list(shape)} in blocks of {block[0]} x {block[1]} needs scales of shape "
                f"{list(grid)}. Correct the block size, {BLOCK_SIZE} of quantization_config in "
                "config.json."
            )
        for stored in (values, scales):
            if len(stored.chunks) != 1 or stored.chunks[0].strides != row_major(stored.shape):
                raise LoadError(
                    f"{stored.name}: its bytes are in several pieces, so it cannot be dequantized "
                    "while it is read. First convert the source to safetensors (anyrank.convert)."
                )
        return Quantized(self.method, values, scales, shape, block)

    def _block(self, values: StoredTensor, scales: StoredTensor, sizes: object) -> tuple[int, int]:
        *rest, rows, columns = values.shape
        if sizes is None or scales.numel == math.prod(rest):
            return rows, columns  # a single scale
        match sizes:
            case [high, wide] if type(high) is type(wide) is int and min(high, wide) > 0:
                # Not larger than the tensor, so that no memory is allocated for columns that do not
                # exist.
                return min(high, max(1, rows)), min(wide, max(1, columns))
            case []:
                raise LoadError(
                    f"{self.scales}: has shape {list(scales.shape)} for {self.values} of shape "
                    f"{list(values.shape)}, so several block sizes are possible, and nothing "
                    "states which rows and columns share a scale. Put a config.json next to the "
                    "file (save a dict with safetensors first), with {'quantization_config': "
                    f"{{'quant_method': 'fp8', '{BLOCK_SIZE}': [...]}}}}."
                )
            case _:
                raise LoadError(
                    f"{BLOCK_SIZE} of quantization_config: expected two ints, got {sizes!r}"
                )


def blocks_of(
    config: Mapping[str, Any], pairs: Iterable[Pair], tensors: Mapping[str, StoredTensor]
) -> object:
    """Return the rows and columns of fp8 blocks in a source.

    Returns:
        The size in its configuration, or else the only size that matches all grids of scales; () if
        none or several match. None means one scale per matrix.
    """
    if BLOCK_SIZE in config:
        return config[BLOCK_SIZE]
    if config.get("quant_method") == "fp8":
        return BLOCK
    shapes = [
        (tensors[p.values].shape, tensors[p.scales].shape) for p in pairs if p.method == "fp8"
    ]
    grids = [(s, grid) for s, grid in shapes if math.prod(grid) not in (0, math.prod(s[:-2]))]
    if any(len(shape) != len(grid) for shape, grid in grids):
        return ()
    ranges = [_sizes_of([(s[dim], grid[dim]) for s, grid in grids]) for dim in (-2, -1)]
    if (1, 1) not in ranges:  # blocks are squares or parts of one row
        ranges = [(max(least for least, _ in ranges), min(most for _, most in ranges))] * 2
    sizes = [_one_of(*pair) for pair in ranges]
    return () if None in sizes else sizes


def _sizes_of(cuts: Sequence[tuple[int, int]]) -> tuple[int, float]:
    """Return the smallest and the largest size of pieces that match each length and its count."""
    least = max((-(-length // pieces) for length, pieces in cuts), default=1)
    most = min(((n - 1) // (pieces - 1) for n, pieces in cuts if pieces > 1), default=math.inf)
    return least, most


def _one_of(least: int, most: float) -> int | None:
    """Return the only size in a range that blocks may have; None unless it is unique."""
    first = -(-least // BLOCK_UNIT) * BLOCK_UNIT
    if math.isinf(most) or least == most:  # the whole length, however large the blocks are
        return least
    return first if first <= most < first + BLOCK_UNIT else None


def pairs_of(tensors: Mapping[str, StoredTensor]) -> list[Pair]:
    """Find the pairs of a source by their names and dtypes."""
    pairs: list[Pair] = []
    for key, scales in tensors.items():
        exponents = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
        stem = key.removesuffix(SCALES)
        blocks = tensors.get(stem + BLOCKS) if stem != key and exponents else None
        if blocks is not None and blocks.dtype == torch.uint8 and len(blocks.shape) > 1:
            pairs.append(Pair("mxfp4", stem + BLOCKS, key, stem))
        stem = key.removesuffix(SCALE_INV)
        numbers = exponents or scales.dtype.is_floating_point
        values = tensors.get(stem) if stem != key and numbers else None
        if values is not None and is_small(values.dtype) and len(values.shape) > 1:
            pairs.append(Pair("fp8", stem, key, stem))
    return pairs


def is_small(dtype: torch.dtype) -> bool:
    """Return whether a dtype is an 8-bit float."""
    return dtype.is_floating_point and dtype.itemsize == 1


def is_wide(dtype: torch.dtype) -> bool:
    """Return whether a dtype is one of unquantized weights."""
    return dtype.is_floating_point and not is_small(dtype)


def _is_8_bit(dtype: torch.dtype) -> bool:
    """Return whether a dtype may be that of a weight's numbers without the scale."""
    return is_small(dtype) or dtype in (torch.int8, torch.uint8)


def scales_of(
    tensors: Iterable[StoredTensor],
    beside: Iterable[StoredTensor] = (),
    tables: Collection[str] = (),
) -> dict[str, str]:
    """Map keys that look like scales of small numbers to the keys of their tensors.

    Scales are in the tensor's module or below it: `X_scale`, `scale_weight`,
    `weight_quantizer._scale`; in a module above it: `fc_scale`, `scales`; or below one name for all
    scales: `scales.X`. load, convert and sync use this to decide whether a weight has a scale.

    Args:
        tensors: the tensors of the source.
        beside: tensors of other tables, by whole keys, because scales may be in a separate table.
        tables: prefixes of small tensors that the scales' table does not have.
    """
    tensors = list(tensors)
    small = [stored for stored in tensors if may_be_scaled(stored)]
    owners = owners_of(small)
    cut = [name.partition(".") for name in dict.fromkeys(owners.values())]
    names = [inner for table, _, inner in cut if table in tables]
    within = {name.rpartition(".")[0]: name for name in names} | {name: name for name in names}
    whole = {inner: f"{table}.{inner}" for table, _, inner in cut if table in tables}
    elsewhere = {name: whole[inner] for name, inner in within.items()} | owners
    children = _children_of(elsewhere)
    by_name = {stored.name: stored for stored in small}
    scales: dict[str, str] = {}
    for number, stored in enumerate([*tensors, *beside] if owners else ()):
        if stored.dtype == torch.int64 or OWN_SCALES.search(stored.name):
            continue
        parts = stored.name.split(".")
        tensors_found: list[StoredTensor] = []
        for depth in range(1, min(len(parts), SCALE_DEPTH) + 1) if number < len(tensors) else ():
            owner, rest = ".".join(parts[:-depth]), ".".join(parts[-depth:])
            weight = by_name.get(owners.get(owner, ""), stored)
            if SCALE_WORDS.search(rest) or _extends(stored, weight):
                tensors_found.append(weight)
        outside = by_name.get(_owner_outside(parts, elsewhere, children) or "")
        # It must not be a second set of weights, such as `quantized.X`.
        if outside is not None and stored.numel < outside.numel:
            tensors_found.append(outside)
        for weight in tensors_found:
            if weight is not stored and not is_cast_along(stored, weight):
                scales.setdefault(stored.name, weight.name)
    return scales


def _children_of(owners: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Map the names above small tensors to the next name segments, and those to a tensor."""
    children: dict[str, dict[str, str]] = {}
    for name, owner in owners.items():
        parts = name.split(".")
        for end in range(len(parts)):
            children.setdefault(".".join(parts[:end]), {}).setdefault(parts[end], owner)
    return children


def _owner_outside(
    parts: Sequence[str], owners: Mapping[str, str], children: Mapping[str, Mapping[str, str]]
) -> str | None:
    """Return the small tensor whose scale, outside its module, has a name of these segments."""
    for number, word in enumerate(parts):
        if SCALE_WORDS.search(word) is None:
            continue
        above, below = parts[:number], parts[number + 1 :]
        # Below a name for all scales: `scales.fc`, `layers.0.scales.fc.weight`.
        names = [".".join([*above, *below[:end]]) for end in (len(below), -1) if below[:end]]
        scales = [owners[name] for name in names if name in owners]
        # In a module above: `fc_scale` or `scale_fc` of fc, `scales` of all.
        inner = children.get(".".join(above), {})
        scales += [
            owner
            for child, owner in inner.items()
            if word.startswith(f"{child}_") or word.endswith(f"_{child}")
        ]
        scales += [] if below else inner.values()
        if scales:
            return scales[0]
    return None


def may_be_scaled(stored: StoredTensor) -> bool:
    """Return whether a tensor may be a weight's numbers without the scale."""
    is_integer = not stored.dtype.is_floating_point and not stored.dtype.is_complex
    return _is_8_bit(stored.dtype) or (is_integer and is_packed(stored.name))


def is_packed(name: str) -> bool:
    """Return whether an integer tensor has a weight's name: `weight`, `qweight`, `X_packed`."""
    return PACKED_WORDS.search(name.rpartition(".")[2]) is not None


def _extends(stored: StoredTensor, weight: StoredTensor) -> bool:
    """Return whether a tensor is part of a weight by its name, and has fewer elements.

    For example `weight_shared_exponents`.
    """
    rest = stored.name.removeprefix(weight.name)
    is_longer = rest != stored.name and rest.startswith(("_", "."))
    return is_longer and "bias" not in rest and stored.numel < weight.numel


def owners_of(tensors: Iterable[StoredTensor]) -> dict[str, str]:
    """Map the modules and the names of 8-bit tensors to these tensors.

    If a module has several, the largest is the weight, because exponents, zero points and metadata
    of a format may also have 8 bits.
    """
    tensors = sorted(tensors, key=lambda stored: stored.numel)
    names = [stored.name for stored in tensors]
    return {name.rpartition(".")[0]: name for name in names} | {name: name for name in names}


def is_cast_along(stored: StoredTensor, weight: StoredTensor) -> bool:
    """Return whether a tensor is a parameter in a file that was cast to FP8 as a whole.

    In that case it is not the scale of a weight.
    """
    is_cast = is_small(stored.dtype) and stored.dtype != torch.float8_e8m0fnu
    return is_cast and is_small(weight.dtype)
