"""Folders of quantized weights, and their values as torch's own reader computes them."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader

Tensors = dict[str, torch.Tensor]
ROWS, COLUMNS, BLOCK = 37, 54, 16  # uneven last blocks in both dims
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["norm"]}


def fp8(rows: int = ROWS, columns: int = COLUMNS, block: int = BLOCK) -> tuple[torch.Tensor, ...]:
    """Random 8-bit weights of every finite bit pattern, and a scale for each block."""
    bits = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0  # the NaNs of e4m3fn
    return bits.view(torch.float8_e4m3fn), torch.rand(-(-rows // block), -(-columns // block)) + 0.1


def mxfp4(experts: int = 3, rows: int = 10, groups: int = 2) -> tuple[torch.Tensor, ...]:
    """Random pairs of e2m1, and exponents from the smallest to what float32 still holds."""
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8)
    return blocks, torch.randint(0, 250, (experts, rows, groups), dtype=torch.uint8)


def write(folder: Path, tensors: Tensors, config: dict[str, object] | None) -> str:
    """A Hugging Face folder of two files, scales apart from what they scale, and its config."""
    folder.mkdir(exist_ok=True)
    scales = {name: t for name, t in tensors.items() if name.endswith(("_inv", "_scales"))}
    others = {name: t for name, t in tensors.items() if name not in scales}
    files = {"model-00001-of-00002.safetensors": others, "model-00002-of-00002.safetensors": scales}
    for name, held in files.items():
        save_file(held, folder / name)
    index = {key: name for name, held in files.items() for key in held}
    table = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return str(folder)


class TorchReader(QuantizedHuggingFaceStorageReader):
    """Torch's reader; it leaves chunks of mxfp4 in their packed sizes, of which a plan reads 2."""

    def read_metadata(self) -> Any:
        found = super().read_metadata()
        for name, about in found.state_dict_metadata.items():
            if name.endswith("_blocks"):
                about.chunks = [replace(about.chunks[0], sizes=about.size)]
        return found


def read_by_torch(folder: str, shapes: dict[str, tuple[int, ...]], block: int = BLOCK) -> Tensors:
    """The values in float32, by torch's reader."""
    wanted = {name: torch.empty(shape) for name, shape in shapes.items()}
    reader = TorchReader(folder, block_size=block)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    return wanted
