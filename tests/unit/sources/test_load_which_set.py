"""Which of several sets of weights in one folder is read: one, or an error that names them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyrank


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def weights(value: float) -> dict[str, torch.Tensor]:
    return {key: torch.full_like(t, value) for key, t in net().state_dict().items()}


Save = Callable[[dict[str, torch.Tensor], Path], object]
SAVES: dict[str, Save] = {".safetensors": save_file, ".bin": torch.save}


def split(folder: Path, number: int, value: float, ending: str, stem: str = "model") -> list[str]:
    state, names = weights(value), list[str]()
    for shard in range(number):
        part = {key: state[key] for key in [*state][shard::number]}
        names.append(f"{stem}-{shard + 1:05d}-of-{number:05d}{ending}")
        SAVES[ending](part, folder / names[-1])
    return names


def index(folder: Path, names: list[str], ending: str, stem: str = "model") -> None:
    keys = [*weights(0)]
    table = {key: names[number % len(names)] for number, key in enumerate(keys)}
    text = json.dumps({"weight_map": table})
    (folder / f"{stem}{ending}.index.json").write_text(text, encoding="utf-8")


def two_splits(folder: Path, ending: str, stem: str) -> None:
    split(folder, 2, 1.0, ending, stem)
    split(folder, 4, -9.0, ending, stem)


def one_beside_shards(folder: Path, ending: str, stem: str) -> None:
    SAVES[ending](weights(-9.0), folder / f"{stem}{ending}")
    split(folder, 2, 1.0, ending, stem)


def one_beside_an_index(folder: Path, ending: str, stem: str) -> None:
    one_beside_shards(folder, ending, stem)
    index(folder, [f"{stem}-0000{n}-of-00002{ending}" for n in (1, 2)], ending, stem)


@pytest.mark.parametrize("stem", ["model", "net"])
@pytest.mark.parametrize("ending", SAVES)
@pytest.mark.parametrize("fill", [two_splits, one_beside_shards, one_beside_an_index])
def test_two_sets_of_one_name_are_an_error_that_names_both(
    fill: Callable[[Path, str, str], None], ending: str, stem: str, tmp_path: Path
) -> None:
    (tmp_path / "w").mkdir()
    fill(tmp_path / "w", ending, stem)
    calls: list[Callable[[], Any]] = [
        lambda: anyrank.load(net(), tmp_path / "w"),
        lambda: anyrank.plan(net(), tmp_path / "w"),
        lambda: anyrank.inspect(tmp_path / "w"),
        lambda: anyrank.convert(tmp_path / "w", tmp_path / "out"),
    ]
    for call in calls:
        with pytest.raises(anyrank.LoadError, match=rf"several sets of weights \({stem}.*, {stem}"):
            call()
    assert "several sets" in str(anyrank.verify(tmp_path / "w").findings[0])


def test_an_index_decides_over_shards_beside_it(tmp_path: Path) -> None:
    split(tmp_path, 4, -9.0, ".safetensors")
    index(tmp_path, split(tmp_path, 2, 1.0, ".safetensors"), ".safetensors")
    model = net()
    report = anyrank.load(model, tmp_path)
    assert torch.equal(model.get_parameter("0.weight"), torch.ones(2, 2))
    assert any("of-00004" in note for note in report.skipped)


def test_an_index_of_one_file_is_that_file(tmp_path: Path) -> None:
    save_file(weights(1.0), tmp_path / "model.safetensors")
    index(tmp_path, ["model.safetensors"], ".safetensors")
    anyrank.load(net(), tmp_path)


def test_files_of_other_names_and_endings_are_skipped_by_name(tmp_path: Path) -> None:
    save_file(weights(1.0), tmp_path / "model.safetensors")
    for name in ("model.fp16.safetensors", "consolidated.safetensors"):
        save_file(weights(-9.0), tmp_path / name)
    torch.save(weights(-9.0), tmp_path / "pytorch_model.bin")
    model = net()
    report = anyrank.load(model, tmp_path)
    assert torch.equal(model.get_parameter("0.weight"), torch.ones(2, 2))
    assert len(report.skipped) == 3


def test_a_consolidated_file_is_taken_where_nothing_else_is_there(tmp_path: Path) -> None:
    save_file(weights(1.0), tmp_path / "consolidated.safetensors")
    (tmp_path / "params.json").write_text("{}")
    model = net()
    anyrank.load(model, tmp_path)
    assert torch.equal(model.get_parameter("0.weight"), torch.ones(2, 2))
