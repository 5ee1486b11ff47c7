"""load and convert take the same tensors of a checkpoint for its weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import anyrank

RAW, EMA, MOMENT = -1.0, 7.0, 9.0


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def weights(value: float = RAW) -> dict[str, torch.Tensor]:
    return {key: torch.full_like(t, value) for key, t in net().state_dict().items()}


def optimizer() -> dict[str, Any]:
    moments = {key: {"exp_avg": torch.full((2,), MOMENT)} for key in weights()}
    return {"state": moments, "param_groups": [{"lr": 0.1, "params": [*weights()]}]}


# A checkpoint -> the names above the weights that convert keeps, because several tables may be.
FILES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "flat": (weights, ""),
    "model": (lambda: {"model": weights()}, ""),
    "state_dict": (lambda: {"state_dict": weights(), "epoch": 3}, ""),
    "with an optimizer": (lambda: {"model": weights(), "optimizer": optimizer()}, ""),
    "optimizer of another name": (lambda: {"net": weights(), "opt_g": optimizer()}, ""),
    "stray tensor": (lambda: {"model": weights(), "rng_now": torch.get_rng_state()}, ""),
    "app": (lambda: {"app": {"model": weights(), "optimizer": optimizer()}}, ""),
    "app, optimizer of another name": (
        lambda: {"app": {"model": weights(), "opt_g": optimizer()}},
        "",
    ),
    "state_dict above all": (
        lambda: {"state_dict": {"model": weights(), "optimizer": optimizer()}},
        "",
    ),
    "model above all": (lambda: {"model": {"net": weights(), "optim": optimizer()}}, ""),
    "lightning": (
        lambda: {
            "state_dict": weights(),
            "optimizer_states": [optimizer()],
            "callbacks": {"EMA": {"shadow": weights(EMA)}},
            "pytorch-lightning_version": "2.6",
        },
        "",
    ),
    "timm": (
        lambda: {
            "arch": "resnet",
            "state_dict": weights(),
            "optimizer": optimizer(),
            "state_dict_ema": weights(EMA),
        },
        "state_dict.",
    ),
    "EMA beside": (lambda: {"model": weights(), "ema": weights(EMA), "step": 3}, "model."),
    "EMA in app": (
        lambda: {"app": {"model": weights(), "ema": weights(EMA), "optimizer": optimizer()}},
        "app.model.",
    ),
}


def save_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a single process
        dcp_save(state, checkpoint_id=path)


FORMS: dict[str, Callable[[Any, Path], object]] = {
    "w.pt": torch.save,
    "old.pt": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "dcp": save_dcp,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", FILES)
def test_load_and_convert_take_the_same_weights(file: str, form: str, tmp_path: Path) -> None:
    make, prefix = FILES[file]
    FORMS[form](make(), tmp_path / form)
    loaded = net()
    anyrank.load(loaded, tmp_path / form)
    assert {value for t in loaded.state_dict().values() for value in t.unique().tolist()} == {RAW}
    anyrank.convert(tmp_path / form, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {key.removeprefix(prefix) for key, t in written.items() if (t == RAW).all()} == {
        *weights()
    }
    assert not [key for key, t in written.items() if (t == MOMENT).all()]
    if not prefix:
        assert written.keys() == weights().keys()
    # Written again, it is still the same model.
    again = net()
    anyrank.load(again, tmp_path / "out", unexpected="ignore" if prefix else "error")
    assert all(torch.equal(t, again.state_dict()[key]) for key, t in loaded.state_dict().items())
    anyrank.convert(tmp_path / form, tmp_path / "named", model=net())
    named = load_file(tmp_path / "named" / "model.safetensors")
    assert named.keys() == weights().keys()
    assert all((t == RAW).all() for t in named.values())


@pytest.mark.parametrize("form", FORMS)
def test_optimizers_of_several_models_are_not_weights(form: str, tmp_path: Path) -> None:
    state = {name: {"model": weights(), "optimizer": optimizer()} for name in ("gan", "vae")}
    FORMS[form](state, tmp_path / form)
    report = anyrank.convert(tmp_path / form, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {f"{name}.model.{key}" for name in state for key in weights()}
    loaded = net()
    loaded_report = anyrank.load(loaded, tmp_path / form, rename={"gan.model": ""})
    note = "gan.optimizer.state.0.weight.exp_avg: not weights"
    assert note in report.skipped
    assert note in loaded_report.skipped


def test_an_optimizer_alone_is_not_weights(tmp_path: Path) -> None:
    save_dcp({"optimizer": optimizer()}, tmp_path / "dcp")
    with pytest.raises(anyrank.LoadError, match="the source has no weights to convert"):
        anyrank.convert(tmp_path / "dcp", tmp_path / "out")
