"""Tensor subclasses in files and dicts: read where one inner tensor is all, else refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.wrapped import Pair, Recipe, Scaled, Silent, scaled
from torch import nn

import anyrank


class Holder:
    """An object of somebody's own code, with a tensor in it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


KNOWN: list[Any] = [Recipe, Scaled, Pair, Silent, Holder]
BIAS = torch.ones(4)


def file_of(folder: Path, weight: object, where: str) -> str:
    """A `.pt` with a weight, and a bias, alone or in one of its tables."""
    weights = {"weight": weight, "bias": BIAS}
    tree: Any = {
        "flat": weights,
        "model": {"model": weights, "step": 3},
        "net": {"mine": weights, "step": 3},
        "alone": {"model": {"weight": weight}},
    }[where]
    path = str(folder / f"{where}.pt")
    torch.save(tree, path)
    return path


@pytest.mark.parametrize("kind", [Scaled, Pair, Silent, Holder])
@pytest.mark.parametrize("where", ["flat", "model", "net", "alone"])
def test_what_its_own_code_computes_is_named_and_not_left_out(
    tmp_path: Path, kind: Any, where: str
) -> None:
    value: Any = Holder(torch.ones(4, 4)) if kind is Holder else scaled(kind)
    out = str(tmp_path / "out.safetensors")
    rename = {"mine": ""} if where == "net" else None
    with torch.serialization.safe_globals(KNOWN):
        path = file_of(tmp_path, value, where)
        for call in (
            lambda: anyrank.load(nn.Linear(4, 4), path, rename=rename),
            lambda: anyrank.load(nn.Linear(4, 4), path, rename=rename, missing="init"),
            lambda: anyrank.convert(path, out, rename=rename),
        ):
            with pytest.raises(anyrank.LoadError, match=f"weight:? is a {kind.__name__}, "):
                call()
    assert not Path(out).exists()


@pytest.mark.parametrize("where", ["flat", "model", "net", "alone"])
def test_one_inner_tensor_is_read(tmp_path: Path, where: str) -> None:
    weight = Recipe(torch.arange(16.0).view(4, 4).T, "float8")
    rename = {"mine": ""} if where == "net" else None
    with torch.serialization.safe_globals(KNOWN):
        path = file_of(tmp_path, nn.Parameter(weight), where)
        net = nn.Linear(4, 4, bias=where != "alone")
        anyrank.load(net, path, rename=rename)
        assert torch.equal(net.weight, weight.held)
        anyrank.convert(path, str(tmp_path / "out.safetensors"), rename=rename)
    assert torch.equal(load_file(tmp_path / "out.safetensors")["weight"], weight.held)


def test_one_inner_tensor_of_a_dict_is_read() -> None:
    net = nn.Linear(4, 4, bias=False)
    anyrank.load(net, {"weight": Recipe(torch.arange(16.0).view(4, 4), "float8")})
    assert torch.equal(net.weight, torch.arange(16.0).view(4, 4))


@pytest.mark.parametrize("kind", [Scaled, Pair, Silent])
def test_others_in_dicts_and_models_are_named(tmp_path: Path, kind: type[Scaled]) -> None:
    net, held = nn.Linear(4, 4, bias=False), nn.Module()
    held.weight = nn.Parameter(scaled(kind), requires_grad=False)
    for call in (
        lambda: anyrank.load(net, {"weight": scaled(kind)}),
        lambda: anyrank.load(held, {"weight": torch.ones(4, 4)}),
        lambda: anyrank.sync(net, held),
        lambda: anyrank.convert(held, str(tmp_path / "out.safetensors")),
    ):
        with pytest.raises(anyrank.LoadError, match=f"weight: is a {kind.__name__}, "):
            call()
    ckpts = anyrank.Checkpoints(str(tmp_path / "run"), anyrank.TrainState(held))
    with pytest.raises(anyrank.CheckpointError, match=kind.__name__):
        ckpts.save()
