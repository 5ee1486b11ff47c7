"""Quantized sources into sharded models: each rank reads the blocks of its own share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.quantized import COLUMNS, FP8, ROWS, fp8, mxfp4, read_by_torch, write
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import anyrank
from anyrank.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.up = nn.Parameter(torch.zeros(3, 64, 10))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = Net()


def folder_of(folder: Path) -> str:
    torch.manual_seed(0)
    stored = dict(zip(("l.weight", "l.weight_scale_inv"), fp8(), strict=True))
    stored |= dict(zip(("l.up_blocks", "l.up_scales"), mxfp4(), strict=True))
    return write(folder, stored, FP8)


def job_load(folder: str, dim: int, strategy: Any) -> tuple[Any, list[int], dict[str, str]]:
    with anyrank.meta():
        model = Model().to(torch.bfloat16)
    fully_shard(model, shard_placement_fn=lambda _: Shard(dim))
    report = anyrank.load(model, folder, strategy=strategy)
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return found, report.bytes_read, report.cast


@pytest.mark.parametrize("strategy", ["own", "scatter"])
@pytest.mark.parametrize("dim", [0, 1])
def test_shares_of_quantised_weights(tmp_path: Path, dim: int, strategy: str) -> None:
    folder = folder_of(tmp_path / "a")
    expected = read_by_torch(folder, {"l.weight": (ROWS, COLUMNS), "l.up_blocks": (3, 10, 64)})
    results = run_ranks(2, job_load, folder, dim, strategy)
    for found, _, cast in results:
        assert torch.equal(found["l.weight"], expected["l.weight"].bfloat16())
        assert torch.equal(found["l.up"], expected["l.up_blocks"].transpose(1, 2).bfloat16())
        assert cast == {"l.weight": "fp8 -> bfloat16", "l.up": "mxfp4 -> bfloat16"}
    stored = ROWS * COLUMNS + 3 * 4 * 4 + 3 * 10 * 2 * 17
    if (dim, strategy) == (0, "own"):  # a block's scales are read by both, where a share cuts it
        assert stored <= sum(results[0][1]) <= stored + 2 * 4 * 4
        assert max(results[0][1]) < 0.7 * stored


def job_refused(path: str) -> list[str]:
    """The errors of sources that would leave weights out, on each rank."""
    small = torch.ones(4, 4).to(torch.float8_e4m3fn)
    packed = {"0.qweight": torch.ones(1, 4, dtype=torch.int32), "0.scales": torch.ones(4)}
    sources = [path, packed, {"0.weight": small, "scale": torch.ones(())}]
    texts: list[str] = []
    for source in sources:
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        fully_shard(model)
        try:
            anyrank.load(model, source, missing="keep", unexpected="ignore")
        except anyrank.LoadError as error:
            texts.append(str(error))
    old, new = (
        norm(nn.Linear(4, 4))
        for norm in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm)
    )
    with pytest.raises(anyrank.LoadError) as failed:
        anyrank.load(new, old.state_dict())
    return [*texts, str(failed.value)]


def test_ranks_refuse_alike_what_would_leave_weights_out(tmp_path: Path) -> None:
    array = np.ones((4, 4), np.float32)
    torch.save({"model": {"0.weight": array, "0.bias": torch.ones(4)}}, tmp_path / "w.pt")
    first, second = run_ranks(2, job_refused, str(tmp_path / "w.pt"))
    assert first == second
    wanted = (
        "0.weight: is a NumPy array",
        "packed integers",
        "have a scale (scale)",
        "match with rename=",
    )
    for text, words in zip(first, wanted, strict=True):
        assert words in text


def job_file(path: Any) -> torch.Tensor:
    model = Model()
    fully_shard(model)
    anyrank.load(model, path, missing="keep")
    return model.l.weight.full_tensor()


def test_the_size_of_blocks_beside_one_file_counts_on_all_ranks(tmp_path: Path) -> None:
    folder = Path(folder_of(tmp_path / "a"))
    expected = read_by_torch(str(folder), {"l.weight": (ROWS, COLUMNS)})["l.weight"]
    anyrank.convert(folder, tmp_path / "w.pt", to="torch")
    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    for source in (files, str(tmp_path / "w.pt")):
        for found in run_ranks(2, job_file, source):
            assert torch.equal(found, expected)


def job_unlike(folder: str) -> str:
    model = Model().to(torch.float8_e4m3fn if dist.get_rank() else torch.float32)
    try:
        anyrank.load(model, folder)
    except anyrank.LoadError as error:
        return str(error)
    return ""


def test_ranks_that_hold_them_and_ranks_that_do_not_are_told(tmp_path: Path) -> None:
    first, second = run_ranks(2, job_unlike, folder_of(tmp_path / "a"))
    assert first == second
    assert first
