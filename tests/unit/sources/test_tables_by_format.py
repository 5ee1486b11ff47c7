"""Tables of a checkpoint are told by its format, and never by the names of a model's children."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import anyrank
from anyrank.sources.source import list_source

CHILDREN = ("optimizer", "optim_0", "scheduler", "train_state")


def save_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a single process
        dcp_save(state, checkpoint_id=path)


def save_legacy(state: Any, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


FLAT: dict[str, Callable[[Any, Path], object]] = {
    "w.safetensors": save_file,
    "w.pt": torch.save,
    "old.pt": save_legacy,
    "table.pt": lambda state, path: torch.save({"state_dict": state, "optimizer": {}}, path),
    "model.pt": lambda state, path: torch.save({"model": state, "epoch": 1}, path),
    "dcp": save_dcp,
    "dcp of a table": lambda state, path: save_dcp({"model": state}, path),
}
SEVERAL: dict[str, Callable[[Any, Path], object]] = {
    "w.pt": torch.save,
    "old.pt": save_legacy,
    "dcp": save_dcp,
}


def written(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("form", FLAT)
def test_a_child_of_any_name_is_written(form: str, child: str, tmp_path: Path) -> None:
    model = nn.ModuleDict({"net": nn.Linear(2, 2), child: nn.BatchNorm1d(2)})
    FLAT[form](model.state_dict(), tmp_path / form)
    for number, given in enumerate((None, model)):
        anyrank.convert(tmp_path / form, tmp_path / f"out{number}", model=given)
        assert written(tmp_path / f"out{number}").keys() == model.state_dict().keys()
    anyrank.load(model, tmp_path / "out0")


def test_a_part_that_the_model_lacks_is_left_out_by_its_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"net": nn.Linear(2, 2)})
    flat = {**model.state_dict(), "optimizer.exp_avg": torch.ones(2)}
    torch.save(flat, tmp_path / "w.pt")
    report = anyrank.convert(tmp_path / "w.pt", tmp_path / "out", model=model)
    assert written(tmp_path / "out").keys() == model.state_dict().keys()
    assert "optimizer.exp_avg: not weights" in report.skipped


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}


@pytest.mark.parametrize("form", SEVERAL)
@pytest.mark.parametrize("other", ["ema", "text_encoder", "head"])
def test_several_tables_are_written_and_compared(form: str, other: str, tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / name).mkdir()
        state = {"model": weights(1), other: weights(value), "optimizer": {"m": torch.ones(1)}}
        SEVERAL[form](state, tmp_path / name / form)
    a, b, c = (tmp_path / name / form for name in "abc")
    assert anyrank.diff(a, b)
    assert anyrank.diff(a, b).not_compared == {}
    found = anyrank.diff(a, c)
    assert found.values.keys() == {f"{other}.weight", f"{other}.bias"}
    anyrank.convert(a, tmp_path / "out")
    assert written(tmp_path / "out").keys() == {
        f"{part}.{key}" for part in ("model", other) for key in weights(1)
    }
    assert anyrank.diff(a, tmp_path / "out").not_compared == {"optimizer": 1}
    anyrank.convert(c, tmp_path / "one", rename={other: ""})
    assert written(tmp_path / "one")["bias"].eq(2).all()


@pytest.mark.parametrize("form", SEVERAL)
@pytest.mark.parametrize(
    "parts",
    [
        lambda x: {"model": weights(1), "optimizer": {"state": {"0": torch.full((1,), x)}}},
        lambda x: {"model": weights(1), "queue": torch.full((3,), x)},
        lambda x: {**weights(1), "ema": {"bias": torch.full((2,), x)}},
        lambda x: {"state_dict": weights(1), "rng": [torch.full((1,), x)]},
    ],
)
def test_what_is_beside_the_weights_is_compared_in_one_format(
    form: str, parts: Callable[[float], Any], tmp_path: Path
) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / name).mkdir()
        SEVERAL[form](parts(value), tmp_path / name / form)
    a, b, c = (tmp_path / name / form for name in "abc")
    assert anyrank.diff(a, b)
    assert len(anyrank.diff(a, c).values) == 1
    assert anyrank.convert(a, tmp_path / "out").tensors == (3 if "ema" in parts(0) else 2)


def test_what_is_not_compared_is_named(tmp_path: Path) -> None:
    torch.save({"model": weights(1), "optimizer": {"a": torch.ones(1)}}, tmp_path / "w.pt")
    save_file(weights(1), tmp_path / "w.safetensors")
    report = anyrank.diff(tmp_path / "w.pt", tmp_path / "w.safetensors")
    assert report
    assert "the weights are equal, 2 tensors" in str(report)
    assert "optimizer: 1 tensor, not compared" in str(report)
    assert json.loads(report.to_json())["not_compared"] == {"optimizer": 1}
    lazy = torch.ones(2, dtype=torch.complex64).conj()
    torch.save({"model": weights(1), "ema": {"x": lazy}}, tmp_path / "lazy.pt")
    unread = anyrank.diff(tmp_path / "lazy.pt", tmp_path / "lazy.pt")
    assert (bool(unread), [*unread.unreadable]) == (False, ["ema.x"])


def test_a_child_of_a_table_has_the_name_of_another_table(tmp_path: Path) -> None:
    state = {"scheduler.bias": torch.ones(2), "a": torch.ones(1)}
    for name, value in (("a.pt", 1.0), ("b.pt", 3.0)):
        other = {"bias": torch.full((2,), value)}
        torch.save({"model": state, "scheduler": other}, tmp_path / name)
    found = anyrank.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [*found.values] == ["scheduler.bias"]
    assert found.equal == 2


def test_the_exit_status_says_it(tmp_path: Path) -> None:
    for name, value in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save({"params": weights(1), "params_ema": weights(value)}, tmp_path / name)
    command = [sys.executable, "-m", "anyrank", "diff", "a.pt", "b.pt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "params_ema.weight" in done.stdout


@pytest.mark.parametrize(
    ("inside", "prefix"),
    [
        (lambda models: {"models": models, "step": 3}, "models."),
        (lambda models: {"run": {"nets": tuple(models)}}, "run.nets."),
        (lambda models: {"model": models}, "model."),
        (lambda models: models, ""),
    ],
)
def test_one_of_a_list_of_models_is_taken_by_its_number(
    tmp_path: Path, inside: Callable[[list[Any]], Any], prefix: str
) -> None:
    nets = [nn.Linear(2, 1) for _ in range(2)]
    optimizer = torch.optim.AdamW(nets[0].parameters())
    nets[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved: list[Any] = [net.state_dict() for net in nets]
    path, model = tmp_path / "w.pt", nn.Linear(2, 1)
    torch.save(inside([*saved, optimizer.state_dict()] if not prefix else saved), path)
    with pytest.raises(anyrank.LoadError, match=r"2 of them match with rename=\{'.*1': ''\}"):
        anyrank.load(model, path)
    for number in (0, 1):
        anyrank.load(model, path, rename={f"{prefix}{number}": ""})
        assert torch.equal(model.weight, nets[number].weight)


def test_lists_beside_a_table_of_weights_are_none(tmp_path: Path) -> None:
    net, model = nn.Linear(2, 1), nn.Linear(2, 1)
    history = [{"loss": torch.ones(())}]
    torch.save({"net": {"inner": net.state_dict()}, "history": history}, tmp_path / "w.pt")
    report = anyrank.load(model, tmp_path / "w.pt", rename={"net.inner": ""})
    assert report.unexpected == []
    assert torch.equal(model.weight, net.weight)


def test_what_a_list_of_files_says_of_its_format_holds_for_every_file(tmp_path: Path) -> None:
    """Whatever the order of the formats' names is."""
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "b.safetensors")
    torch.save({"c": torch.ones(2)}, tmp_path / "c.pt")
    save_dcp({"d": torch.ones(2)}, tmp_path / "d")
    assert list_source([tmp_path / "a.safetensors", tmp_path / "b.safetensors"]).is_file_named
    for other in ("c.pt", "d"):
        mixed = list_source([tmp_path / "a.safetensors", tmp_path / other])
        assert not mixed.is_file_named
        assert not mixed.states_table
