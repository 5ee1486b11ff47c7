"""Weights that a tool packed into integers are named, and never replaced by first values."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.quantized import write
from torch import nn

import anyrank

Tensors = dict[str, torch.Tensor]
SIZE = 64


def ones(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


I32, U8 = torch.int32, torch.uint8
PACKED: dict[str, Tensors] = {
    "gptq": {
        "qweight": ones(8, SIZE, dtype=I32),
        "qzeros": ones(2, 8, dtype=I32),
        "scales": ones(2, SIZE),
        "g_idx": torch.zeros(SIZE, dtype=I32),
    },
    "awq": {
        "qweight": ones(SIZE, 8, dtype=I32),
        "qzeros": ones(2, 8, dtype=I32),
        "scales": ones(2),
    },
    "mlx": {
        "weight": ones(SIZE, 8, dtype=torch.uint32),
        "scales": ones(SIZE, 2),
        "biases": ones(SIZE, 2),
    },
    "bitsandbytes nf4": {
        "weight": ones(SIZE * SIZE // 2, 1, dtype=U8),
        "weight.absmax": ones(SIZE),
        "weight.quant_map": ones(16),
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(80, dtype=U8),
    },
    "hqq": {"W_q": ones(32, SIZE, dtype=U8), "scale": ones(1, SIZE), "zero": ones(1, SIZE)},
    "compressed-tensors": {
        "weight_packed": ones(SIZE, 8, dtype=I32),
        "weight_scale": ones(SIZE, 2),
    },
    "quanto": {"weight._data": ones(SIZE, 32, dtype=U8), "weight._scale": ones(SIZE, 1)},
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))


FORMATS: dict[str, Callable[[Tensors, Path], object]] = {
    "w.safetensors": save_file,
    "w.pt": torch.save,
    "table.pt": lambda state, path: torch.save({"model": state, "epoch": 1}, path),
    "dcp": lambda state, path: anyrank.convert(state, path, to="dcp"),
    "dict": lambda state, path: None,
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", PACKED)
def test_they_are_named_before_all_ways_out(kind: str, form: str, tmp_path: Path) -> None:
    state = {f"0.{name}": tensor for name, tensor in PACKED[kind].items()}
    FORMATS[form](state, tmp_path / form)
    source: Any = state if form == "dict" else tmp_path / form
    ignoring: Any = {"missing": "init", "unexpected": "ignore", "cast": "any"}
    cases: list[Any] = [{}, ignoring, {**ignoring, "rename": {"0.weight": ""}}]
    for options in cases:
        with pytest.raises(anyrank.LoadError, match=r"packed integers with scales") as failed:
            anyrank.load(net(), source, **options)
        text = str(failed.value)
        assert "'init'" not in text[: text.index("packed integers")]
        assert "sizes" not in text  # a vocabulary of another size is not meant
    assert any("packed integers" in note for note in anyrank.inspect(source).skipped)
    # The last of the ways out is explicit.
    rename = ast.literal_eval(text.split("drop it with rename=")[1].splitlines()[0])
    anyrank.load(net(), source, missing="keep", unexpected="ignore", rename=rename)


@pytest.mark.parametrize("kind", PACKED)
def test_a_file_is_judged_as_its_folder(kind: str, tmp_path: Path) -> None:
    state = {f"0.{name}": tensor for name, tensor in PACKED[kind].items()}
    folder = Path(write(tmp_path / "a", state, {"quant_method": kind}))
    torch.save(state, folder / "w.pt")
    files = sorted(folder.glob("*.safetensors"))
    for source in (folder, files, folder / "w.pt"):
        with pytest.raises(
            anyrank.LoadError, match=rf"model:\nthe source is quantized with {kind}"
        ):
            anyrank.load(net(), source, missing="init", unexpected="ignore")
        assert any(kind in note for note in anyrank.inspect(source).skipped)


@pytest.mark.parametrize("kind", ["gptq", "mlx", "hqq", "compressed-tensors"])
def test_a_model_that_holds_them_gets_them(kind: str) -> None:
    layer = nn.Module()
    for name, tensor in PACKED[kind].items():
        layer.register_buffer(name, torch.zeros_like(tensor))
    state = {f"0.{name}": tensor for name, tensor in PACKED[kind].items()}
    model = nn.Sequential(layer, nn.Linear(2, 2))
    anyrank.load(model, state, missing="keep")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())


def test_integers_beside_a_scale_that_the_model_does_not_miss() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    others = {"1.relative_weights": torch.ones(4, dtype=I32), "1.scale": torch.ones(())}
    anyrank.load(model, {"0.weight": torch.ones(2, 2), **others}, unexpected="ignore")
    masks = {"0.mask": torch.ones(4, dtype=U8), "0.scale": torch.ones(())}
    anyrank.load(model, masks, missing="keep", unexpected="ignore")
