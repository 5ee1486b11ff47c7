"""`convert`: what is written is what was there, in a form that the other tools read."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from tests.runs import save
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim.swa_utils import AveragedModel

import anyrank
from anyrank import faults
from anyrank.errors import CheckpointError, LoadError
from anyrank.tools.convert.content import all_finite
from anyrank.tools.convert.formats import OUTPUTS
from anyrank.tools.convert.output import Contents, Output, OutputTensor
from anyrank.tools.convert.planned_files import plan_torch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")

SHARED = torch.randn(8, 4)
TENSORS: dict[str, torch.Tensor] = {
    "embed.weight": SHARED,
    "head.weight": SHARED,
    "strided": torch.randn(5, 3).t(),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "complex": torch.randn(3, dtype=torch.complex64),
    "flags": torch.tensor([True, False, True]),
    "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "half": torch.randn(7).to(torch.bfloat16),
    "a/b c\n\u00e9": torch.arange(5),
    "double": torch.randn(2, 1, 3, dtype=torch.float64),
    "small": torch.tensor([1, 2, 3], dtype=torch.uint8),
}


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    flat, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs))
    return torch.equal(flat, other)


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """A Hugging Face folder, by its index and the safetensors package alone."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    found: dict[str, torch.Tensor] = {}
    weight_map = json.loads(index.read_text())["weight_map"]
    for file in sorted(set(weight_map.values())):
        found |= load_file(folder / file)
    assert set(found) == set(weight_map)
    return found


def sources(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same tensors in every format."""
    torch.save(tensors, folder / "w.pt")
    torch.save(tensors, folder / "old.pt", _use_new_zipfile_serialization=False)
    plain = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(plain, folder / "w.safetensors")
    dcp_save(dict(plain), checkpoint_id=folder / "dcp", no_dist=True)
    return {
        "torch": folder / "w.pt",
        "legacy": folder / "old.pt",
        "safetensors": folder / "w.safetensors",
        "dcp": folder / "dcp",
        "memory": tensors,
    }


@pytest.mark.parametrize("shard_bytes", [None, 100, 1])
def test_every_format_becomes_a_folder_of_safetensors(
    tmp_path: Path, shard_bytes: int | None
) -> None:
    for kind, source in sources(tmp_path, TENSORS).items():
        out = tmp_path / f"out-{kind}"
        report = anyrank.convert(source, out, shard_bytes=shard_bytes)
        found = read_folder(out)
        tied = {"head.weight": "embed.weight"} if kind in ("torch", "legacy", "memory") else {}
        assert report.tied == tied, kind
        assert found.keys() == TENSORS.keys() - tied.keys(), kind
        assert [name for name in found if not same(found[name], TENSORS[name])] == [], kind
        assert report.tensors == len(found)
        assert sorted(report.files) == sorted(os.listdir(out))
        assert anyrank.verify(out)
        assert not list(tmp_path.glob("*.unfinished-*"))


def test_a_run_becomes_a_folder_of_safetensors(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 4))
    model[1].weight = nn.Parameter(torch.randn(4, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save(tmp_path / "run", anyrank.TrainState(model, optimizer))
    report = anyrank.convert(tmp_path / "run", tmp_path / "out")
    found = read_folder(tmp_path / "out")
    assert found.keys() == model.state_dict().keys()
    assert all(same(found[name], tensor) for name, tensor in model.state_dict().items())
    assert any("exp_avg" in line for line in report.skipped)


def test_a_file_of_safetensors_is_one_file(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "w.pt")
    report = anyrank.convert(tmp_path / "w.pt", tmp_path / "w.safetensors")
    assert report.files == ["w.safetensors"]
    assert load_file(tmp_path / "w.safetensors").keys() == TENSORS.keys() - {"head.weight"}


def test_a_cast_is_of_floating_tensors(tmp_path: Path) -> None:
    weights = {"w": torch.randn(300, 7), "ids": torch.arange(3), "z": torch.ones(2) * 1j}
    report = anyrank.convert(weights, tmp_path / "out", dtype="bfloat16")
    found = read_folder(tmp_path / "out")
    assert same(found["w"], weights["w"].bfloat16())
    assert same(found["ids"], weights["ids"])
    assert same(found["z"], weights["z"])
    assert report.cast == {"w": "float32 -> bfloat16"}


def test_a_cast_that_overflows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        LoadError, match=r"1 value cannot be cast to torch.float16, whose maximum is 65504"
    ):
        anyrank.convert({"w": torch.tensor([1.0, 1e6])}, tmp_path / "out", dtype="float16")
    assert os.listdir(tmp_path) == []
    kept = anyrank.convert({"w": torch.tensor([1.0, torch.inf])}, tmp_path / "out", dtype="fp16")
    assert kept.tensors == 1


def test_fp8_with_scales_is_not_cast(tmp_path: Path) -> None:
    fp8 = torch.randn(4, 4).to(torch.float8_e4m3fn)
    weights = {"a.weight": fp8, "a.weight_scale": torch.ones(1)}
    with pytest.raises(
        LoadError,
        match=r"a\.weight: is torch\.float8_e4m3fn in the source, and seems to have a scale",
    ):
        anyrank.convert(weights, tmp_path / "out", dtype="bfloat16")
    anyrank.convert(weights, tmp_path / "out")
    assert same(read_folder(tmp_path / "out")["a.weight"], fp8)


def test_names_lose_what_wrappers_put_into_them(tmp_path: Path) -> None:
    weights = {"module._orig_mod.a.weight": torch.ones(2), "module.b._orig_mod.bias": torch.ones(1)}
    report = anyrank.convert(weights, tmp_path / "out")
    assert read_folder(tmp_path / "out").keys() == {"a.weight", "b.bias"}
    assert report.renamed["module.b._orig_mod.bias"] == "b.bias"


def test_an_averaged_model_is_written_under_the_names_of_the_model(tmp_path: Path) -> None:
    average = AveragedModel(nn.Linear(2, 3))
    for name, weights in {"plain": average.state_dict(), "in a table": None}.items():
        torch.save(weights or {"state_dict": average.state_dict()}, tmp_path / "average.pt")
        report = anyrank.convert(tmp_path / "average.pt", tmp_path / name)
        assert read_folder(tmp_path / name).keys() == {"weight", "bias"}
        assert any("counts the updates of an AveragedModel" in text for text in report.skipped)
    # The live average, and one whose names a model gives, have the same names.
    anyrank.convert(average, tmp_path / "live")
    anyrank.convert(tmp_path / "average.pt", tmp_path / "by model", model=average)
    for name in ("live", "by model"):
        assert read_folder(tmp_path / name).keys() == {"weight", "bias"}
        assert torch.equal(read_folder(tmp_path / name)["weight"], average.module.weight)
    # Without the wrapper's prefix it is the model's own tensor.
    anyrank.convert({"n_averaged": torch.ones(2), "a": torch.ones(2)}, tmp_path / "own")
    assert read_folder(tmp_path / "own").keys() == {"n_averaged", "a"}


def test_beside_an_optimizer_the_table_of_weights_is_taken(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2)}, "optimizer": {"state": {"a": torch.zeros(2)}}}
    dcp_save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = anyrank.convert(tmp_path / "dcp", tmp_path / "out")
    assert read_folder(tmp_path / "out").keys() == {"a"}
    assert "optimizer.state.a: not weights" in report.skipped


@pytest.mark.parametrize(
    ("rename", "idle"),
    [
        (
            {"net": "", "nett": "x", "net.a": "b", "net.a.": "c"},
            {"nett": "", "net.a.": " (near: net.a)"},
        ),
        ([("^net[.]", ""), ("nett", "x")], {"nett": ""}),
        (str.lower, {}),
    ],
)
def test_entries_of_rename_that_match_nothing_are_reported(
    tmp_path: Path, rename: Any, idle: dict[str, str]
) -> None:
    model = nn.ModuleDict({"net": nn.ParameterDict({"a": torch.zeros(2)})})
    for number, source in enumerate((model, dict(model.state_dict()))):
        report = anyrank.convert(source, tmp_path / str(number), rename=rename)
        said = [f"{old}: this entry of rename= matches no key{near}" for old, near in idle.items()]
        assert report.skipped == said


def test_tensors_without_elements_are_no_ties(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(0, 2), "b": torch.zeros(0, 2)}, tmp_path / "w.safetensors")
    anyrank.convert(tmp_path / "w.safetensors", tmp_path / "out")
    assert read_folder(tmp_path / "out").keys() == {"a", "b"}


def test_rename_applies_and_two_of_one_name_are_an_error(tmp_path: Path) -> None:
    weights = {"net.a": torch.ones(2), "b": torch.ones(2)}
    anyrank.convert(weights, tmp_path / "out", rename={"net": ""})
    assert read_folder(tmp_path / "out").keys() == {"a", "b"}
    deep = {"net.low.a": torch.ones(2), "net.b": torch.ones(2)}
    anyrank.convert(deep, tmp_path / "longest", rename={"net": "x", "net.low": "y"})
    assert read_folder(tmp_path / "longest").keys() == {"y.a", "x.b"}
    with pytest.raises(LoadError, match=r"both net\.a and b of the source become b"):
        anyrank.convert(weights, tmp_path / "two", rename={"net.a": "b"})


def test_configuration_and_tokenizer_come_along(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    config = {"dtype": "float32", "text_config": {"torch_dtype": "float32"}, "dropout": 0.1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"")
    (folder / ".hidden").write_bytes(b"")
    report = anyrank.convert(folder, tmp_path / "out", dtype="bfloat16")
    assert report.copied == ["config.json", "tokenizer.json"]
    made = json.loads((tmp_path / "out/config.json").read_text())
    assert made == {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}, "dropout": 0.1}


# -- the destination ------------------------------------------------------------------------------


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    anyrank.convert({"a": torch.ones(2)}, out)
    with pytest.raises(ValueError, match="already exists"):
        anyrank.convert({"b": torch.ones(2)}, out)
    assert read_folder(out).keys() == {"a"}
    anyrank.convert({"b": torch.ones(2)}, out, overwrite=True)
    assert read_folder(out).keys() == {"b"}
    empty = tmp_path / "empty"
    empty.mkdir()
    anyrank.convert({"a": torch.ones(2)}, empty)
    assert read_folder(empty).keys() == {"a"}


@pytest.mark.parametrize("dst", ["src", "src/out", "src/deep/out", ".", "link", "src/"])
def test_the_source_is_never_the_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dst: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "link").symlink_to("src")
    save_file({"w": torch.ones(2)}, "src/model.safetensors")
    with pytest.raises(ValueError, match="is the source"):
        anyrank.convert("src", dst, overwrite=True)
    assert os.listdir("src") == ["model.safetensors"]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("z", {"to": "torch", "shard_bytes": 5}, "shard_bytes= is only for"),
        (
            "z.safetensors",
            {"shard_bytes": 5},
            "shard_bytes= is for a folder of weights, .*one file",
        ),
        ("z.pt", {}, "a torch file, but to='safetensors'. Pass to='torch'"),
        ("z.bin", {"to": "dcp"}, "a torch file, but to='dcp'. Pass to='torch'"),
        (
            "z.safetensors",
            {"to": "torch"},
            "a safetensors file, but to='torch'. Pass to='safetensors'",
        ),
    ],
)
def test_what_does_not_fit_the_destination_is_refused(
    tmp_path: Path, name: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        anyrank.convert({"a": torch.ones(2)}, tmp_path / name, **options)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_tied_tensors_of_a_dict_are_written_once(tmp_path: Path, to: str) -> None:
    weight = torch.arange(8.0)
    given = {
        "head": weight,
        "embed": weight.detach(),
        "turned": weight.view(2, 4),
        "own": weight + 1,
    }
    report = anyrank.convert(given, tmp_path / "out", to=to)
    assert (report.tied, report.tensors) == ({"embed": "head"}, 3)
    differ = anyrank.diff(given, tmp_path / "out")
    assert differ.equal
    tied = nn.ParameterDict({name: nn.Parameter(torch.empty(8)) for name in ("embed", "own")})
    tied |= {"head": tied["embed"], "turned": nn.Parameter(torch.empty(2, 4))}
    assert not anyrank.load(tied, tmp_path / "out").duplicates  # one tensor in the file, too


@pytest.mark.parametrize(
    "point", ["file.folder", "file.open", "file.write", "file.fsync", "convert.commit"]
)
def test_a_device_that_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(faults.armed, point, refuse)
    with pytest.raises(CheckpointError, match="No space left"):
        anyrank.convert({"a": torch.ones(2)}, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_damaged_source_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "run", anyrank.TrainState(nn.Linear(64, 64)))
    (data,) = tmp_path.glob("run/step-*/*.distcp")
    whole = bytearray(data.read_bytes())
    whole[len(whole) // 2] ^= 1
    data.write_bytes(whole)
    with pytest.raises(CheckpointError, match="differ from the saved ones"):
        anyrank.convert(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- other formats --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_torch_file_is_read_by_torch(tmp_path: Path, kind: str) -> None:
    source = sources(tmp_path, TENSORS)[kind]
    report = anyrank.convert(source, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found.keys() == TENSORS.keys()
    assert [name for name in found if not same(found[name], TENSORS[name])] == []
    is_tied = found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert is_tied == (kind == "torch") == bool(report.tied)
    mapped = torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert same(mapped["double"], TENSORS["double"])
    assert anyrank.verify(tmp_path / "out.pt")


def test_a_dcp_folder_is_read_by_torch(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "w.pt")
    anyrank.convert(tmp_path / "w.pt", tmp_path / "out", to="dcp")
    found = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    dcp_load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert [name for name in found if not same(found[name], TENSORS[name])] == []
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt").keys() == TENSORS.keys()
    assert anyrank.diff(tmp_path / "w.pt", tmp_path / "out")
    assert anyrank.verify(tmp_path / "out")


def test_a_new_row_of_the_table_is_all_that_a_format_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Contents] = []

    def plan(contents: Contents) -> Output:
        planned.append(contents)
        return plan_torch(contents)

    monkeypatch.setitem(OUTPUTS, "npz", replace(OUTPUTS["torch"], plan=plan))
    to: Any = "npz"
    report = anyrank.convert({"w": torch.ones(2)}, tmp_path / "w.npz", to=to)
    assert (report.format, report.files) == ("npz", ["w.npz"])
    assert [contents.file_name for contents in planned] == ["w.npz"]


def test_a_zip_beyond_4_gib_has_64_bit_records(tmp_path: Path) -> None:
    wide = OutputTensor("wide", (1 << 31,), torch.float32)
    after = OutputTensor("after", (5,), torch.float32)
    (file,) = plan_torch(Contents([wide, after], file_name="w.pt")).files
    with open(tmp_path / "w.pt", "wb") as made:  # with a hole for the values
        made.truncate(file.size)
        for offset, data in file.fixed:
            made.seek(offset)
            made.write(data)
        made.seek(file.spans[1].start)
        made.write(torch.arange(5.0).numpy().tobytes())
    found = torch.load(tmp_path / "w.pt", weights_only=True, mmap=True)
    assert found["wide"].shape == (1 << 31,)
    assert torch.equal(found["after"], torch.arange(5.0))
    assert anyrank.inspect(tmp_path / "w.pt").nbytes == (8 << 30) + 20


def test_values_that_are_not_finite_are_found() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values = torch.linspace(-3, 3, 100, dtype=dtype)
        assert all_finite(values)
        assert all_finite(values[:0])
        for wrong in (float("nan"), float("inf"), float("-inf")):
            values[37] = wrong
            assert not all_finite(values)


class Tied(nn.Module):
    """Three tensors, two of which have two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))
        self.emb = nn.Embedding(6, 4)
        self.head, self.proj, self.out = (nn.Linear(4, 6, bias=False) for _ in range(3))
        self.head.weight = self.emb.weight
        self.out.weight = self.table


def source_of(model: nn.Module, kind: str, folder: Path) -> Any:
    """The model itself, or what convert or others write of it."""
    if kind == "model":
        return model
    if kind == "state_dict":
        return dict(model.state_dict())
    if kind == "save_model":
        save_model(model, str(folder / "own.safetensors"))
        return folder / "own.safetensors"
    to: Any = "safetensors" if kind in ("file", "shards") else kind
    name = "w.safetensors" if kind == "file" else kind
    anyrank.convert(model, folder / name, to=to, shard_bytes=100 if kind == "shards" else None)
    return folder / name


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize(
    "kind", ["model", "state_dict", "file", "shards", "torch", "dcp", "save_model"]
)
def test_a_key_that_rename_turns_into_nothing_is_left_out(
    tmp_path: Path, kind: str, to: Any
) -> None:
    model = Tied()
    source = source_of(model, kind, tmp_path)
    values = model.state_dict()
    out = tmp_path / "out"

    def written(rename: dict[str, str]) -> dict[str, torch.Tensor]:
        report = anyrank.convert(source, out, to=to, rename=rename, overwrite=True)
        left = [name for name, new in rename.items() if not new]
        assert [*report.skipped] == [f"{name}: rename= leaves it out" for name in left]
        names = [tensor.name for tensor in anyrank.inspect(out).tensors]
        assert len(names) == len({*names})
        found = {name: torch.empty(6, 4) for name in names}
        module = nn.Module()
        module.__dict__["_parameters"].update(found)
        anyrank.load(module, out)
        return found

    both = {"head.weight", "emb.weight"}
    for one in both:  # either name of the tie
        found = written({one: ""})
        assert found.keys() >= {"proj.weight", *both} - {one}
        assert one not in found
        assert all(torch.equal(value, values[name]) for name, value in found.items())
    found = written({"head.weight": "", "emb.weight": "old", "proj.weight": "emb.weight"})
    assert found.keys() >= {"old", "emb.weight"}
    assert "head.weight" not in found
    assert torch.equal(found["emb.weight"], values["proj.weight"])
    found = written({"head": "output"})
    assert torch.equal(found["output.weight"], values["emb.weight"])
    assert "head.weight" not in found


def test_a_model_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="leaves out every tensor"):
        anyrank.convert(nn.Linear(2, 2), tmp_path / "out", rename=lambda _: "")
    assert not any(tmp_path.iterdir())


def test_text_beside_the_tensors_is_no_tensor_and_stays(tmp_path: Path) -> None:
    weights = {"emb.weight": torch.ones(2), "pt": torch.zeros(2)}
    texts = {"best": "emb.weight", "format": "pt", "note": "x"}
    save_file(weights, tmp_path / "w.safetensors", metadata=texts)
    anyrank.convert(tmp_path / "w.safetensors", tmp_path / "x.safetensors")
    # Ties of the result, and another text that looks like one after a rename.
    anyrank.convert(
        tmp_path / "w.safetensors", tmp_path / "y.safetensors", rename={"emb.weight": "a.best"}
    )
    for name in ("w", "x", "y"):
        found = anyrank.inspect(tmp_path / f"{name}.safetensors")
        assert [tensor.name.replace("a.best", "emb.weight") for tensor in found.tensors] == [
            *weights
        ]
        assert found.metadata == texts
    save_file({"a.best": torch.ones(2)}, tmp_path / "z.safetensors", metadata={"b.best": "c.best"})
    rename = {"a.best": "c.best"}
    anyrank.convert(tmp_path / "z.safetensors", tmp_path / "again.safetensors", rename=rename)
    found = anyrank.inspect(tmp_path / "again.safetensors")
    assert [tensor.name for tensor in found.tensors] == ["c.best"]
    assert found.metadata == {"format": "pt", "b.best": "c.best"}


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.extra = torch.zeros(2)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


@pytest.mark.parametrize("given", ["model", "file", "file by its model"])
def test_extra_state_that_is_a_tensor_is_written(given: str, tmp_path: Path) -> None:
    model = nn.Sequential(WithExtra())
    model[0].extra = torch.tensor([3.0, 4.0])  # type: ignore[assignment]
    torch.save(model.state_dict(), tmp_path / "w.pt")
    src = model if given == "model" else tmp_path / "w.pt"
    other = model if "by" in given else None
    report = anyrank.convert(src, tmp_path / "out.pt", to="torch", model=other)
    assert report.skipped == []
    again = nn.Sequential(WithExtra())
    again.load_state_dict(torch.load(tmp_path / "out.pt"))
    assert again[0].extra.tolist() == [3.0, 4.0]  # type: ignore[union-attr,operator]
