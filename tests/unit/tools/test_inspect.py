"""`anyrank.inspect`: what is in a file, from its header, on one screen."""

from __future__ import annotations

import itertools
import json
import re
import struct
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import anyrank
from anyrank.tools.inspect.groups import group
from anyrank.wording import in_units, printable

SCREEN_LINES = 50


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """A safetensors file of bf16 tensors whose payload is a hole; its payload's bytes."""
    header, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def write_sparse_model(folder: Path, shards: int, layers: int) -> int:
    """A Hugging Face folder of `shards` files with `layers` layers each; the payload's bytes."""
    weight_map: dict[str, str] = {}
    nbytes = 0
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(shard * layers, (shard + 1) * layers):
            shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (57344, 14336)
            shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (14336, 57344)
            shapes[f"model.layers.{layer}.norm.weight"] = (14336,)
        nbytes += write_sparse(folder / name, shapes)
        weight_map |= dict.fromkeys(shapes, name)
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return nbytes


def test_100_gb_open_under_a_second(tmp_path: Path) -> None:
    nbytes = write_sparse_model(tmp_path, shards=8, layers=4)
    assert nbytes > 100e9
    start = time.process_time()  # a busy machine is no fault of the code
    inspection = anyrank.inspect(tmp_path)
    assert time.process_time() - start < 1.0
    assert inspection.nbytes == nbytes
    assert str(inspection) == (
        f"{tmp_path}: safetensors, 8 files, 96 tensors, 52,613,808,128 parameters, 98.0 GiB\n"
        "  bf16: 96 tensors, 98.0 GiB\n"
        "  model.layers.{0..31}.mlp.down_proj.weight [14336, 57344] bf16 x32, 49.0 GiB\n"
        "  model.layers.{0..31}.mlp.up_proj.weight [57344, 14336] bf16 x32, 49.0 GiB\n"
        "  model.layers.{0..31}.norm.weight [14336] bf16 x32, 896.0 KiB"
    )


def test_files_tensors_totals_and_metadata_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "w": torch.zeros(4, 3, dtype=torch.bfloat16),
        "b": torch.zeros(4),
        "n": torch.zeros((), dtype=torch.int64),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    inspection = anyrank.inspect(path)
    assert (inspection.path, inspection.format) == (str(path), "safetensors")
    assert [(f.path, f.nbytes) for f in inspection.files] == [(str(path), path.stat().st_size)]
    found = {t.name: (t.shape, t.dtype, t.nbytes, t.files) for t in inspection.tensors}
    assert found == {
        "w": ((4, 3), "bfloat16", 24, (str(path),)),
        "b": ((4,), "float32", 16, (str(path),)),
        "n": ((), "int64", 8, (str(path),)),
    }
    totals = [(d, t.tensors, t.elements, t.nbytes) for d, t in inspection.dtypes.items()]
    assert totals == [("bfloat16", 1, 12, 24), ("float32", 1, 4, 16), ("int64", 1, 1, 8)]
    assert (inspection.parameters, inspection.nbytes) == (17, 48)
    assert inspection.metadata == {"format": "pt"}
    assert "  metadata format: pt" in str(inspection).splitlines()


def test_json_holds_every_field(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.zeros(2, 2)}, tmp_path / "m.pt")
    plain = json.loads(anyrank.inspect(tmp_path / "m.pt").to_json())
    assert plain["format"] == "torch zip"
    assert plain["tensors"][0]["name"] == "a.weight"
    assert plain["tensors"][0]["shape"] == [2, 2]
    assert plain["dtypes"] == {"float32": {"tensors": 1, "elements": 4, "nbytes": 16}}
    assert plain["skipped"] == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning:torch")
def test_a_dcp_tensor_names_its_files(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(3, 3)}, checkpoint_id=tmp_path, no_dist=True)
    inspection = anyrank.inspect(tmp_path)
    (tensor,) = inspection.tensors
    assert tensor.files == (inspection.files[0].path,)
    assert tensor.files[0].startswith(str(tmp_path))


def test_a_run_lists_its_committed_steps(tmp_path: Path) -> None:
    state = anyrank.TrainState(torch.nn.Linear(2, 3))
    with anyrank.Checkpoints(tmp_path / "run", state, every=1) as ckpts:
        ckpts.step_done()
        ckpts.step_done()
        saved = ckpts.saved()
    (tmp_path / "run" / "step-00000009").mkdir()  # no manifest: never committed
    inspection = anyrank.inspect(tmp_path / "run")
    assert inspection.steps == saved
    assert [one.step for one in inspection.steps] == [2, 1]
    assert {t.name for t in inspection.tensors} == {"weight", "bias"}
    assert "step 2 " in str(inspection)
    assert json.loads(inspection.to_json())["steps"][0]["path"] == saved[0].path
    assert anyrank.inspect(saved[0].path).steps == []


def test_lists_and_tables_are_sources_too(tmp_path: Path) -> None:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        save_file({path.stem: torch.zeros(2)}, path)
    both = anyrank.inspect(paths)
    assert both.path == f"{paths[0]}, {paths[1]}"
    assert [(t.name, t.files) for t in both.tensors] == [(p.stem, (str(p),)) for p in paths]
    memory = anyrank.inspect({"x": torch.zeros(2)})
    assert (memory.path, memory.format, memory.files) == ("memory", "memory", [])
    assert memory.tensors[0].files == ()


def test_what_load_passes_over_is_told(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    inspection = anyrank.inspect(tmp_path)
    assert inspection.skipped == ["pytorch_model.bin: model.safetensors was chosen"]
    assert f"  skipped  {inspection.skipped[0]}" in str(inspection).splitlines()


def test_packed_fp4_elements_are_counted_one_by_one(tmp_path: Path) -> None:
    text = b'{"w":{"dtype":"F4","shape":[2,8],"data_offsets":[0,8]}}'
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    inspection = anyrank.inspect(tmp_path / "w.safetensors")
    assert (inspection.parameters, inspection.nbytes) == (16, 8)


@pytest.mark.parametrize("number", [1, 30, 31, 3000])
def test_it_fits_one_screen(tmp_path: Path, number: int) -> None:
    tensors = {f"name{i:04}": torch.zeros(1) for i in range(number)}
    metadata = {f"key{i}": "v" * 10_000 for i in range(9)}
    save_file(tensors, tmp_path / "a.safetensors", metadata=metadata)
    lines = str(anyrank.inspect(tmp_path / "a.safetensors")).splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) < 300
    left = [line for line in lines if re.search(r"and [\d,]+ tensors? more", line)]
    expected = {1: [], 30: [], 31: ["  and 1 tensor more"], 3000: ["  and 2,970 tensors more"]}
    assert left == expected[number]


def test_terminal_codes_in_names_and_metadata_do_not_reach_the_terminal(tmp_path: Path) -> None:
    tensors = {"a\x1b[2J.b\nc": torch.zeros(1)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"k": "\x1b]0;x\x07"})
    text = str(anyrank.inspect(tmp_path / "a.safetensors"))
    assert "a\\x1b[2J.b\\nc [1] fp32" in text
    assert "k: \\x1b]0;x\\x07" in text
    assert printable("plain \u00fc") == "plain \u00fc"


@pytest.mark.parametrize("name", ["...", "", "007.w", "\u0663.w"])
def test_odd_names_are_shown_as_they_are(name: str) -> None:
    (one,) = group([(name, (1,), "float32", 4)])
    assert one.name == name


def test_what_is_not_there_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(anyrank.LoadError, match="does not exist"):
        anyrank.inspect(tmp_path / "nothing")


# -- groups ---------------------------------------------------------------------------------------


def names_of(text: str) -> list[str]:
    """The names that a group's name stands for: a.{0..2,5}.b is four."""
    choices: list[list[str]] = []
    for part in re.split(r"(\{[^}]*\})", text):
        if not part.startswith("{"):
            choices.append([part])
            continue
        runs = [run.split("..") for run in part[1:-1].split(",")]
        choices.append([str(n) for run in runs for n in range(int(run[0]), int(run[-1]) + 1)])
    return ["".join(each) for each in itertools.product(*choices)]


PARTS = st.sampled_from(["a", "w", "0", "1", "2", "10"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(NAMES, st.sampled_from([(2,), (3,)]), max_size=40))
def test_every_tensor_is_in_exactly_one_group(shapes: dict[str, tuple[int, ...]]) -> None:
    groups = group((name, shape, "float32", 4 * shape[0]) for name, shape in shapes.items())
    found = [(name, one.shape) for one in groups for name in names_of(one.name)]
    assert Counter(found) == Counter(shapes.items())
    assert [one.count for one in groups] == [len(names_of(one.name)) for one in groups]
    assert [one.nbytes for one in groups] == [4 * one.shape[0] * one.count for one in groups]


def test_layers_with_other_experts_collapse_by_their_first_number() -> None:
    names = [f"layers.{layer}.experts.{e}.w" for layer in range(12) for e in range(2 + layer % 2)]
    found = [one.name for one in group((n, (2, 3), "bfloat16", 12) for n in names)]
    assert found == [
        "layers.{0..11}.experts.0.w",
        "layers.{0..11}.experts.1.w",
        "layers.{1,3,5,7,9,11}.experts.2.w",
    ]


def test_a_layer_of_another_shape_stands_alone() -> None:
    shapes = {f"layers.{n}.w": (4,) if n != 1 else (8,) for n in range(12)}
    found = group((name, shape, "float32", 4 * shape[0]) for name, shape in shapes.items())
    assert [str(one) for one in found] == [
        "layers.{0,2..11}.w [4] fp32 x11, 176 B",
        "layers.1.w [8] fp32, 32 B",
    ]


def test_numbers_sort_as_numbers_and_long_lists_are_cut() -> None:
    names = ["b", "a.10", "a.9.x", *(f"c.{n}" for n in range(0, 40, 2))]
    found = [one.name for one in group((name, (1,), "float32", 4) for name in names)]
    assert found == ["a.9.x", "a.10", "b", "c.{0,2,4,6,8,..,38}"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (90868376, "86.7 MiB"),
        (98 << 30, "98.0 GiB"),
        (1568 << 40, "1,568.0 TiB"),
    ],
)
def test_bytes_are_told_in_units(nbytes: int, text: str) -> None:
    assert in_units(nbytes) == text
