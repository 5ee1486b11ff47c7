"""`convert` one step beside the documented path: nothing is lost, and nothing wrong is written."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from tests.runs import save
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import anyrank
from anyrank import faults
from anyrank.errors import CheckpointError, LoadError
from anyrank.files.storage import storage_for, write_file
from anyrank.testing import PeakMemory

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")

# -- what is replaced -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["notes.txt", "optimizer.pt", "model.safetensors", "deep/x"])
@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_overwrite_renames_what_was_there(tmp_path: Path, to: Any, name: str) -> None:
    out = tmp_path / "out"
    anyrank.convert({"a": torch.ones(2)}, out, to=to)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("work of months")
    report = anyrank.convert({"b": torch.ones(2)}, out, overwrite=True)
    old = Path(report.replaced)
    assert old.match("out.replaced-*")
    assert f"the old result was renamed to {old}" in str(report)
    assert (old / name).read_text() == "work of months"
    assert anyrank.diff(out, {"b": torch.ones(2)})
    assert sorted(os.listdir(tmp_path)) == sorted(["out", old.name])
    again = anyrank.convert({"c": torch.ones(2)}, out, overwrite=True)
    assert anyrank.diff(again.replaced, {"b": torch.ones(2)})


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_a_folder_is_renamed_for_a_file(tmp_path: Path, to: Any) -> None:
    out = tmp_path / "x.safetensors"
    out.mkdir()
    (out / "notes").write_text("work of months")
    with pytest.raises(ValueError, match="already exists"):
        anyrank.convert({"b": torch.ones(2)}, out)
    report = anyrank.convert({"b": torch.ones(2)}, out, overwrite=True)
    assert out.is_file()
    assert (Path(report.replaced) / "notes").read_text() == "work of months"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["out.safetensors", "weights"])
def test_a_url_is_refused_and_its_neighbors_stay(name: str, overwrite: bool) -> None:
    bucket: Any = fsspec.filesystem("memory")  # other tests of this process write there too
    before = {"/bucket/dir/precious.bin": b"x", "/bucket/dir/weights/model.safetensors": b"y"}
    bucket.pipe(before)
    with pytest.raises(
        ValueError, match=r"writes only to local paths\. Pass a local path, and copy"
    ):
        anyrank.convert(
            {"w": torch.full((4,), 1e30)},
            f"memory://bucket/dir/{name}",
            dtype="float16",
            overwrite=overwrite,
        )
    assert {path: bucket.cat(path) for path in bucket.find("/bucket/dir")} == before


@pytest.mark.parametrize("name", ["out", "w.safetensors"])
def test_a_link_is_kept_and_what_it_points_to_renamed(tmp_path: Path, name: str) -> None:
    real, link = tmp_path / "real" / name, tmp_path / name
    anyrank.convert({"a": torch.ones(2)}, real)
    link.symlink_to(real)
    report = anyrank.convert({"b": torch.ones(2)}, link, overwrite=True)
    assert link.is_symlink()
    file = link / "model.safetensors" if link.is_dir() else link
    assert load_file(file).keys() == {"b"}
    assert sorted(os.listdir(tmp_path)) == sorted([name, "real"])
    assert anyrank.diff(report.replaced, {"a": torch.ones(2)})


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("source", ["model", "dict"])
def test_a_pipe_and_a_socket_stay_what_they_are(
    tmp_path: Path, source: str, to: Any, overwrite: bool
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(tmp_path / "socket"))
    names = sorted(os.listdir(tmp_path))

    def entries() -> dict[str, tuple[int, ...]]:
        found = {name: os.lstat(tmp_path / name) for name in sorted(os.listdir(tmp_path))}
        # Not the time of access, which following a link changes.
        return {name: (s.st_mode, s.st_ino, s.st_mtime_ns) for name, s in found.items()}

    before = entries()
    weights = nn.Linear(2, 2) if source == "model" else {"a": torch.ones(2)}
    for name in names:
        with pytest.raises(ValueError, match=f"{name}: is neither a file nor a folder"):
            anyrank.convert(weights, tmp_path / name, to=to, overwrite=overwrite)
    with pytest.raises(ValueError, match="is not a folder"):
        anyrank.convert(weights, tmp_path / "pipe" / "w", to=to, overwrite=overwrite)
    assert entries() == before


@pytest.mark.parametrize("name", ["out", "w.safetensors"])
def test_what_came_during_the_conversion_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out = tmp_path / name

    def come() -> None:
        monkeypatch.delitem(faults.armed, "convert.commit")
        anyrank.convert({"a": torch.ones(2)}, out)

    monkeypatch.setitem(faults.armed, "convert.commit", come)
    with pytest.raises(
        CheckpointError, match="was created by another process during the conversion"
    ):
        anyrank.convert({"b": torch.ones(2)}, out)
    assert anyrank.diff(out, {"a": torch.ones(2)})
    assert os.listdir(tmp_path) == [name]


def test_a_rename_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, renames = tmp_path / "out", list[int]()
    anyrank.convert({"a": torch.ones(2)}, out)

    def refuse() -> None:
        renames.append(1)
        if len(renames) == 2:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setitem(faults.armed, "file.rename", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        anyrank.convert({"b": torch.ones(2)}, out, overwrite=True)
    assert anyrank.diff(out, {"a": torch.ones(2)})
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("dst", ["file/out", "file/deep/out.safetensors"])
def test_a_place_in_a_file_is_refused_first(tmp_path: Path, dst: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is not a folder"):
        anyrank.convert({"a": torch.ones(2)}, tmp_path / dst)


# -- options and messages -------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp64", torch.float64)]
)
def test_short_names_of_dtypes(tmp_path: Path, name: str, dtype: torch.dtype, to: str) -> None:
    out = tmp_path / "out"
    anyrank.convert({"a": torch.ones(2)}, out, dtype=name, to=to)  # type: ignore[arg-type]
    assert anyrank.inspect(out).dtypes.keys() == {str(dtype).removeprefix("torch.")}


def test_a_cast_that_overflows_names_a_dtype_that_does_not(tmp_path: Path) -> None:
    wide = torch.tensor([1e300], dtype=torch.float64)
    for value, dtype, wider in (
        (torch.tensor([1e6]), "float16", "bfloat16"),
        (torch.tensor([3.4028e38]), "bfloat16", "float32"),
        (wide, "bfloat16", "float64"),
        (wide, "float32", "float64"),
    ):
        with pytest.raises(LoadError, match=f"Pass dtype='{wider}'"):
            anyrank.convert({"w": value}, tmp_path / "out", dtype=dtype)


def test_a_name_that_the_format_keeps_for_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="safetensors reserves this name"):
        anyrank.convert({"__metadata__": torch.ones(1)}, tmp_path / "out")


# -- checkpoints of several parts -----------------------------------------------------------------


def tied_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    net[1].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    "others", [{}, {"step": 3}, {"ema": {"0.bias": torch.ones(3)}}, {"optimizer": {"lr": "1"}}]
)
def test_the_table_of_a_dcp_folder_is_found_by_the_model(
    tmp_path: Path, others: dict[str, Any]
) -> None:
    model = tied_net()
    weights = dict(model.state_dict())
    dcp_save({"model": weights, **others}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    anyrank.convert(tmp_path / "dcp", tmp_path / "out", model=model)
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == weights.keys() - {"1.weight"}
    assert all(torch.equal(found[name], weights[name]) for name in found)
    if "ema" not in others:
        report = anyrank.convert(tmp_path / "dcp", tmp_path / "plain")
        assert load_file(tmp_path / "plain/model.safetensors").keys() == weights.keys()
        assert report.renamed["model.0.bias"] == "0.bias"


def test_a_table_that_shares_bytes_with_another_is_found_by_the_model(tmp_path: Path) -> None:
    model = tied_net()
    weights = dict(model.state_dict())
    flat = {f"{part}.{name}": t for part in ("ema", "net") for name, t in weights.items()}
    torch.save(flat, tmp_path / "w.pt")
    report = anyrank.convert(tmp_path / "w.pt", tmp_path / "out", model=model)
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == weights.keys() - {"1.weight"}
    assert all(torch.equal(found[name], weights[name]) for name in found)
    assert "ema.0.bias: of another table" in report.skipped


def test_a_flat_dcp_folder_keeps_a_module_named_model(tmp_path: Path) -> None:
    dcp_save({"model.a": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    anyrank.convert(tmp_path / "dcp", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"model.a"}


def test_an_unknown_prefix_is_named_with_the_way_out(tmp_path: Path) -> None:
    model = tied_net()
    odd = {f"policy.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(odd, tmp_path / "w.pt")
    with pytest.raises(LoadError, match=r"rename=\{'policy': ''\}"):
        anyrank.convert(tmp_path / "w.pt", tmp_path / "out", model=model)
    anyrank.convert(tmp_path / "w.pt", tmp_path / "out", model=model, rename={"policy": ""})


# -- damaged sources ------------------------------------------------------------------------------


def test_the_report_says_what_of_the_source_was_verified(tmp_path: Path) -> None:
    save(tmp_path / "run", anyrank.TrainState(nn.Linear(2, 2)))
    report = anyrank.convert(tmp_path / "run", tmp_path / "a")
    assert report.verified == "xxh3-64 checksums of 1 file of the source"
    plain = anyrank.convert(tmp_path / "a", tmp_path / "b")
    assert plain.verified == "only headers; use anyrank.verify to verify all bytes"
    live = anyrank.convert({"a": torch.ones(2)}, tmp_path / "c")
    assert live.verified == ""


def test_the_report_names_the_step_that_was_read(tmp_path: Path) -> None:
    state = anyrank.TrainState(nn.Linear(2, 2))
    save(tmp_path / "run", state)
    state.step += 1
    save(tmp_path / "run", state)
    older, newest = sorted(tmp_path.glob("run/step-*"))
    assert anyrank.convert(tmp_path / "run", tmp_path / "a").source == str(newest)
    (newest / "anyrank.json").unlink()
    assert anyrank.convert(tmp_path / "run", tmp_path / "b").source == str(older)


def test_memory_is_that_of_a_piece_and_not_of_a_tensor(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(16 << 20)}, tmp_path / "w.pt")  # 64 MiB
    with PeakMemory() as whole:
        held = torch.load(tmp_path / "w.pt")  # until the last sample
    del held
    with PeakMemory() as converted:
        anyrank.convert(tmp_path / "w.pt", tmp_path / "out", dtype="bfloat16")
    with PeakMemory() as verified:
        assert anyrank.verify(tmp_path / "w.pt", finite=True)
    peaks = [peak.peak_bytes / (1 << 20) for peak in (whole, converted, verified)]
    assert peaks[0] > 48  # else the next line could not fail
    assert max(peaks[1:]) < 32, peaks


def test_an_object_that_cannot_be_written_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(faults.armed, "file.write", refuse)
    with pytest.raises(CheckpointError, match="No space left"):
        write_file(storage_for("memory://bucket"), "memory://bucket/a", b"x")


@pytest.mark.parametrize("place", ["weights", "checksums"])
def test_a_flipped_bit_of_a_converted_dcp_folder_is_noticed(tmp_path: Path, place: str) -> None:
    wanted = {"a": torch.ones(100), "b": torch.ones(100_000)}
    report = anyrank.convert(wanted, tmp_path / "dcp", to="dcp")
    assert report.files == ["__0_0.distcp", "__0_0.xxh3", ".metadata"]
    assert anyrank.verify(tmp_path / "dcp").checked == ["structure", "xxh3-64 of 1 file"]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp_load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert anyrank.diff(loaded, wanted)
    file = tmp_path / "dcp" / ("__0_0.distcp" if place == "weights" else "__0_0.xxh3")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    verified = anyrank.verify(tmp_path / "dcp")
    assert len(verified.findings) == 1
    assert (place == "weights") == ("b: bytes " in str(verified.findings[0]))
    with pytest.raises(anyrank.AnyrankError, match="corrupt"):
        anyrank.convert(tmp_path / "dcp", tmp_path / "again")
    with pytest.raises(anyrank.LoadError, match="corrupt"):
        anyrank.load(Weights(), tmp_path / "dcp", verify=True)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(100))
        self.b = nn.Parameter(torch.zeros(100_000))


def test_verify_names_the_tensor_that_is_damaged(tmp_path: Path) -> None:
    shared = torch.ones(1000)
    torch.save({"a": torch.zeros(1000), "b": shared, "c": shared[10:20]}, tmp_path / "w.pt")
    data = bytearray((tmp_path / "w.pt").read_bytes())
    data[data.index(shared.numpy().tobytes()) + 2] ^= 4
    (tmp_path / "w.pt").write_bytes(data)
    (finding,) = anyrank.verify(tmp_path / "w.pt").findings
    assert finding.what.startswith("b, c: record data/1: CRC-32 is")
    assert finding.where == str(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("in_source", "in_model", "renames"),
    [("enc.", "", {"enc": ""}), ("", "enc.", [("^", "enc.")]), ("enc.", "dec.", None)],
)
def test_a_wrong_prefix_is_judged_as_by_load(
    in_source: str, in_model: str, renames: Any, tmp_path: Path
) -> None:
    layers = {"0": nn.Linear(2, 3), "1": nn.Linear(3, 1)}
    weights = nn.ModuleDict(layers).state_dict()
    torch.save({in_source + name: value for name, value in weights.items()}, tmp_path / "w.pt")
    model: nn.Module = nn.ModuleDict({"0": nn.Linear(2, 3), "1": nn.Linear(3, 1)})
    if in_model:
        model = nn.ModuleDict({in_model.removesuffix("."): model})
    with pytest.raises(anyrank.LoadError) as by_load:
        anyrank.load(model, tmp_path / "w.pt")
    with pytest.raises(anyrank.LoadError) as by_convert:
        anyrank.convert(tmp_path / "w.pt", tmp_path / "out", model=model)
    for text in (str(by_load.value), str(by_convert.value)):
        assert (f"rename={renames!r}" in text) is (renames is not None), text
