"""Files that are damaged, lie or attack: each ends in one clear error, with the model unchanged."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import pickletools
import socket
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import anyrank
import anyrank.faults
from anyrank.errors import UnsafeFile
from anyrank.sources.readers import pickles
from anyrank.sources.readers.pickles import check_bounds

WEIGHTS = {"0.weight": torch.randn(4, 4), "0.bias": torch.randn(4)}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


def refused(source: Any, kind: type[Exception], match: str, **options: Any) -> str:
    """Load into a real and into a meta model; both must stay as they were. Returns the message."""
    real = net()
    before = {k: v.clone() for k, v in real.state_dict().items()}
    with pytest.raises(kind, match=match) as caught:
        anyrank.load(real, source, **options)
    assert all(torch.equal(v, before[k]) for k, v in real.state_dict().items())
    with anyrank.meta():
        on_meta = net()
    with pytest.raises(kind, match=match):
        anyrank.load(on_meta, source, **options)
    assert all(p.is_meta for p in on_meta.parameters())
    return str(caught.value)


def header(entries: Any, payload: int = 80) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(payload)


def entry(start: int, stop: int, shape: list[int], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOOD = {"0.weight": entry(0, 64, [4, 4]), "0.bias": entry(64, 80, [4])}

NOT_ALLOWED = "its header breaks the safetensors format"
HEADERS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "length beyond the file": (struct.pack("<Q", 10**6) + b"{}", "claims 1000000 bytes"),
    "length of 1 GB": (struct.pack("<Q", 10**9) + b"{}", "claims 1000000000 bytes"),
    "length of 2^63": (struct.pack("<Q", 2**63) + b"{}", "claims 9223372036854775808"),
    "not JSON": (header(b"{'a': 1}"), NOT_ALLOWED),
    "JSON of great depth": (header(b"[" * 100_000), NOT_ALLOWED),
    "a list": (header([1]), NOT_ALLOWED),
    "a key twice": (header(b'{"a": 1, "a": 2}'), NOT_ALLOWED),
    "unknown dtype": (header({"a": entry(0, 80, [20], "F31")}), "F31"),
    "dtype of another type": (header({"a": entry(0, 80, [20], 3)}), "unknown dtype 3"),
    "negative size": (header({"a": entry(0, 80, [-20])}), NOT_ALLOWED),
    "sizes that overflow": (header({"a": entry(0, 80, [2**62, 8])}), NOT_ALLOWED),
    "no offsets": (header({"a": {"dtype": "F32", "shape": [20]}}), NOT_ALLOWED),
    "overlap": (header({**GOOD, "c": entry(60, 76, [4])}), NOT_ALLOWED),
    "hole": (
        header({"0.weight": entry(0, 64, [4, 4]), "0.bias": entry(68, 84, [4])}, 84),
        NOT_ALLOWED,
    ),
    "out of range": (header({"a": entry(0, 400, [100])}), "truncated"),
    "backwards": (header({"a": entry(80, 0, [20])}), NOT_ALLOWED),
    "a number for the offsets of a part": (
        header({**GOOD, "__metadata__": {"DCP_SHARDING_INFO": '{"0.bias": {"saved_offsets": 5}}'}}),
        NOT_ALLOWED,
    ),
    "trailing bytes": (header(GOOD, 100), "appended"),
    **{
        f"{text} for ties": (header({"__metadata__": {"anyrank.ties": text}} | GOOD), NOT_ALLOWED)
        for text in ("[", "5", "[[1]]")
    },
}


@pytest.mark.parametrize("name", HEADERS)
def test_safetensors_headers_that_lie(tmp_path: Path, name: str) -> None:
    data, match = HEADERS[name]
    path = tmp_path / "w.safetensors"
    path.write_bytes(data)
    message = refused(path, anyrank.UnsafeFile, match)
    assert str(path) in message


@pytest.mark.parametrize("keep", [0, 7, 20, 150, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "w.safetensors"
    save_file(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:keep])
    refused(path, anyrank.UnsafeFile, "w.safetensors")


def shards(folder: Path) -> Path:
    save_file({"0.weight": WEIGHTS["0.weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"0.bias": WEIGHTS["0.bias"]}, folder / "model-00002-of-00002.safetensors")
    index = {
        "0.weight": "model-00001-of-00002.safetensors",
        "0.bias": "model-00002-of-00002.safetensors",
    }
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    return path


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(
        tmp_path, anyrank.LoadError, r"names model-00002-of-00002.safetensors .*the file is missing"
    )


def test_an_index_that_names_a_missing_key(tmp_path: Path) -> None:
    path = shards(tmp_path)
    index = json.loads(path.read_text())
    index["weight_map"]["0.extra"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    refused(tmp_path, anyrank.LoadError, r"lists 0.extra in .*, which does not contain it")


@pytest.mark.parametrize("name", ["../w.safetensors", "/etc/passwd", "a/../../w.safetensors"])
def test_an_index_that_climbs_out_of_its_folder(tmp_path: Path, name: str) -> None:
    path = shards(tmp_path)
    path.write_text(json.dumps({"weight_map": {"0.weight": name}}))
    refused(tmp_path, anyrank.LoadError, "outside the folder")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    shards(tmp_path).write_text(text)
    refused(tmp_path, anyrank.LoadError, "weight_map")


def test_a_set_of_shards_that_is_not_whole(tmp_path: Path) -> None:
    shards(tmp_path).unlink()
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    refused(tmp_path, anyrank.LoadError, "1 of 2 shards are missing")


def save_dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is the point
        dcp.save(WEIGHTS, checkpoint_id=folder, no_dist=True)


class Attack:
    """Leaves a mark when it is unpickled by something careless."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def attack_zip(path: Path, mark: Path) -> None:
    torch.save({**WEIGHTS, "extra": Attack(mark)}, path)


def attack_legacy(path: Path, mark: Path) -> None:
    data = {**WEIGHTS, "extra": Attack(mark)}
    torch.save(data, path, _use_new_zipfile_serialization=False)


def attack_plain(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps(Attack(mark)))


SAMPLE = {"a": [1, 2.5, "text", b"bytes", (1 << 70, None)], "b" * 300: bytearray(9), 3: {4, 5}}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_takes_no_more_memory_than_its_bytes_account_for(protocol: int) -> None:
    """Whatever bit is flipped: the unpickler would take gigabytes for a number alone."""
    whole = pickle.dumps([SAMPLE] + [{"n": [n]} for n in range(300)], protocol)
    check_bounds(whole, "whole")
    for number in (1 << 20, 1 << 30, (1 << 32) - 1):
        place = b"\x80\x02]r" + number.to_bytes(4, "little") + b"."
        with pytest.raises(
            UnsafeFile, match=f"for {number} objects or bytes, but has only 9 bytes"
        ):
            pickles.loads(place, "file")
        with pytest.raises(UnsafeFile, match=f"for {number << 20} objects or bytes"):
            pickles.loads(b"\x80\x05\x96" + (number << 20).to_bytes(8, "little") + b".", "file")
    check_bounds(b"\x80\x04\x8e" + b"\xff" * 8, "cut")  # bytes beyond any: the unpickler's to say
    for position in range(0, len(whole), 61):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            with contextlib.suppress(UnsafeFile):
                check_bounds(bytes(flipped), "flipped")
                assert most_asked_for(bytes(flipped)) <= max(len(whole), 1 << 16)


def most_asked_for(data: bytes) -> int:
    """The largest place or array, as Python's own reader of pickles has them, up to an error."""
    most = 0
    with contextlib.suppress(ValueError, OverflowError, DeprecationWarning):
        for opcode, value, _ in pickletools.genops(data):
            if opcode.name == "LONG_BINPUT":
                most = max(most, value)
            elif opcode.name == "BYTEARRAY8":
                most = max(most, len(value))
    return most


def test_an_index_of_dcp_whose_entries_are_nothing_it_knows(tmp_path: Path) -> None:
    save_dcp(tmp_path)
    metadata = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(
        metadata.replace(b"TensorStorageMetadata", b"UensorStorageMetadata")
    )
    report = anyrank.verify(tmp_path)
    assert "the entry of 0.weight is a UensorStorageMetadata, neither a tensor nor bytes" in str(
        report
    )


@pytest.mark.parametrize("make", [attack_zip, attack_legacy, attack_plain])
@pytest.mark.parametrize("ending", ["pt", "ckpt", "bin", "unknown"])
def test_a_pickle_that_would_run_code(
    tmp_path: Path, make: Callable[[Path, Path], None], ending: str
) -> None:
    path, mark = tmp_path / f"w.{ending}", tmp_path / "mark"
    make(path, mark)
    refused(path, anyrank.UnsafeFile, r"names (posix|os)\.system, which could run code")
    assert not mark.exists()


def test_dcp_metadata_that_would_run_code(tmp_path: Path) -> None:
    folder, mark = tmp_path / "c", tmp_path / "mark"
    save_dcp(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(mark)))
    refused(folder, anyrank.UnsafeFile, r"system, which could run code")
    assert not mark.exists()


def test_a_dcp_file_that_is_missing_or_short(tmp_path: Path) -> None:
    save_dcp(tmp_path)
    data = next(tmp_path.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-40])
    refused(tmp_path, anyrank.LoadError, "truncated")
    data.unlink()
    refused(tmp_path, anyrank.LoadError, "is missing")


def test_a_truncated_zip(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pt")
    data = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(data[:-100])
    refused(tmp_path / "w.pt", anyrank.UnsafeFile, "truncated or corrupt zip")


def test_a_truncated_legacy_file(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    data = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(data[:-10])
    refused(tmp_path / "w.pt", anyrank.UnsafeFile, "truncated")


def test_a_zip_of_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("a/readme.txt", "hello")
    refused(tmp_path / "w.pt", anyrank.UnsafeFile, "is a zip archive, but not a torch.save file")


def test_a_zip_with_a_record_twice(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt", "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile notices it too
        archive.writestr("w/data/0", bytes(64))
    refused(tmp_path / "w.pt", anyrank.UnsafeFile, "has the record data/0 twice")


def test_a_compressed_zip(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pt")
    with (
        zipfile.ZipFile(tmp_path / "w.pt") as old,
        zipfile.ZipFile(tmp_path / "v.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    refused(tmp_path / "v.pt", anyrank.UnsafeFile, "compressed")


def test_a_view_that_reaches_outside_its_storage(tmp_path: Path) -> None:
    torch.save({"0.weight": torch.zeros(4, 4), "0.bias": torch.zeros(4)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as old, zipfile.ZipFile(tmp_path / "v.pt", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):
                data = data.replace(b"K\x04K\x04\x86", b"K\x07K\x07\x86")
            new.writestr(name, data)
    refused(tmp_path / "v.pt", anyrank.UnsafeFile, "exceeds its storage of 64 bytes")


@pytest.mark.parametrize("source", ["/nowhere/at/all", "nowhere.safetensors"])
def test_a_path_that_does_not_exist(source: str) -> None:
    refused(source, anyrank.LoadError, "does not exist")


def test_an_empty_folder(tmp_path: Path) -> None:
    refused(tmp_path, anyrank.LoadError, "contains no weights. The folder contains nothing")


def test_two_sets_of_weights_in_one_folder(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "a.safetensors")
    save_file(WEIGHTS, tmp_path / "b.safetensors")
    refused(tmp_path, anyrank.LoadError, "several sets of weights")


def test_the_same_key_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file(WEIGHTS, tmp_path / f"{name}.safetensors")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    refused(files, anyrank.LoadError, r"is both in .*a\.safetensors and in .*b\.safetensors")


def test_an_integer_and_a_complex_source_are_not_cast_to_floats() -> None:
    for kind in (torch.int32, torch.complex64):
        source = {"0.weight": torch.zeros(4, 4, dtype=kind), "0.bias": torch.zeros(4)}
        refused(source, anyrank.LoadError, rf"the source has {kind} .* allow it with cast='any'")


def test_a_file_that_changes_between_plan_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    save_file(WEIGHTS, path)

    def change() -> None:
        os.utime(path)

    monkeypatch.setitem(anyrank.faults.armed, "load.open", change)
    refused(path, anyrank.LoadError, "changed after its header was read")


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", ".metadata"]
)
def test_a_folder_with_what_is_no_file_under_a_files_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    path = tmp_path / "folder" / name
    path.parent.mkdir()
    monkeypatch.chdir(path.parent)  # a socket's path is short
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as opened:
            opened.bind(name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    folder = str(path.parent)
    refused(folder, anyrank.LoadError, "is not a regular file")
    for call in (anyrank.inspect, lambda source: anyrank.convert(source, str(tmp_path / "out"))):
        with pytest.raises(anyrank.LoadError, match="is not a regular file"):
            call(folder)
    assert not anyrank.verify(folder)


def test_tensors_that_hold_no_bytes() -> None:
    on_meta = {**WEIGHTS, "0.bias": torch.zeros(4, device="meta")}
    refused(on_meta, anyrank.LoadError, "0.bias: is on meta")
    sparse = {**WEIGHTS, "0.weight": torch.eye(4).to_sparse()}
    refused(sparse, anyrank.LoadError, "a torch.sparse_coo tensor")


def test_integers_are_widened_only() -> None:
    for have, want in (
        (torch.int64, torch.int8),
        (torch.int8, torch.uint8),
        (torch.int8, torch.bool),
    ):
        module = nn.Module()
        module.register_buffer("n", torch.zeros(1, dtype=want))
        with pytest.raises(anyrank.LoadError, match="cast='any'"):
            anyrank.load(module, {"n": torch.tensor([300]).to(have)})
    wide = nn.Module()
    wide.register_buffer("n", torch.zeros(1, dtype=torch.int64))
    report = anyrank.load(wide, {"n": torch.tensor([-3], dtype=torch.int8)})
    assert wide.n.item() == -3
    assert report.cast == {"n": "int8 -> int64"}


def test_a_table_inside_a_table() -> None:
    refused({"state_dict": WEIGHTS, "epoch": 3}, ValueError, r"source\['state_dict'\]")
    refused({"epoch": 3}, ValueError, "the dict has no tensors, only epoch")


def test_a_checkpoint_whose_weights_have_an_unknown_name(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "ema": WEIGHTS}, tmp_path / "w.pt")
    refused(tmp_path / "w.pt", anyrank.LoadError, r"2 of them match with rename=\{'ema': ''\}")


@pytest.mark.parametrize("kind", [torch.int16, torch.uint16])
def test_bits_of_bfloat16_are_not_taken_for_numbers(kind: torch.dtype) -> None:
    values = torch.ones(2, 2, dtype=torch.bfloat16).view(kind)
    with pytest.raises(anyrank.LoadError, match=r"view\(torch\.bfloat16\)"):
        anyrank.load(nn.Linear(2, 2), {"weight": values, "bias": torch.ones(2)})


def test_a_class_of_python_in_a_configuration_is_plain_data(tmp_path: Path) -> None:
    config = {"type": int, "rest": ..., "kinds": (str, tuple, object)}
    torch.save({"state_dict": WEIGHTS, "config": config}, tmp_path / "w.pt")
    assert anyrank.load(net(), tmp_path / "w.pt").tensors == 2


def test_a_pickle_that_torch_did_not_save_is_named(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(pickle.dumps(WEIGHTS))
    refused(
        tmp_path / "w.pt", anyrank.UnsafeFile, "written with pickle.dump.*save it again with torch"
    )


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ((3, WEIGHTS), r"2 of them match with rename=\{'1': ''\}"),
        ([WEIGHTS], r"2 of them match with rename=\{'0': ''\}"),
        ((3, 4), "contains a tuple.*save the dict of tensors"),
        (None, "contains a NoneType.*pass the file with the weights"),
        ("weights", "contains a str.*pass the file with the weights"),
    ],
)
def test_what_is_no_dict_has_a_way_out(value: object, wanted: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "w.pt")
    refused(tmp_path / "w.pt", anyrank.LoadError, wanted)


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_beside_a_module_are_named(is_zip: bool, tmp_path: Path) -> None:
    state = {"state_dict": WEIGHTS, "criterion": nn.CrossEntropyLoss()}
    torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)
    wanted = r"names \S*CrossEntropyLoss, which.*weights_only=False\)\['state_dict'\], as safet"
    refused(tmp_path / "w.pt", anyrank.UnsafeFile, wanted)


def test_the_index_of_a_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "b"}}))
    refused(path, anyrank.LoadError, "index of a folder of shards.*pass the folder")


@pytest.mark.parametrize(("first", "ending"), [(0, ""), (1, ".fp16"), (0, ".fp16")])
def test_shards_without_an_index_are_one_set(first: int, ending: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for number, (key, value) in enumerate(model.state_dict().items(), first):
        save_file({key: value}, tmp_path / f"model-0000{number}-of-00002{ending}.safetensors")
    assert anyrank.load(nn.Linear(2, 2), tmp_path).tensors == 2


@pytest.mark.parametrize("kind", ["itself", "a list", "doubling"])
def test_values_that_hold_one_another_without_end_are_refused(kind: str, tmp_path: Path) -> None:
    held: Any = {"weight": torch.ones(2)}
    if kind == "doubling":
        for _ in range(100):
            held = {"a": held, "b": held}
    else:
        held["again"] = held if kind == "itself" else [[held]]
    path = tmp_path / "held.pt"
    torch.save({"model": net().state_dict(), "other": held}, path)
    refused(path, UnsafeFile, "are nested more than")
    for call in (anyrank.inspect, lambda p: anyrank.convert(p, tmp_path / "out.safetensors")):
        with pytest.raises(UnsafeFile, match="are nested more than"):
            call(path)
