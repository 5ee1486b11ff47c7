"""`verify` finds what is damaged, all of it; `diff` finds what differs, and nothing else."""

from __future__ import annotations

import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from tests.runs import save
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import anyrank
from anyrank.errors import LoadError


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def shards(folder: Path, count: int = 3) -> list[Path]:
    folder.mkdir()
    anyrank.convert(
        {f"{n}.weight": torch.full((50,), float(n)) for n in range(count)}, folder, shard_bytes=1
    )
    return sorted(folder.glob("*.safetensors"))


# -- verify ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_whole_sources_are_fine(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2, 3), "b": torch.tensor(1), "e": torch.empty(0)}
    torch.save(weights, tmp_path / "w.pt")
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(weights, tmp_path / "w.safetensors")
    dcp_save(dict(weights), checkpoint_id=tmp_path / "dcp", no_dist=True)
    shards(tmp_path / "hf")
    for name in ("w.pt", "old.pt", "w.safetensors", "dcp", "hf"):
        report = anyrank.verify(tmp_path / name, finite=True)
        assert report, report
        assert report.tensors == 3
    assert anyrank.verify(weights)
    assert any("CRC-32" in line for line in anyrank.verify(tmp_path / "w.pt").checked)
    assert any("no checksums" in line for line in anyrank.verify(tmp_path / "hf").checked)


def test_every_damaged_shard_is_found(tmp_path: Path) -> None:
    first, second, third = shards(tmp_path / "hf")
    first.write_bytes(first.read_bytes()[:-8])
    third.write_bytes(third.read_bytes() + b"x")
    report = anyrank.verify(tmp_path / "hf")
    assert not report
    assert {finding.where for finding in report.findings} == {str(first), str(third)}
    second.unlink()
    report = anyrank.verify(tmp_path / "hf")
    assert any("is missing" in finding.what for finding in report.findings)
    assert len(report.findings) == 3
    assert json.loads(report.to_json())["findings"][0]["what"]


@pytest.mark.parametrize("offsets", [[[0, 8], [4, 12]], [[0, 8], [16, 24]], [[0, 8], [8, 1000]]])
def test_offsets_that_lie_are_found(tmp_path: Path, offsets: list[list[int]]) -> None:
    entries = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": pair}
        for name, pair in zip("ab", offsets, strict=True)
    }
    header = json.dumps(entries).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(24)
    (tmp_path / "w.safetensors").write_bytes(data)
    assert not anyrank.verify(tmp_path / "w.safetensors")


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_whatever_a_flipped_bit_breaks_in_a_parser_is_told_as_damage(
    tmp_path: Path, to: Literal["torch", "dcp"]
) -> None:
    place = tmp_path / ("w.pt" if to == "torch" else "w")
    anyrank.convert({"a.w": torch.randn(7, 5), "b": torch.randn(11).bfloat16()}, place, to=to)
    files = [place] if place.is_file() else [*place.iterdir()]
    for file in files:
        whole = file.read_bytes()
        for position in range(0, len(whole), 3):
            flip(file, position, position % 8)
            with contextlib.suppress(anyrank.AnyrankError):  # any other exception fails the test
                anyrank.verify(place)
            file.write_bytes(whole)


def test_a_torch_file_without_crcs_is_no_finding(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(1000)}, tmp_path / "w.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert anyrank.verify(tmp_path / "w.pt")


def test_nan_and_infinities_are_found_when_asked(tmp_path: Path) -> None:
    fp8 = torch.tensor([1.0, math.nan]).to(torch.float8_e4m3fn)
    weights = {
        "a": torch.tensor([1.0, math.nan, math.inf]),
        "b": fp8,
        "c": torch.ones(2),
        "d": torch.tensor([complex(0, math.inf)]),
        "e": torch.tensor([1, 2]),
    }
    torch.save(weights, tmp_path / "w.pt")
    assert anyrank.verify(tmp_path / "w.pt")
    found = anyrank.verify(tmp_path / "w.pt", finite=True).findings
    assert [(each.where, each.what) for each in found] == [
        ("a", "2 of 3 values are NaN or infinite"),
        ("b", "1 of 2 values are NaN or infinite"),
        ("d", "1 of 1 values are NaN or infinite"),
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [("step-7", "has no committed step of a run"), ("step-00000007", "it is corrupt")],
)
def test_a_run_without_a_whole_step_is_not_fine(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).mkdir()
    report = anyrank.verify(tmp_path)
    assert not report
    assert [said in str(finding) for finding in report.findings] == [True]


def test_every_step_of_a_run_is_verified(tmp_path: Path) -> None:
    state = anyrank.TrainState(nn.Linear(64, 64))
    for _ in range(3):
        state.step += 1
        save(tmp_path / "run", state, keep=5)
    report = anyrank.verify(tmp_path / "run", finite=True)
    assert report
    assert sorted(report.steps) == [1, 2, 3]
    (data,) = tmp_path.glob("run/step-00000002/*.distcp")
    flip(data, data.stat().st_size // 2)
    (tmp_path / "run/step-00000003/tensors.json").write_text("{}")
    found = anyrank.verify(tmp_path / "run").findings
    assert {Path(each.where).parent.name for each in found} == {"step-00000002", "step-00000003"}
    assert not anyrank.verify(tmp_path / "run/step-00000002")
    assert anyrank.verify(tmp_path / "run/step-00000001")
    (tmp_path / "run/step-00000001/anyrank.json").unlink()
    assert any("it is corrupt" in e.what for e in anyrank.verify(tmp_path / "run").findings)


def test_a_step_under_the_name_of_another_is_found(tmp_path: Path) -> None:
    state = anyrank.TrainState(nn.Linear(2, 2))
    for _ in range(2):
        state.step += 1
        save(tmp_path / "run", state, keep=5)
    (tmp_path / "run/step-00000002").rename(tmp_path / "run/step-00000004")
    (found,) = anyrank.verify(tmp_path / "run").findings
    assert "belongs to step 2. Rename the folder to step-00000002" in found.what
    with pytest.raises(LoadError, match="belongs to step 2"):
        anyrank.load(nn.Linear(2, 2), tmp_path / "run")


def test_a_run_whose_steps_were_set_aside_names_them(tmp_path: Path) -> None:
    state = anyrank.TrainState(nn.Linear(2, 2))
    state.step = 1
    save(tmp_path / "run", state)
    (tmp_path / "run/step-00000001").rename(tmp_path / "run/.aside-damaged-step-00000001")
    said = ".aside-damaged-step-00000001 was set aside. anyrank.verify()"
    (finding,) = anyrank.verify(tmp_path / "run").findings
    assert said in finding.what
    for look in (
        lambda: anyrank.load(nn.Linear(2, 2), tmp_path / "run"),
        lambda: anyrank.diff(tmp_path / "run", tmp_path / "run"),
        lambda: anyrank.convert(tmp_path / "run", tmp_path / "out"),
    ):
        with pytest.raises(LoadError, match=re.escape(said)):
            look()


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        anyrank.verify(tmp_path / "none")


# -- diff -----------------------------------------------------------------------------------------


def test_the_same_weights_in_two_formats_are_equal(tmp_path: Path) -> None:
    weights = {
        "a": torch.randn(700, 900),
        "n": torch.tensor([math.nan, 1.0]),
        "i": torch.arange(5),
        "s": torch.tensor(2.0),
        "e": torch.empty(0, 3),
        "f": torch.randn(4).to(torch.float8_e5m2),
        "b": torch.tensor([True]),
        "c": torch.randn(3, dtype=torch.complex64),
    }
    torch.save(weights, tmp_path / "w.pt")
    save_file(weights, tmp_path / "w.safetensors")
    report = anyrank.diff(tmp_path / "w.pt", tmp_path / "w.safetensors")
    assert report, report
    assert report.equal == len(weights)


def test_everything_that_differs_is_named(tmp_path: Path) -> None:
    large = torch.randn(700, 900)
    changed = large.clone()
    changed[699, 899] += 2.0
    changed[0, 0] -= 0.5
    a = {
        "same": torch.ones(3),
        "large": large,
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(3),
        "lossy": torch.full((2,), 1.001),
        "old.name": torch.arange(6.0),
        "gone": torch.zeros(2),
        "ints": torch.tensor([2**62, 5]),
        "flag": torch.tensor([True, False]),
        "nan": torch.tensor([1.0, 2.0]),
        "zero": torch.tensor([0.0]),
    }
    b = {
        "same": torch.ones(3),
        "large": changed,
        "shape": torch.ones(3, 2),
        "dtype": torch.ones(3, dtype=torch.bfloat16),
        "lossy": torch.full((2,), 1.001, dtype=torch.bfloat16),
        "new.name": torch.arange(6.0),
        "come": torch.ones(2),
        "ints": torch.tensor([-(2**62), 5]),
        "flag": torch.tensor([False, False]),
        "nan": torch.tensor([1.0, math.nan]),
        "zero": torch.tensor([-0.0]),
    }
    report = anyrank.diff(a, b)
    assert not report
    assert report.equal == 1
    assert report.only_a == ["old.name", "gone"]
    assert report.only_b == ["new.name", "come"]
    assert report.shapes == {"shape": ((2, 3), (3, 2))}
    assert report.dtypes["dtype"] == ("float32", "bfloat16")
    assert "dtype" not in report.values
    assert report.values["large"].largest == pytest.approx(2.0)
    assert (report.values["large"].elements, report.values["large"].of) == (2, 630_000)
    assert report.values["ints"].largest == float(2**63)
    assert report.values["flag"].largest == 1.0
    assert math.isnan(report.values["nan"].largest)
    assert (report.values["zero"].largest, report.values["zero"].elements) == (0.0, 1)
    assert report.values["lossy"].elements == 2
    assert next(iter(report.values)) == "nan"
    assert json.loads(report.to_json())["values"]["nan"]["largest"] is None


@pytest.mark.parametrize("kind", ["dict", "file", "torch", "dcp"])
def test_a_second_name_of_a_tensor_that_both_have_is_no_difference(
    tmp_path: Path, kind: str
) -> None:
    table = torch.randn(4, 2)
    tied = {"emb.weight": table, "head.weight": table, "b": torch.ones(2)}
    source: Any = tied
    if kind != "dict":
        to: Any = "safetensors" if kind == "file" else kind
        source = tmp_path / ("w.safetensors" if kind == "file" else kind)
        anyrank.convert(tied, source, to=to)
    for kept, other in (("emb.weight", "head.weight"), ("head.weight", "emb.weight")):
        alone = {kept: table, "b": torch.ones(2)}
        for report in (anyrank.diff(source, alone), anyrank.diff(alone, source)):
            assert report, report
            assert (report.tied, report.equal) == ({other: kept}, 2)
            assert f"{other} = {kept}, only in one of the two" in str(report)
    assert anyrank.diff(source, alone, ignore="*.weight")
    changed = anyrank.diff(source, {"emb.weight": table + 1, "b": torch.ones(2)})
    assert [*changed.values] == ["emb.weight"]
    apart = tied | {"head.weight": table.clone()}  # a tensor more, whatever its values
    assert anyrank.diff(apart, {"emb.weight": table, "b": tied["b"]}).only_a == ["head.weight"]
    assert anyrank.diff(source, {"b": tied["b"]}).only_a == ["emb.weight", "head.weight"]
    assert anyrank.diff(source, apart)


def test_two_runs_are_compared_by_steps(tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        state = anyrank.TrainState(model, optimizer)
        for step in (1, 2, 3):
            batch = torch.ones(1, 4) * (1.5 if (name, step) == ("b", 2) else 1.0)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.step = step
            save(tmp_path / name, state, keep=5)
    report = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert (report.step, report.steps_equal, report.steps_only) == (2, [1], [])
    assert any(name.startswith("optimizer.") for name in report.values)
    assert anyrank.diff(tmp_path / "a", tmp_path / "a")
    one = anyrank.diff(tmp_path / "a/step-00000001", tmp_path / "b/step-00000001")
    assert one
    weights = anyrank.diff(tmp_path / "a/step-00000003", model.state_dict())
    assert not weights.only_a
    assert weights.values.keys() == {"weight"}


def test_a_tensor_that_is_not_dense_is_neither_equal_nor_fine_nor_left_out(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse(), "b": torch.ones(2)}, tmp_path / "sparse.pt")
    torch.save({"b": torch.ones(2)}, tmp_path / "lack.pt")
    for one, two in (("sparse", "lack"), ("lack", "sparse"), ("sparse", "sparse")):
        found = anyrank.diff(tmp_path / f"{one}.pt", tmp_path / f"{two}.pt")
        assert (bool(found), found.equal, [*found.unreadable]) == (False, 1, ["a"])
        assert "a: a sparse tensor" in str(found)
    (finding,) = anyrank.verify(tmp_path / "sparse.pt").findings
    assert "a: is a sparse tensor" in finding.what
    with pytest.raises(anyrank.LoadError, match=r"a: is a sparse tensor: save its \.to_dense\(\)"):
        anyrank.convert(tmp_path / "sparse.pt", tmp_path / "out.safetensors")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_a_wrapped_models_file_equals_what_convert_makes_of_it(tmp_path: Path, prefix: str) -> None:
    state = {f"{prefix}{key}": tensor for key, tensor in nn.Linear(2, 2).state_dict().items()}
    torch.save({**state, "n_averaged": torch.tensor(3)}, tmp_path / "w.pt")
    torch.save(state, tmp_path / "plain.pt")
    for name in ("w.pt", "plain.pt") if prefix.startswith("module.") else ("plain.pt",):
        anyrank.convert(tmp_path / name, tmp_path / f"{name} converted")
        report = anyrank.diff(tmp_path / name, tmp_path / f"{name} converted")
        assert report
        assert report.equal == 2
    other = {**state, f"{prefix}bias": torch.ones(2)}
    assert [*anyrank.diff(other, tmp_path / "plain.pt converted").values] == ["bias"]
    # Names that both have stay as they are.
    assert [*anyrank.diff(other, tmp_path / "plain.pt").values] == [f"{prefix}bias"]
    only = anyrank.diff(other, {"x": torch.ones(2)})
    assert only.only_a == [*other]
