"""Quantized sources: dequantized while they are read, bit for bit as torch's own reader does it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.quantized import BLOCK, COLUMNS, FP8, MXFP4, ROWS, fp8, mxfp4, read_by_torch, write
from torch import nn

import anyrank
from anyrank.files.reader import Reader
from anyrank.models.dialects.computed import MAX_NUMEL
from anyrank.models.dialects.registry import values_without_model
from anyrank.sources.source import list_source


class Holder(nn.Module):
    """A module `l` with the given parameters, and nothing else."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.l = nn.Module()
        for name, tensor in tensors.items():
            self.l.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def fp8_folder(folder: Path, config: dict[str, object] | None = FP8, **sizes: int) -> str:
    torch.manual_seed(0)
    values, scales = fp8(**sizes)
    return write(folder, {"l.weight": values, "l.weight_scale_inv": scales}, config)


def mxfp4_folder(folder: Path, **sizes: int) -> str:
    torch.manual_seed(0)
    blocks, scales = mxfp4(**sizes)
    return write(folder, {"l.up_blocks": blocks, "l.up_scales": scales}, MXFP4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fp8_as_torch_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = fp8_folder(tmp_path / "a")
    model = Holder(weight=torch.zeros(ROWS, COLUMNS, dtype=dtype))
    report = anyrank.load(model, folder)
    expected = read_by_torch(folder, {"l.weight": (ROWS, COLUMNS)})["l.weight"]
    assert torch.equal(model.l.weight, expected.to(dtype))
    assert report.cast == {"l.weight": f"fp8 -> {str(dtype).removeprefix('torch.')}"}
    assert report.bytes_read == [ROWS * COLUMNS + 3 * 4 * 4]
    assert report.unexpected == report.missing == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_under_its_own_name_as_torch_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = mxfp4_folder(tmp_path / "a")
    model = Holder(up_blocks=torch.zeros(3, 10, 64, dtype=dtype))
    report = anyrank.load(model, folder)
    expected = read_by_torch(folder, {"l.up_blocks": (3, 10, 64)})["l.up_blocks"]
    assert torch.equal(model.l.up_blocks, expected.to(dtype))
    assert report.cast["l.up_blocks"].startswith("mxfp4 -> ")


def test_mxfp4_under_the_tensors_name_is_swapped(tmp_path: Path) -> None:
    folder = mxfp4_folder(tmp_path / "a")
    model = Holder(up=torch.zeros(3, 64, 10))
    anyrank.load(model, folder)
    expected = read_by_torch(folder, {"l.up_blocks": (3, 10, 64)})["l.up_blocks"]
    assert torch.equal(model.l.up, expected.transpose(1, 2))


def test_a_model_that_holds_them_gets_the_stored_numbers(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "a")
    stored = {
        k: v for name in Path(folder).glob("*.safetensors") for k, v in load_file(name).items()
    }
    model = Holder(**{name[2:]: torch.zeros_like(t) for name, t in stored.items()})
    report = anyrank.load(model, folder)
    for name, tensor in stored.items():
        assert torch.equal(model.get_parameter(name).view(torch.uint8), tensor.view(torch.uint8))
    assert report.cast == {}
    raw = {
        "up_blocks": torch.zeros(3, 10, 2, 16, dtype=torch.uint8),
        "up_scales": torch.zeros(3, 10, 2, dtype=torch.uint8),
    }
    assert anyrank.load(Holder(**raw), mxfp4_folder(tmp_path / "b")).cast == {}


def test_without_a_configuration_the_scales_say_the_size_of_blocks(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "a", None, rows=300, columns=257, block=128)
    model = Holder(weight=torch.zeros(300, 257))
    anyrank.load(model, folder)
    expected = read_by_torch(folder, {"l.weight": (300, 257)}, 128)["l.weight"]
    assert torch.equal(model.l.weight, expected)


@pytest.mark.parametrize("kind", ["one", "exponents", "stacked"])
def test_other_scales(kind: str) -> None:
    values, scales = fp8(2 * BLOCK, BLOCK)
    bits: Any = values
    if kind == "one":
        scales = torch.tensor(0.25)
        expected = bits.float() * 0.25
    elif kind == "exponents":
        bits, scales = fp8(640, 128, 128)
        scales = torch.tensor([120, 130, 127, 126, 128], dtype=torch.uint8)[:, None]
        powers = torch.tensor([2.0**-7, 8.0, 1.0, 0.5, 2.0])
        expected = bits.float() * powers.repeat_interleave(128)[:, None]
    else:
        pairs = [fp8(600, 5, 128) for _ in range(3)]
        bits = torch.stack([v.view(torch.uint8) for v, _ in pairs]).view(torch.float8_e4m3fn)
        scales = torch.stack([s for _, s in pairs])
        expected = bits.float() * scales.repeat_interleave(128, 1)[:, :600].expand(3, 600, 5)
    model = Holder(weight=torch.zeros(bits.shape))
    anyrank.load(model, {"l.weight": bits, "l.weight_scale_inv": scales})
    assert torch.equal(model.l.weight, expected)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """No more than a piece is computed at a time, however much is wanted."""
    folder = fp8_folder(tmp_path / "a", None, rows=4096, columns=512, block=128)
    listing = values_without_model(list_source(folder))
    (stored,) = listing.tensors.values()
    fetched: list[int] = []
    with Reader(listing, buffer_bytes=1 << 20) as reader:
        original = reader.fetch

        def fetch(part: Any, start: int, stop: int) -> torch.Tensor:
            fetched.append(stop - start)
            return original(part, start, stop)

        reader.fetch = fetch  # type: ignore[method-assign]
        whole = reader.read(stored)
    assert max(fetched) <= MAX_NUMEL
    expected = read_by_torch(folder, {"l.weight": (4096, 512)}, 128)["l.weight"]
    assert torch.equal(whole, expected)


# -- what is refused --------------------------------------------------------------------------


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    wrong = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    folder = fp8_folder(tmp_path / "a", wrong)
    with pytest.raises(
        anyrank.LoadError, match=r"weight_scale_inv: has shape \[3, 4\].*of shape \[2, 2\]"
    ):
        anyrank.load(Holder(weight=torch.zeros(ROWS, COLUMNS)), folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
@pytest.mark.parametrize(
    "options", [{}, {"missing": "init", "unexpected": "ignore", "cast": "any"}]
)
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str, options: Any) -> None:
    """Also where missing and unexpected keys are allowed: integers never become weights."""
    stored = {"l.weight": torch.ones(4, 4, dtype=torch.int8), "l.SCB": torch.ones(4)}
    if method != "bitsandbytes":
        stored = {"l.qweight": torch.ones(4, 1, dtype=torch.int32), "l.scales": torch.ones(4)}
    folder = write(tmp_path / "a", stored, {"quant_method": method})
    model = Holder(weight=torch.zeros(4, 4))
    with pytest.raises(
        anyrank.LoadError, match=f"quantized with {method}.*before the quantization"
    ):
        anyrank.load(model, folder, **options)
    with pytest.raises(anyrank.LoadError, match=f"quantized with {method}"):
        anyrank.convert(folder, tmp_path / "b", dtype="bfloat16")
    assert torch.equal(model.l.weight, torch.zeros(4, 4))


def test_a_scale_of_another_name_is_never_left_out(tmp_path: Path) -> None:
    values, _ = fp8(4, 4)
    save_file({"l.weight": values, "l.weight_scale": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(anyrank.LoadError, match=r"weight: is torch.float8_e4m3fn.*have a scale "):
        anyrank.load(
            Holder(weight=torch.zeros(4, 4)), tmp_path / "a.safetensors", unexpected="ignore"
        )


def test_a_scale_that_is_not_there_is_missed(tmp_path: Path) -> None:
    values, _ = fp8()
    folder = write(tmp_path / "a", {"l.weight": values}, FP8)
    with pytest.raises(anyrank.LoadError, match=r"l\.weight_scale_inv is missing from the source"):
        anyrank.load(Holder(weight=torch.zeros(ROWS, COLUMNS)), folder)
    with pytest.raises(anyrank.LoadError, match=r"l\.weight_scale_inv is missing from the source"):
        anyrank.convert(folder, tmp_path / "b", dtype="bfloat16")
    model = Holder(weight=values.clone().zero_())
    anyrank.load(model, folder)  # as they are stored
    assert torch.equal(model.l.weight.view(torch.uint8), values.view(torch.uint8))


def test_blocks_larger_than_the_tensor_take_no_memory(tmp_path: Path) -> None:
    config: dict[str, object] = {"quant_method": "fp8", "weight_block_size": [1, 10**12]}
    values, _ = fp8()
    stored = {"l.weight": values, "l.weight_scale_inv": torch.arange(1.0, ROWS + 1)[:, None]}
    model = Holder(weight=torch.zeros(ROWS, COLUMNS))
    anyrank.load(model, write(tmp_path / "a", stored, config))
    assert torch.equal(model.l.weight, values.float() * stored["l.weight_scale_inv"])


@pytest.mark.parametrize("given", [[1, "x"], [True, True], [0, 8]])
def test_a_block_size_that_is_none_is_refused(given: list[object], tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "a", {"quant_method": "fp8", "weight_block_size": given})
    with pytest.raises(anyrank.LoadError, match="expected two ints"):
        anyrank.load(Holder(weight=torch.zeros(ROWS, COLUMNS)), folder)


# -- the other commands -----------------------------------------------------------------------


def test_plan_counts_what_is_stored(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "a")
    model = Holder(weight=torch.zeros(ROWS, COLUMNS))
    stored = ROWS * COLUMNS + 3 * 4 * 4
    plan = anyrank.plan(model, folder)
    assert plan.read_bytes == [stored]
    assert plan.source_bytes == pytest.approx(stored, abs=4)


def test_convert_with_a_dtype_writes_plain_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values, scales = fp8()
    blocks, exponents = mxfp4()
    stored = {"l.weight": values, "l.weight_scale_inv": scales, "l.norm": torch.ones(3)}
    stored |= {"l.up_blocks": blocks, "l.up_scales": exponents}
    folder = write(tmp_path / "a", stored, FP8)
    report = anyrank.convert(folder, tmp_path / "b", dtype="bfloat16")
    found = load_file(tmp_path / "b" / "model.safetensors")
    shapes = {"l.weight": (ROWS, COLUMNS), "l.up_blocks": (3, 10, 64)}
    expected = read_by_torch(folder, shapes)
    assert found.keys() == {"l.weight", "l.up", "l.norm"}
    assert torch.equal(found["l.weight"], expected["l.weight"].bfloat16())
    assert torch.equal(found["l.up"], expected["l.up_blocks"].bfloat16().transpose(1, 2))
    assert report.cast["l.weight"] == "fp8 -> bfloat16"
    assert report.cast["l.up"] == "mxfp4 -> bfloat16"
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    assert anyrank.diff(folder, tmp_path / "b").only_a == []
    same = anyrank.convert(folder, tmp_path / "c")
    assert same.cast == {}
    assert anyrank.diff(folder, tmp_path / "c")
    assert "quantization_config" in json.loads((tmp_path / "c" / "config.json").read_text())


def test_diff_of_quantised_and_plain(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "a")
    anyrank.convert(folder, tmp_path / "b", dtype="float32")
    found = anyrank.diff(folder, tmp_path / "b")
    assert found.dtypes == {"l.weight": ("fp8", "float32")}
    assert (found.only_a, found.only_b, found.values) == ([], [], {})


def test_inspect_says_what_they_are(tmp_path: Path) -> None:
    found = anyrank.inspect(fp8_folder(tmp_path / "a"))
    assert found.quantised == {"l.weight": "fp8"}
    assert "fp8, which `load` dequantizes: 1 tensor and scales" in str(found)
    other = write(tmp_path / "b", {"l.qweight": torch.ones(2)}, {"quant_method": "gptq"})
    assert any("quantized with gptq" in line for line in anyrank.inspect(other).skipped)


def test_bytes_in_another_order_are_refused(tmp_path: Path) -> None:
    values, scales = fp8(300, 257, 128)
    turned = values.view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
    assert torch.equal(turned.view(torch.uint8), values.view(torch.uint8))
    source = {"l.weight": turned, "l.weight_scale_inv": scales}
    torch.save(source, tmp_path / "a.pt")
    model = Holder(weight=torch.ones(300, 257))
    with pytest.raises(anyrank.LoadError, match="its bytes are in several pieces"):
        anyrank.load(model, tmp_path / "a.pt")
    assert torch.equal(model.l.weight, torch.ones(300, 257))


@pytest.mark.parametrize("name", ["logit_scale", "layer_scale", "layer_scale_1.lambda1"])
def test_a_models_own_scale_is_none_of_its_8_bit_weights(name: str, tmp_path: Path) -> None:
    weight = torch.full((4, 4), 2.0)
    save_file({"weight": weight.to(torch.float8_e4m3fn), name: torch.tensor(3.0)}, tmp_path / "w")
    model = nn.Linear(4, 4, bias=False)
    anyrank.load(model, tmp_path / "w", unexpected="ignore")
    assert torch.equal(model.weight, weight)
    anyrank.convert(tmp_path / "w", tmp_path / "out", dtype="float32")


SCALES = [
    *("weight_scale", "weight_scale_2", "scale_weight", "scale", "qscale", "dequant_scale"),
    *("weight_amax", "weight_quantizer._scale", "weight_quantizer._amax", "SCB", "weight.SCB"),
    *("weight.absmax", "weight.quant_state.nf4", "comfy_quant", "weight_zero_point", "input_scale"),
    *("weight_s", "w_s", "weight.s", "zp", "w_zp", "zeros"),
    *("weights_scaling_factor", "alpha"),
]


def small_weights(name: str, lost: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Two FP8 weights, with what a tool keeps beside each."""
    file: dict[str, torch.Tensor] = {}
    for layer in ("0.", "1."):
        file[f"{layer}weight"] = torch.ones(4, 4).to(torch.float8_e4m3fn)
        if layer not in lost:
            file[layer + name] = torch.full((1, 1), 0.01)
    return file


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


@pytest.mark.parametrize("lost", [(), ("1.",)], ids=["all scales", "one is lost"])
@pytest.mark.parametrize("name", SCALES)
def test_8_bit_weights_are_refused_where_nobody_uses_their_scales(
    name: str, lost: tuple[str, ...], tmp_path: Path
) -> None:
    file, path = small_weights(name, lost), tmp_path / "w.safetensors"
    save_file(file, path)
    torch.save({"model": file}, tmp_path / "w.pt")
    numbers = {key: t.to(torch.int8) if key[2:] == "weight" else t for key, t in file.items()}
    model = two_layers()
    with pytest.raises(anyrank.LoadError, match=rf"0\.weight: is .* have a scale \(0\.{name}\)"):
        anyrank.load(model, numbers, unexpected="ignore", cast="any")
    for call in (anyrank.load, anyrank.plan):
        for source in (path, tmp_path / "w.pt", file):
            with pytest.raises(anyrank.LoadError, match=r"1\.weight: is torch\.float8_e4m3fn"):
                call(two_layers(), source, unexpected="ignore")
    with pytest.raises(anyrank.LoadError, match=r"1\.weight: is torch\.float8_e4m3fn"):
        anyrank.sync(two_layers(), file, unexpected="ignore")
    with pytest.raises(anyrank.LoadError, match=r"0\.weight: is torch\.float8_e4m3fn"):
        anyrank.convert(path, tmp_path / "out", dtype="bfloat16")
    save_file(numbers, tmp_path / "int8.safetensors")
    with pytest.raises(anyrank.LoadError, match=r"0\.weight: is torch\.int8"):
        anyrank.convert(tmp_path / "int8.safetensors", tmp_path / "out", dtype="float16")
    anyrank.convert(path, tmp_path / "out")  # as it is
    wrapped = {f"net.{key}": t for key, t in file.items()}
    with pytest.raises(anyrank.LoadError, match=r"1\.weight: is torch\.float8_e4m3fn"):
        anyrank.load(two_layers(), wrapped, unexpected="ignore", rename={"net": ""})


@pytest.mark.parametrize("config", [None, {"quant_method": "compressed-tensors"}])
def test_a_frozen_part_is_refused_8_bit_weights_without_their_scales_as_well(
    config: dict[str, object] | None, tmp_path: Path
) -> None:
    folder = write(tmp_path / "part", small_weights("weight_scale"), config)
    with anyrank.meta():
        model = nn.ModuleDict({"part": anyrank.freeze(two_layers(), source=folder)})
        model["rest"] = nn.Linear(2, 2)
    plain = {"rest.weight": torch.ones(2, 2), "rest.bias": torch.ones(2)}
    what = "is quantized with compressed" if config else r"weight: is torch\.float8_e4m3fn"
    for call in (anyrank.plan, anyrank.load):
        with pytest.raises(anyrank.LoadError, match=what):
            call(model, plain)


def test_a_block_scale_that_is_lost_is_missed_without_a_configuration(tmp_path: Path) -> None:
    file = small_weights("weight_scale_inv", ("1.",))
    with pytest.raises(anyrank.LoadError, match=r"1\.weight: is .* without the scale that other"):
        anyrank.load(two_layers(), file)
    save_file(file, tmp_path / "w.safetensors")
    with pytest.raises(anyrank.LoadError, match=r"1\.weight: is .* without the scale that other"):
        anyrank.convert(tmp_path / "w.safetensors", tmp_path / "out", dtype="bfloat16")


def test_8_bit_weights_without_any_scale_are_numbers() -> None:
    file = small_weights("unused", ("0.", "1."))
    model = two_layers()
    anyrank.load(model, file)
    assert torch.equal(model.get_parameter("0.weight"), torch.ones(4, 4))
    anyrank.load(model, {key: 3 * t.to(torch.int8) for key, t in file.items()}, cast="any")
    assert torch.equal(model.get_parameter("0.weight"), torch.full((4, 4), 3.0))


def advised(error: BaseException) -> Any:
    """The rename= that an error gives."""
    return ast.literal_eval(str(error).split("scales with rename=")[1].split(", added")[0])


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("", ["weight_scale"]),
        ("model", ["weight_scale", "input_scale"]),
        ("ema", ["weight_scale", "g"]),
        ("", ["scales.{}weight", "g"]),
        ("model", ["scales.{}weight"]),
    ],
)
def test_one_rename_leaves_out_the_scales_of_all_layers(
    table: str, names: list[str], tmp_path: Path
) -> None:
    scales = {
        name.format(layer) if "{}" in name else layer + name: torch.full((1, 1), 0.01)
        for name in names
        for layer in ("0.", "1.")
    }
    source = small_weights("", ("0.", "1.")) | scales
    path, model = tmp_path / "w.pt", two_layers()
    torch.save({table: source} if table else source, path)
    options: dict[str, Any] = {"rename": [(rf"^{table}\.", "")]} if table == "ema" else {}
    with pytest.raises(anyrank.LoadError, match=r"0\.weight: is torch\.float8") as failed:
        anyrank.load(model, path, unexpected="ignore", **options)
    rename = [*options.get("rename", ()), *advised(failed.value)]
    assert anyrank.load(model, path, rename=rename).unexpected == []
    assert torch.equal(model.get_parameter("1.weight"), torch.ones(4, 4))


def test_a_scale_whose_name_the_model_has_as_well_is_left_out_by_a_function() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    small = {"0.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "0.scale": torch.ones(4)}
    source = small | {"1.weight": torch.ones(4), "1.scale": torch.ones(4)}
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Scaled())
    with pytest.raises(anyrank.LoadError, match=r"with rename=, a function .* such as '0\.scale'"):
        anyrank.load(model, source, unexpected="ignore")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
@pytest.mark.parametrize("name", ["0.g", "0.weight.lambda", "0.offset", "scales.0.weight"])
def test_an_8_bit_weight_is_refused_beside_what_may_be_its_scale(
    name: str, dtype: torch.dtype
) -> None:
    source = {"0.weight": torch.ones(4, 4).to(dtype), "1.weight": torch.ones(4, 4)}
    source[name] = torch.full((4,), 2.0, dtype=torch.int32 if name == "0.offset" else None)
    model = two_layers()
    options: dict[str, Any] = {"cast": "any", "unexpected": "ignore"}
    with pytest.raises(
        anyrank.LoadError, match=rf"0\.weight: is .* have a scale \({name}\)"
    ) as failed:
        anyrank.load(model, source, **options)
    anyrank.load(model, source, rename=advised(failed.value), **options)
    assert torch.equal(model.get_parameter("0.weight"), torch.ones(4, 4))
    small = nn.Linear(4, 4, bias=False)
    small.weight = nn.Parameter(torch.zeros(4, 4, dtype=dtype), requires_grad=False)
    anyrank.load(nn.Sequential(small, nn.Linear(4, 4, bias=False)), source, **options)
    assert torch.equal(small.weight, source["0.weight"])


@pytest.mark.parametrize(
    "tables",
    [
        {"scales": {"0.weight": torch.ones(4)}},
        {"weight_scales": {"0": torch.ones(4, 1)}},
        {"quant_state": {"0.weight": {"absmax": torch.ones(())}}},
    ],
)
def test_scales_in_a_table_of_their_own_are_not_left_out(
    tables: dict[str, Any], tmp_path: Path
) -> None:
    weights = {f"{n}.weight": torch.ones(4, 4).to(torch.float8_e4m3fn) for n in range(2)}
    path, [table] = tmp_path / "w.pt", tables
    torch.save({"model": weights, **tables}, path)
    model = two_layers()
    with pytest.raises(anyrank.LoadError, match=rf"0\.weight: is .* have a scale \({table}\.0"):
        anyrank.load(model, path)
    with pytest.raises(anyrank.LoadError, match=rf"0\.weight: is .* have a scale \({table}\.0"):
        anyrank.convert(path, tmp_path / "out", dtype="bfloat16")
    anyrank.load(model, path, rename=lambda key: "" if key.startswith(table) else key)
    assert torch.equal(model.get_parameter("0.weight"), torch.ones(4, 4))
    # Nor where the caller says which table the weights are, whether another could be meant or not.
    for others in ({}, {"model": {"0.weight": torch.zeros(4, 4), "1.weight": torch.zeros(4, 4)}}):
        torch.save({"ema": weights, **others, **tables}, path)
        with pytest.raises(anyrank.LoadError, match=rf"0\.weight: is .* have a scale \({table}\.0"):
            anyrank.load(model, path, rename={"ema": ""})
        with pytest.raises(anyrank.LoadError, match=rf"0\.weight: is .* have a scale \({table}\.0"):
            anyrank.convert(path, tmp_path / "out", dtype="bfloat16", rename={"ema": ""})


def test_tables_beside_a_plain_cast_are_no_scales(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    tables: dict[str, Any] = {
        "ema": {"weight": torch.zeros(4, 4)},
        "quant_model": {"weight": torch.zeros(4, 4)},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": []},
        "grad_scaler": {"scale": torch.ones(())},
    }
    torch.save({"model": weights, **tables}, tmp_path / "w.pt")
    model = nn.Linear(4, 4, bias=False)
    anyrank.load(model, tmp_path / "w.pt")
    assert torch.equal(model.weight, torch.ones(4, 4))


def test_a_plain_cast_is_read_beside_parameters_that_the_model_has_not() -> None:
    file = small_weights("unused", ("0.", "1."))
    file |= {"0.bias": torch.ones(4), "0.num_batches_tracked": torch.tensor(3)}
    file |= {"1.gamma": torch.ones(4).to(torch.float8_e4m3fn), "norm.weight": torch.ones(4)}
    model = two_layers()
    anyrank.load(model, file, unexpected="ignore")
    assert torch.equal(model.get_parameter("0.weight"), torch.ones(4, 4))


def test_a_mask_beside_a_scale_is_no_obstacle_to_a_cast(tmp_path: Path) -> None:
    file = {"a.mask": torch.ones(4, dtype=torch.uint8), "a.scale": torch.ones(4)}
    anyrank.convert(file, tmp_path / "out", dtype="float16")


def test_a_scale_that_the_model_has_or_that_rename_leaves_out_is_no_obstacle(
    tmp_path: Path,
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))

    small = torch.ones(4, 4).to(torch.float8_e4m3fn)
    model = nn.Sequential(Scaled())
    anyrank.load(model, {"0.weight": small, "0.scale": torch.ones(4)})
    assert torch.equal(model.get_parameter("0.scale"), torch.ones(4))
    file = small_weights("scale")
    anyrank.load(two_layers(), file, rename=lambda key: "" if key.endswith("scale") else key)
    for source in (file, {"model": file}):
        torch.save(source, tmp_path / "w.pt")
        rename = {f"{layer}.scale": "" for layer in "01"}
        out = tmp_path / f"out{len(source)}"
        report = anyrank.convert(tmp_path / "w.pt", out, dtype="bfloat16", rename=rename)
        assert report.tensors == 2
    by_table = {"model": "", "model.0.scale": "", "model.1.scale": ""}
    anyrank.load(two_layers(), tmp_path / "w.pt", rename=by_table)  # {"model": file}
    whole = {key: t.to(torch.float8_e4m3fn) for key, t in file.items()}  # cast as a whole
    anyrank.load(two_layers(), whole, unexpected="ignore")
