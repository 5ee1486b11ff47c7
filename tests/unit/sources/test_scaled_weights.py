"""Is this weight scaled? load, convert and sync answer alike, whatever the tool that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import anyrank

Tensors = dict[str, torch.Tensor]
FP8, ROWS, COLUMNS = torch.float8_e4m3fn, 16, 64


def weight(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(1, 100, (ROWS, COLUMNS), dtype=torch.uint8).view(dtype)


def groups(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.full((ROWS, COLUMNS // 32), 120, dtype=torch.uint8)
    return numbers.view(dtype) if dtype.itemsize == 1 else numbers.to(dtype)


SCALED: dict[str, Tensors] = {
    "mxfp8, uint8 exponents": {"weight": weight(FP8), "weight_scale": groups(torch.uint8)},
    "mxfp8, e8m0": {"weight": weight(FP8), "weight_scale": groups(torch.float8_e8m0fnu)},
    "mxfp8, int8 exponents": {"weight": weight(FP8), "weight_scale": groups(torch.int8)},
    "mxfp8, int32 exponents": {"weight": weight(FP8), "weight_scale": groups(torch.int32)},
    "a name without a word": {"weight": weight(FP8), "weight_exponents": groups(torch.uint8)},
    "below the weight": {"weight": weight(FP8), "weight.e": groups(torch.float32)},
    "bitsandbytes, int8": {"weight": weight(torch.int8), "SCB": torch.rand(ROWS) + 1},
    "bitsandbytes, its own files": {
        "weight": weight(torch.int8),
        "SCB": torch.rand(ROWS) + 1,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    },
    "nvfp4": {
        "weight": weight(torch.uint8),
        "weight_scale": groups(FP8),
        "weight_scale_2": torch.tensor(0.5),
    },
    "nvfp4 without a second scale": {"weight": weight(torch.uint8), "weight_scale": groups(FP8)},
    "compressed-tensors": {
        "weight_packed": weight(torch.uint8),
        "weight_scale": groups(torch.float32),
    },
    "gptq": {"qweight": weight(torch.int8).int(), "scales": groups(torch.float16)},
    "zero points": {
        "weight": weight(torch.int8),
        "weight_zero_point": groups(torch.uint8),
        "weight_scale": groups(torch.float32),
    },
}


def in_safetensors(path: Path, tensors: Tensors) -> str:
    save_file(tensors, path / "in.safetensors")
    return str(path / "in.safetensors")


def in_torch(path: Path, tensors: Tensors) -> str:
    torch.save({"model": tensors}, path / "in.pt")
    return str(path / "in.pt")


def in_dcp(path: Path, tensors: Tensors) -> str:
    anyrank.convert(tensors, path / "in", to="dcp")
    return str(path / "in")


def live(path: Path, tensors: Tensors) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        owner, _, attribute = name.rpartition(".")
        if owner and not hasattr(model, owner):
            model.add_module(owner, nn.Module())
        (getattr(model, owner) if owner else model).register_buffer(attribute, tensor)
    return model


FORMATS: list[Callable[[Path, Tensors], object]] = [in_safetensors, in_torch, in_dcp, live]


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("kind", SCALED)
def test_convert_rounds_neither_the_numbers_nor_the_scales(
    tmp_path: Path, kind: str, write: Callable[[Path, Tensors], object]
) -> None:
    tensors = {f"0.{name}": tensor for name, tensor in SCALED[kind].items()}
    if write is live and any(name.count(".") > 1 for name in tensors):
        pytest.skip("no module has such a name")
    out = tmp_path / "out.safetensors"
    source = write(tmp_path, tensors)
    with pytest.raises(anyrank.LoadError, match="scale"):
        anyrank.convert(source, out, dtype="bfloat16")  # pyright: ignore[reportArgumentType]
    assert not out.exists()
    anyrank.convert(source, out)  # pyright: ignore[reportArgumentType]
    assert {k: t.dtype for k, t in load_file(out).items()} == {
        k: t.dtype for k, t in tensors.items()
    }


@pytest.mark.parametrize("kind", [kind for kind in SCALED if "weight" in SCALED[kind]])
def test_load_refuses_them_too(tmp_path: Path, kind: str) -> None:
    tensors = {f"0.{name}": tensor for name, tensor in SCALED[kind].items()}
    model = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False))
    for source in (in_safetensors(tmp_path, tensors), tensors):
        with pytest.raises(anyrank.LoadError, match=r"[Ww]ithout the scale|is not automatic"):
            anyrank.load(model, source, unexpected="ignore")
        with pytest.raises(anyrank.LoadError, match=r"[Ww]ithout the scale"):
            anyrank.load(model, source, unexpected="ignore", cast="any")


NOT_SCALED: dict[str, Tensors] = {
    "a plain cast": {"weight": weight(FP8), "bias": torch.ones(ROWS).to(FP8)},
    "a bias that stayed wide": {"weight": weight(FP8), "bias": torch.ones(ROWS)},
    "a model's own scale": {"weight": weight(FP8), "logit_scale": torch.tensor(2.0)},
    "cast along": {"weight": weight(FP8), "scale": torch.ones(ROWS).to(FP8)},
    "a mask": {"mask": weight(torch.uint8), "scale": torch.tensor(2.0)},
    "a counter": {"weight": weight(FP8), "weight_updates": torch.tensor(3)},
}


@pytest.mark.parametrize("kind", NOT_SCALED)
def test_what_is_no_scale_is_cast(tmp_path: Path, kind: str) -> None:
    tensors = {f"0.{name}": tensor for name, tensor in NOT_SCALED[kind].items()}
    out = tmp_path / "out.safetensors"
    anyrank.convert(in_safetensors(tmp_path, tensors), out, dtype="bfloat16")
    got = load_file(out)
    for name, tensor in tensors.items():
        want = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert torch.equal(got[name], want)


# -- at other levels than the weight's -------------------------------------------------------------

ELSEWHERE = [
    *("fc_scale", "scale_fc", "scales", "scale", "scales.fc", "SCB.fc", "fc_weight_scale"),
    *("amax_fc", "scales.fc.weight", "fc_scale.value", "scale_fc.weight", "zero_points"),
]
ABOVE = ["", "layers.0.", "model.layers.0.block."]


def layer(above: str) -> nn.Module:
    """A model whose `fc` has this text before its name."""
    model: nn.Module = nn.ModuleDict({"fc": nn.Linear(COLUMNS, ROWS, bias=False)})
    for name in reversed(above.split(".")[:-1]):
        model = nn.ModuleDict({name: model})
    return model


@pytest.mark.parametrize("above", ABOVE)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_scale_outside_of_the_weights_module_is_not_ignored(
    name: str, above: str, tmp_path: Path
) -> None:
    tensors = {f"{above}fc.weight": weight(FP8), f"{above}{name}": torch.tensor(0.01)}
    written = (in_safetensors, in_torch, in_dcp)
    for source in (*(write(tmp_path, tensors) for write in written), tensors):
        with pytest.raises(anyrank.LoadError, match=rf"have a scale \({above}{name}\)"):
            anyrank.load(layer(above), source, unexpected="ignore")
        with pytest.raises(anyrank.LoadError, match=rf"have a scale \({above}{name}\)"):
            anyrank.convert(source, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(anyrank.LoadError, match=rf"have a scale \({above}{name}\)"):
        anyrank.sync(layer(above), tensors, unexpected="ignore")
    anyrank.convert(source, tmp_path / "out")  # as it is
    left_out = {f"{above}{name}": ""}
    anyrank.load(layer(above), source, rename=left_out)
    anyrank.convert(source, tmp_path / "cast", dtype="bfloat16", rename=left_out)


@pytest.mark.parametrize("name", ["fc_scale", "scale", "scales.fc"])
def test_a_scale_beside_the_table_of_weights_is_not_ignored(name: str, tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    weights = {"fc.weight": weight(FP8), "norm.weight": torch.ones(2)}
    torch.save({"model": weights, name: torch.tensor(0.01)}, path)
    with pytest.raises(anyrank.LoadError, match=rf"have a scale \({name}\)"):
        anyrank.load(layer(""), path, unexpected="ignore")
    with pytest.raises(anyrank.LoadError, match=rf"have a scale \({name}\)"):
        anyrank.convert(path, tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("scale_shift_table", torch.ones(6, ROWS)),  # PixArt, LTX and Wan have one in each block
        ("norm.scale", torch.ones(COLUMNS)),  # Flux: of a module without small weights
        ("other_scale.weight", torch.ones(2)),
        ("quant_conv.weight", torch.ones(4, 4)),
        ("scales", torch.ones(2 * ROWS, COLUMNS)),  # larger than the weight
        ("scales.fc.weight", torch.ones(ROWS, COLUMNS)),  # another set of weights
        ("step_scale", torch.tensor(3)),
    ],
)
def test_parameters_of_such_names_are_no_scales(
    name: str, values: torch.Tensor, tmp_path: Path
) -> None:
    tensors = {"block.fc.weight": weight(FP8), f"block.{name}": values}
    anyrank.load(layer("block."), tensors, unexpected="ignore")
    anyrank.convert(in_safetensors(tmp_path, tensors), tmp_path / "out", dtype="bfloat16")
