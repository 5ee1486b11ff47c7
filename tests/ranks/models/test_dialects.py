"""A dialect is one file and a row: what another library packs is read on two FSDP2 ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.packed_numbers import PackedNumbers
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.loading.plan import forecast
from anyrank.models.dialects.registry import DIALECTS
from anyrank.testing import run_ranks

ROWS, COLUMNS, GROUPS = 5, 48, 3


def write(folder: Path, numbers: torch.Tensor, scales: torch.Tensor) -> None:
    """A folder with a weight as compressed-tensors packs it, and a bias."""
    words = (numbers + 8).view(ROWS, -1, 8) << torch.arange(0, 32, 4)
    packed = (words.sum(-1) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    stored = {"0.weight_packed": packed, "0.weight_scale": scales, "0.bias": torch.ones(ROWS)}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    table = {"quantization_config": {"quant_method": "compressed-tensors"}}
    (folder / "config.json").write_text(json.dumps(table))


def job_load(folder: str) -> tuple[torch.Tensor, list[int], dict[str, str]]:
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS))
    fully_shard(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anyrank.models.match.DIALECTS", [*DIALECTS, PackedNumbers])
        report = anyrank.load(model, folder)
    return model.state_dict()["0.weight"].full_tensor(), report.bytes_read, report.cast


def job_lost(folder: str) -> None:
    with pytest.raises(anyrank.LoadError, match=r"0\.weight_packed: 0\.weight_scale is not in"):
        job_load(folder)


def test_a_dialect_in_one_file_loads_right_values(tmp_path: Path) -> None:
    numbers = torch.randint(-8, 8, (ROWS, COLUMNS))
    scales = torch.rand(ROWS, GROUPS) + 0.1
    write(tmp_path / "a", numbers, scales)
    expected = numbers * scales.repeat_interleave(COLUMNS // GROUPS, 1)
    for weight, read, cast in run_ranks(2, job_load, str(tmp_path / "a")):
        assert torch.equal(weight, expected)
        assert cast == {"0.weight": "int4 -> float32"}
        row = COLUMNS // 2 + GROUPS * 4 + 4  # each rank read its own rows, and no float32
        assert read == [3 * row, 2 * row]


def test_calls_without_a_model_know_the_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, scales = torch.randint(-8, 8, (ROWS, COLUMNS)), torch.ones(ROWS, GROUPS)
    write(tmp_path / "a", numbers, scales)
    weights = {"0.weight": numbers.float(), "0.bias": torch.ones(ROWS)}
    with pytest.raises(anyrank.LoadError, match="quantized with compressed-tensors"):
        anyrank.convert(tmp_path / "a", tmp_path / "b", dtype="float32")
    monkeypatch.setattr("anyrank.models.dialects.registry.DIALECTS", [*DIALECTS, PackedNumbers])
    report = anyrank.convert(tmp_path / "a", tmp_path / "b", dtype="float32")
    assert report.cast == {"0.weight": "int4 -> float32"}
    assert torch.equal(load_file(tmp_path / "b" / "model.safetensors")["0.weight"], numbers.float())
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    difference = anyrank.diff(tmp_path / "a", weights)
    assert (difference.only_a, difference.only_b, difference.values) == ([], [], {})
    found = anyrank.inspect(tmp_path / "a")
    assert found.quantised == {"0.weight": "int4"}
    assert not any("quantized" in line for line in found.skipped)
    assert forecast(tmp_path / "a", 1, torch.float32).share_bytes == (ROWS * COLUMNS + ROWS) * 4


def test_a_lost_scale_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write(folder, torch.zeros(ROWS, COLUMNS, dtype=torch.long), torch.ones(ROWS, GROUPS))
    without = {"0.weight_packed": torch.zeros(ROWS, COLUMNS // 8, dtype=torch.int32)}
    save_file(without | {"0.bias": torch.ones(ROWS)}, folder / "model.safetensors")
    run_ranks(2, job_lost, str(folder))


def test_without_the_dialect_the_method_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a", torch.zeros(ROWS, COLUMNS, dtype=torch.long), torch.ones(ROWS, GROUPS))
    with pytest.raises(anyrank.LoadError, match="quantized with compressed-tensors"):
        anyrank.load(nn.Sequential(nn.Linear(COLUMNS, ROWS)), tmp_path / "a")
