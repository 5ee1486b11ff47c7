"""Files that people take for weights: the error says what each is, wherever it is given."""

from __future__ import annotations

import gzip
import io
import json
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save, save_file
from torch import nn

import anyrank

STATE = nn.Linear(2, 2).state_dict()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698672\n"


def packed(write: Callable[[io.BytesIO], object]) -> bytes:
    memory = io.BytesIO()
    write(memory)
    return memory.getvalue()


def zipped(memory: io.BytesIO) -> None:
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("folder/readme.txt", "text")


def scripted(memory: io.BytesIO) -> None:
    """The records of an archive of torch.jit.save."""
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("data.pkl", "code/__torch__/net.py", "constants.pkl", "data/0"):
            archive.writestr(f"w/{name}", bytes(16))


ARRAYS = {key: tensor.numpy() for key, tensor in STATE.items()}
KINDS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "a pointer": (POINTER, "Git LFS pointer"),
    "a page": (b"\n<!DOCTYPE html><html>Access denied</html>", "web page"),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "web page"),
    "json": (b'{"error":"Access to model X is restricted"}', "has an unknown format.*Access to"),
    "text": (b"Not Found, and some more words", "has an unknown format.*Not Found"),
    "an index": (b'{"metadata": {}, "weight_map": {"a": "b.safetensors"}}', "is the index"),
    "zeros": (bytes(4096), "starts with zeros"),
    "gguf": (b"GGUF\3\0\0\0" + bytes(64), "GGUF"),
    "npz": (packed(lambda m: np.savez(m, **ARRAYS)), "zip archive"),
    "gzip": (gzip.compress(b"some words"), "has an unknown format"),
    "zip": (packed(zipped), "zip archive"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(64), "has an unknown format.*PNG"),
    "torchscript": (packed(scripted), "TorchScript"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ending", [".safetensors", ".bin", ".pt", ".ckpt", ".any"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_says_what_a_file_is(kind: str, ending: str, tmp_path: Path) -> None:
    content, words = KINDS[kind]
    path = tmp_path / f"w{ending}"
    path.write_bytes(content)
    net = nn.Linear(2, 2)
    calls: list[Callable[[], object]] = [
        lambda: anyrank.load(net, path),
        lambda: anyrank.plan(net, path),
        lambda: anyrank.inspect(path),
        lambda: anyrank.convert(path, tmp_path / "out"),
    ]
    if ending in (".pt", ".ckpt"):
        state = anyrank.TrainState(net)
        calls.append(lambda: anyrank.Checkpoints(tmp_path / "run", state).resume(path))
    for call in calls:
        with pytest.raises(anyrank.AnyrankError, match=rf"(?s)w{ending}: (is .*)?{words}"):
            call()
    assert words.split(".*")[0] in str(anyrank.verify(path).findings[0])


def test_weights_under_the_ending_of_another_format_are_known(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(save(STATE))
    with pytest.raises(anyrank.UnsafeFile, match="safetensors file by its first bytes"):
        anyrank.load(nn.Linear(2, 2), tmp_path / "a.bin")
    torch.save(STATE, tmp_path / "b.safetensors")
    with pytest.raises(anyrank.UnsafeFile, match=r"torch\.save file by its first bytes"):
        anyrank.load(nn.Linear(2, 2), tmp_path / "b.safetensors")


def test_arrays_in_a_torch_file_are_named(tmp_path: Path) -> None:
    torch.save({"model": ARRAYS}, tmp_path / "w.pt")
    with pytest.raises(anyrank.LoadError, match=r"NumPy arrays \(model\.weight, model\.bias\)"):
        anyrank.load(nn.Linear(2, 2), tmp_path / "w.pt")


def test_parts_of_a_tensor_parallel_model_are_named(tmp_path: Path) -> None:
    paths = [tmp_path / f"consolidated.0{rank}.pth" for rank in (0, 1)]
    for path in paths:
        torch.save(STATE, path)
    for source in (tmp_path, paths):
        with pytest.raises(anyrank.LoadError, match="one shard of a tensor-parallel model"):
            anyrank.load(nn.Linear(2, 2), source)


def test_parts_of_ranks_in_safetensors_name_their_reader(tmp_path: Path) -> None:
    paths = [tmp_path / f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)]
    for path, start in zip(paths, (0, 2), strict=True):
        metadata = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [start, 0]}})}
        save_file({"w": torch.ones(2, 4)}, path, metadata=metadata)
    for source in (tmp_path, paths, paths[1]):
        with pytest.raises(anyrank.LoadError, match=r"one rank's part .* HuggingFaceStorageReader"):
            anyrank.inspect(source)


@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_a_whole_model_that_torch_saved_for_hugging_face(tmp_path: Path) -> None:
    state = {"w": torch.randn(4, 4), "v": torch.randn(3)}
    writer = dcp.HuggingFaceStorageWriter(path=str(tmp_path / "w"), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert anyrank.diff(state, tmp_path / "w")
    anyrank.convert(tmp_path / "w", tmp_path / "out", rename={"w": "x"})
    read = {"x": torch.zeros(4, 4)}
    reader = dcp.HuggingFaceStorageReader(path=str(tmp_path / "out"))
    dcp.load(read, storage_reader=reader, no_dist=True)
    assert torch.equal(read["x"], state["w"])


@pytest.mark.parametrize("inner", ["model", "snapshots/abc", "epoch_1_step_6/model"])
def test_a_folder_whose_weights_are_further_down_names_where(inner: str, tmp_path: Path) -> None:
    folder = tmp_path / "w" / inner
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(save(STATE))
    with pytest.raises(anyrank.LoadError, match=rf"weights are in {inner}; pass that folder"):
        anyrank.load(nn.Linear(2, 2), tmp_path / "w")


def test_a_whole_module_is_named_at_once_with_all_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = types.ModuleType("detector_tasks")
    monkeypatch.setitem(__import__("sys").modules, "detector_tasks", tasks)
    kinds = [type(name, (nn.Sequential,), {"__module__": tasks.__name__}) for name in ("A", "B")]
    for kind in kinds:
        setattr(tasks, kind.__name__, kind)
    net: Any = kinds[0](kinds[1](nn.Linear(2, 2)))
    for tree, key in ((net, ""), ({"model": None, "ema": net}, "['ema']")):
        torch.save(tree, tmp_path / "w.pt")
        with pytest.raises(anyrank.UnsafeFile) as caught:
            anyrank.load(nn.Linear(2, 2), tmp_path / "w.pt")
        text = str(caught.value)
        assert "contains a module of class detector_tasks.A" in text
        assert all(name in text for name in ("detector_tasks.B", "torch.nn.modules.linear.Linear"))
        names = [*kinds, nn.Linear]
        allowed = torch.serialization.safe_globals(names)
        with allowed, pytest.raises(anyrank.LoadError) as second:
            anyrank.load(nn.Linear(2, 2), tmp_path / "w.pt")
        assert f"torch.load(path, weights_only=False){key}.state_dict()" in str(second.value)


@pytest.mark.parametrize("missing", ["init", "keep"])
def test_what_the_source_has_and_is_not_read_is_not_given_first_values(
    missing: Any, tmp_path: Path
) -> None:
    torch.save({"weight": torch.eye(2).to_sparse(), "bias": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(anyrank.LoadError, match="weight: is a sparse tensor"):
        anyrank.load(nn.Linear(2, 2), tmp_path / "w.pt", missing=missing)
