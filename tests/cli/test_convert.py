"""`anyrank convert`, `verify` and `diff`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file

from anyrank.cli.convert import parse_bytes


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file with a tie."""
    embed = torch.zeros(4, 2)
    tensors = {"embed.weight": embed, "head.weight": embed, "ids": torch.arange(3)}
    torch.save(tensors, tmp_path / "w.pt")
    return tmp_path


def test_convert_verify_and_diff(
    weights: Path, snapshot: Callable[[str, str], Result], anyrank: Callable[[str], Result]
) -> None:
    said = anyrank("convert w.pt out --dtype bfloat16 --shard-bytes 20B --rename embed=wte").stdout
    assert re.sub(r"in [0-9.]+ s", "in S s", said).splitlines() == [
        "out: safetensors, 2 tensors, 0.0 MiB in S s, from w.pt",
        "  tied     head.weight = wte.weight",
        "  cast     wte.weight: float32 -> bfloat16",
        "  renamed  embed.weight -> wte.weight",
        "  verified only headers; use anyrank.verify to verify all bytes",
    ]
    assert snapshot("verify", "verify out --finite").exit_code == 0
    assert snapshot("diff", "diff w.pt out").exit_code == 1
    assert snapshot("diff_equal", "diff out out").exit_code == 0
    assert snapshot("convert_exists", "convert w.pt out").exit_code == 2
    assert anyrank("convert w.pt out --overwrite").exit_code == 0
    assert anyrank("diff w.pt out --json").exit_code == 0  # the tie is known, too
    assert json.loads(anyrank("verify out --json").stdout)["findings"] == []
    (weights / "one").mkdir()
    converted = json.loads(anyrank("convert w.pt one/w.safetensors --json").stdout)
    assert converted["files"] == ["w.safetensors"]


def test_findings_are_exit_1(weights: Path, snapshot: Callable[[str, str], Result]) -> None:
    save_file({"w": torch.full((3,), torch.nan)}, weights / "nan.safetensors")
    data = (weights / "nan.safetensors").read_bytes()
    (weights / "short.safetensors").write_bytes(data[:-4])
    assert snapshot("verify_nan", "verify nan.safetensors --finite").exit_code == 1
    assert snapshot("verify_truncated", "verify short.safetensors").exit_code == 1
    assert snapshot("convert_truncated", "convert short.safetensors out").exit_code == 1
    assert snapshot("verify_missing", "verify none").exit_code == 1
    assert not (weights / "out").exists()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("convert_no_destination", "convert w.pt"),
        ("convert_no_such_format", "convert w.pt out --to onnx"),
        ("convert_no_size", "convert w.pt out --shard-bytes many"),
        ("convert_no_rename", "convert w.pt out --rename a"),
        ("convert_itself", "convert w.pt w.pt --to torch"),
        ("diff_one", "diff w.pt"),
    ],
)
def test_wrong_usage_is_exit_2(
    weights: Path, snapshot: Callable[[str, str], Result], name: str, line: str
) -> None:
    assert (weights / "w.pt").exists()
    assert snapshot(name, line).exit_code == 2


def test_sizes_have_units() -> None:
    given = ("7", "5GB", "2 MiB", "1kb")
    assert [parse_bytes(text) for text in given] == [7, 5_000_000_000, 2 << 20, 1000]
    assert parse_bytes(None) is None
