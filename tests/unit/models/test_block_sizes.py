"""The size of FP8 blocks: as the source says it, wherever it is, or the one size that fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import anyrank
from anyrank.models.dialects.transformers.quantized import blocks_of, pairs_of
from anyrank.tensors.spec import StoredTensor

Tensors = dict[str, torch.Tensor]
SIZE, BLOCK = 192, 96  # 2 x 2 scales, as for blocks of 128


def tensors(prefix: str = "0.") -> tuple[Tensors, torch.Tensor]:
    """An FP8 weight with its scales, and its values."""
    torch.manual_seed(0)
    numbers = torch.randn(SIZE, SIZE).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    stored = {f"{prefix}weight": numbers, f"{prefix}weight_scale_inv": scales}
    return stored, numbers.float() * spread


def config(folder: Path, block: int = BLOCK, inner: bool = False) -> None:
    settings: dict[str, Any] = {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}
    }
    text = json.dumps({"text_config": settings} if inner else settings)
    (folder / "config.json").write_text(text)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))


def of_folder(folder: Path, stored: Tensors) -> Any:
    save_file(stored, folder / "model.safetensors")
    return folder


def of_file(folder: Path, stored: Tensors) -> Any:
    return of_folder(folder, stored) / "model.safetensors"


def of_list(folder: Path, stored: Tensors) -> Any:
    for number, (key, tensor) in enumerate(stored.items()):
        save_file({key: tensor}, folder / f"{number}.safetensors")
    return [folder / "0.safetensors", folder / "1.safetensors"]


def of_pt(folder: Path, stored: Tensors) -> Any:
    torch.save({"model": stored}, folder / "w.pt")
    return folder / "w.pt"


def of_dcp(folder: Path, stored: Tensors) -> Any:
    anyrank.convert(stored, folder / "dcp", to="dcp")
    config(folder / "dcp")
    return folder / "dcp"


SOURCES: dict[str, Callable[[Path, Tensors], Any]] = {
    "folder": of_folder,
    "file": of_file,
    "list": of_list,
    "pt": of_pt,
    "dcp": of_dcp,
}
WRITTEN = {"folder": "safetensors", "w.safetensors": "safetensors", "w.pt": "torch", "dcp": "dcp"}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_config_json_beside_a_file_counts_as_for_its_folder(
    source: str, inner: bool, tmp_path: Path
) -> None:
    stored, values = tensors()
    (folder := tmp_path / "source").mkdir()
    config(folder, inner=inner)
    path = SOURCES[source](folder, stored)
    net = model()
    anyrank.load(net, path)
    assert torch.equal(net.get_parameter("0.weight"), values)
    with anyrank.meta():
        whole = nn.ModuleDict({"part": anyrank.freeze(model(), source=path)})
        whole["rest"] = nn.Linear(2, 2, bias=False)
    anyrank.load(whole, {"rest.weight": torch.ones(2, 2)})
    assert torch.equal(whole.get_parameter("part.0.weight"), values)
    anyrank.convert(path, tmp_path / "out.safetensors", dtype="float32")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["0.weight"], values)
    assert anyrank.diff(path, tmp_path / "out.safetensors").values == {}


@pytest.mark.parametrize("to", WRITTEN)
@pytest.mark.parametrize("again", WRITTEN)
def test_what_convert_writes_keeps_it(to: str, again: str, tmp_path: Path) -> None:
    stored, values = tensors()
    config(tmp_path)
    first, second = tmp_path / f"a{to}", tmp_path / f"b{again}"
    anyrank.convert(of_file(tmp_path, stored), first, to=WRITTEN[to])  # pyright: ignore
    (tmp_path / "config.json").unlink()
    anyrank.convert(first, second, to=WRITTEN[again])  # pyright: ignore
    for path in (first, second):
        net = model()
        anyrank.load(net, path)
        assert torch.equal(net.get_parameter("0.weight"), values)
        assert anyrank.verify(path)
    anyrank.convert(second, tmp_path / "out.safetensors", dtype="float32")
    assert "quantization_config" not in anyrank.inspect(tmp_path / "out.safetensors").metadata
    if again == "w.pt":
        assert torch.load(second).keys() == stored.keys()
        assert torch.load(second, mmap=True).keys() == stored.keys()


@pytest.mark.parametrize("form", ["dict", "pt", "safetensors", "dcp"])
def test_several_sizes_that_fit_are_refused_where_nothing_says_which(
    form: str, tmp_path: Path
) -> None:
    stored, values = tensors("model.0.")
    source: Any = stored
    if form != "dict":
        name = {"pt": "w.pt", "safetensors": "w.safetensors", "dcp": "w"}[form]
        to: Any = {"pt": "torch"}.get(form, form)
        anyrank.convert(stored, source := tmp_path / name, to=to)
    for call in (
        lambda: anyrank.load(model(), source, rename={"model": ""}),
        lambda: anyrank.plan(model(), source, rename={"model": ""}),
        lambda: anyrank.convert(source, tmp_path / "out", dtype="bfloat16"),
        lambda: anyrank.diff(source, {"model.0.weight": values}),
    ):
        with pytest.raises(anyrank.LoadError, match=r"nothing states which rows.*config\.json"):
            call()
    assert anyrank.diff(source, stored)  # the same numbers


def test_files_of_two_sizes_are_no_one_source(tmp_path: Path) -> None:
    paths: list[Path] = []
    for name, block in (("a", 96), ("b", 128)):
        (tmp_path / name).mkdir()
        config(tmp_path / name, block)
        paths.append(of_file(tmp_path / name, tensors(f"{name}.")[0]))
    with pytest.raises(anyrank.LoadError, match="has a different quantization_config"):
        anyrank.inspect(paths)


def test_blocks_of_another_size_are_other_weights(tmp_path: Path) -> None:
    for name, block in (("a", 96), ("b", 128)):
        (tmp_path / name).mkdir()
        config(tmp_path / name, block)
        of_file(tmp_path / name, tensors()[0])
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert [*found.values] == ["0.weight"]


def test_plain_files_beside_it_are_not_quantized(tmp_path: Path) -> None:
    settings = {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file({"0.bias": torch.ones(SIZE)}, tmp_path / "adapter.safetensors")
    net = nn.Sequential(nn.Linear(2, SIZE))
    anyrank.load(net, tmp_path / "adapter.safetensors", missing="keep")


def grids(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> object:
    listed: dict[str, StoredTensor] = {}
    for number, (shape, grid) in enumerate(pairs):
        name = f"{number}.weight"
        scales = f"{name}_scale_inv"
        listed[name] = StoredTensor.contiguous(name, shape, torch.float8_e4m3fn, 0, 0)
        listed[scales] = StoredTensor.contiguous(scales, grid, torch.float32, 0, 0)
    return blocks_of({}, pairs_of(listed), listed)


@pytest.mark.parametrize(
    ("pairs", "block"),
    [
        ([((7168, 1536), (56, 12))], [128, 128]),
        ([((576, 7168), (5, 56))], [128, 128]),
        ([((256, 384), (2, 3))], ()),  # blocks of 128, or of 160
        ([((256, 384), (2, 3)), ((1024, 1024), (8, 8))], [128, 128]),
        ([((4096, 512), (32, 4))], [128, 128]),  # 160 columns would be no square
        ([((192, 192), (2, 2))], ()),
        ([((192, 192), (2, 2)), ((8, 8), (1, 1))], ()),  # one scale says nothing
        ([((64, 192), (64, 1))], [1, 192]),  # a scale for each row
        ([((64, 192), (64, 6))], [1, 32]),
        ([((64, 192), (1, 1))], [1, 1]),  # a scale for each matrix: not asked for
        ([((64, 64), (2, 1)), ((256, 64), (2, 1))], ()),  # no size fits both
        ([((4096, 512), (1, 4))], ()),
        ([((37, 54), (3, 4))], ()),  # blocks of 13 to 18 rows: of no usual size
        ([((3, 1024, 1024), (3, 8, 8))], [128, 128]),
        ([((3, 1024, 1024), (8, 8))], ()),
        ([((0, 64), (0, 2)), ((1024, 1024), (8, 8))], [128, 128]),
    ],
)
def test_grids_say_it_if_one_size_alone_fits(pairs: Any, block: object) -> None:
    assert grids(*pairs) == block
