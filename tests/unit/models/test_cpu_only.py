"""`anyrank.cpu_only`: what a loader makes lands on the CPU, without a GPU to prove it on.

On a machine without CUDA every call here raises outside a block, so a call that succeeds inside was
redirected; the first test of each part holds that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank

NO_CUDA = (RuntimeError, AssertionError, ValueError, TypeError, ImportError)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA calls succeed here")


def build_on_cuda() -> torch.Tensor:
    with torch.device("cuda"):
        return nn.Linear(2, 2).weight


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to-str": lambda x: x.to("cuda:1"),
    "to-index": lambda x: x.to(0),
    "to-keyword-index": lambda x: x.to(device=0, dtype=torch.float64),
    "to-device": lambda x: x.to(CUDA, torch.float64, non_blocking=True),
    "to-mps": lambda x: x.to("mps"),
    "to-xpu": lambda x: x.to("xpu:0"),
    "cuda": lambda x: x.cuda(),
    "cuda-index": lambda x: x.cuda(1, non_blocking=True),
    "xpu": lambda x: x.xpu(),
    "pin": lambda x: x.pin_memory(),
    "type": lambda x: x.type("torch.cuda.DoubleTensor"),
    "type-class": lambda x: x.type(torch.cuda.DoubleTensor),
    "zeros": lambda x: torch.zeros(2, device="cuda"),
    "zeros-pinned": lambda x: torch.zeros(2, pin_memory=True),
    "tensor-index": lambda x: torch.tensor([1.0], device=0),
    "like": lambda x: torch.zeros_like(x, device=CUDA),
    "new": lambda x: x.new_ones(2, device="hpu"),
    "default": lambda x: build_on_cuda(),
    "module-to": lambda x: nn.Linear(2, 2).to("cuda").weight,
    "module-index": lambda x: nn.Linear(2, 2).to(0).weight,
    "module-cuda": lambda x: nn.Linear(2, 2).cuda(0).weight,
    "storage": lambda x: torch.tensor([]).set_(x.untyped_storage().cuda(0), 0, (2,)),
    "storage-to": lambda x: torch.tensor([]).set_(x.untyped_storage().to(device="cuda"), 0, (2,)),
    "device-index": lambda x: x.to(torch.device(0)),
    "device-pair": lambda x: x.to(torch.device("cuda", 1)),
}
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_names_an_accelerator_ends_on_the_cpu(name: str) -> None:
    x = torch.ones(2)
    with pytest.raises(NO_CUDA):
        CALLS[name](x)
    with anyrank.cpu_only():
        made = CALLS[name](x)
    assert made.device == torch.device("cpu")
    with pytest.raises(NO_CUDA):
        CALLS[name](x)


def test_a_redirected_call_does_the_rest_of_what_it_was_asked() -> None:
    x = torch.tensor([1.5, 2.5])
    with anyrank.cpu_only():
        assert x.to("cuda", torch.int32).tolist() == [1, 2]
        assert x.cuda().tolist() == [1.5, 2.5]
        assert x.type(torch.cuda.DoubleTensor).dtype == torch.float64
        assert torch.full((2,), 3, device="cuda:1", dtype=torch.int8).tolist() == [3, 3]


def test_cpu_and_meta_pass_as_they_are() -> None:
    with anyrank.cpu_only():
        assert torch.ones(2, device="meta").is_meta
        assert torch.ones(2).to("meta").is_meta
        assert torch.device("cpu", 0) == torch.device("cpu", 0)
        assert torch.einsum("ij,j->i", torch.eye(2), torch.ones(2)).tolist() == [1, 1]
        assert torch.ones(2, 3).to(dtype=torch.int8).sum(1).tolist() == [3, 3]


def test_an_accelerator_that_is_the_default_device_is_the_cpu_inside() -> None:
    with torch.device("cuda"):
        with anyrank.cpu_only():
            assert torch.ones(2).device.type == "cpu"
        with pytest.raises(NO_CUDA):
            torch.ones(2)


def test_nests_and_ends_also_after_an_exception() -> None:
    with pytest.raises(KeyError), anyrank.cpu_only():  # noqa: PT012
        with anyrank.cpu_only():
            torch.ones(2, device="cuda")
        torch.ones(2, device="cuda")
        raise KeyError
    with pytest.raises(NO_CUDA):
        torch.ones(2, device="cuda")


def test_whether_cuda_is_there_is_told_truly() -> None:
    functions = (torch.cuda.is_available, torch.cuda.device_count, torch.cuda.is_initialized)
    outside = [function() for function in functions]
    with anyrank.cpu_only():
        assert [function() for function in functions] == outside


def test_the_current_device_of_an_accelerator_in_use_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = [3]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    with pytest.raises(KeyError), anyrank.cpu_only():  # noqa: PT012
        torch.cuda.set_device(0)
        raise KeyError
    assert current == [3]


# -- threads --------------------------------------------------------------------------------------


def test_other_threads_are_left_alone(cuda_file: Path) -> None:
    for work in (lambda: torch.ones(2, device="cuda"), lambda: torch.load(cuda_file)):
        with anyrank.cpu_only(), ThreadPoolExecutor(1) as pool, pytest.raises(NO_CUDA):
            pool.submit(work).result()


def test_a_thread_that_left_is_out_although_another_is_still_inside(cuda_file: Path) -> None:
    entered, end = threading.Event(), threading.Event()

    def stay() -> None:
        with anyrank.cpu_only():
            entered.set()
            assert end.wait(20)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(stay)
        assert entered.wait(20)
        try:
            with anyrank.cpu_only():
                torch.load(cuda_file)
            with pytest.raises(NO_CUDA):
                torch.load(cuda_file)
        finally:
            end.set()
        other.result()


# -- torch.load -----------------------------------------------------------------------------------


@pytest.fixture
def cuda_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights that a process with tensors on cuda:0 would have saved."""
    return save_from(tmp_path / "cuda.pt", {"weight": torch.arange(4.0)}, monkeypatch)


def save_from(
    path: Path,
    content: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    location: str = "cuda:0",
    **how: Any,
) -> Path:
    """`torch.save`, with another device's name on every storage."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: location)
        torch.save(content, path, **how)
    return path


LOADS: dict[str, dict[str, Any]] = {
    "saved": {},
    "str": {"map_location": "cuda:1"},
    "device": {"map_location": CUDA},
    "dict": {"map_location": {"cuda:0": "cuda:1"}},
    "callable": {"map_location": lambda storage, location: storage.cuda(1)},
    "callable-none": {"map_location": lambda storage, location: None},
    "mmap": {"mmap": True},
    "any-pickle": {"weights_only": False},
}


@pytest.mark.parametrize("name", LOADS)
def test_torch_load_ends_on_the_cpu(name: str, cuda_file: Path) -> None:
    with pytest.raises(NO_CUDA):
        torch.load(cuda_file, **LOADS[name])
    with anyrank.cpu_only():
        loaded = torch.load(cuda_file, **LOADS[name])["weight"]
    assert loaded.device == torch.device("cpu")
    assert loaded.tolist() == [0, 1, 2, 3]
    with pytest.raises(NO_CUDA):
        torch.load(cuda_file, **LOADS[name])


@pytest.mark.parametrize("location", ["cuda", "cuda:7", "xpu:0", "hpu:0", "mps", "mtia"])
@pytest.mark.parametrize("zipped", [True, False])
def test_files_from_any_accelerator_and_format_load(
    location: str, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"location": location, "_use_new_zipfile_serialization": zipped}
    path = save_from(tmp_path / "file.pt", torch.arange(4.0), monkeypatch, **how)
    with anyrank.cpu_only():
        assert torch.load(path).tolist() == [0, 1, 2, 3]


def test_meta_and_cpu_locations_are_torchs_business(cuda_file: Path) -> None:
    with anyrank.cpu_only():
        assert torch.load(cuda_file, map_location="meta")["weight"].is_meta
        assert torch.load(cuda_file, map_location={"cuda:0": "meta"})["weight"].is_meta
        assert torch.load(cuda_file, map_location="cpu")["weight"].tolist() == [0, 1, 2, 3]


def test_saving_is_as_it_was(tmp_path: Path) -> None:
    with anyrank.cpu_only():
        torch.save(torch.ones(2), tmp_path / "cpu.pt")
    assert torch.load(tmp_path / "cpu.pt").tolist() == [1, 1]


# -- loaders --------------------------------------------------------------------------------------


def test_torch_hub_loads_files_and_local_repositories(cuda_file: Path, tmp_path: Path) -> None:
    lines = ["import torch", "dependencies = ['torch']", "def linear(path):"]
    lines += ["    model = torch.nn.Linear(2, 2).cuda()"]
    lines += [
        "    model.weight.data.view(-1).copy_(torch.load(path)['weight'])",
        "    return model",
    ]
    (tmp_path / "hubconf.py").write_text("\n".join(lines), encoding="utf-8")
    with anyrank.cpu_only():
        url, folder = cuda_file.as_uri(), str(tmp_path / "cache")
        loaded = torch.hub.load_state_dict_from_url(url, model_dir=folder, progress=False)
        model: Any = torch.hub.load(str(tmp_path), "linear", str(cuda_file), source="local")
    assert loaded["weight"].tolist() == [0, 1, 2, 3]
    assert model.weight.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, "xpu:1", "mps"])
def test_safetensors_end_on_the_cpu(device: str | int, backend: str, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = tmp_path / "x.safetensors"
    save_file({"x": torch.arange(4.0), "y": torch.ones(2, 2)}, path)
    with pytest.raises(NO_CUDA):
        load_file(path, device=device, backend=backend)
    with anyrank.cpu_only():
        loaded = load_file(path, device=device, backend=backend)
        with safe_open(path, "pt", device=device, backend=backend) as file:
            whole, part = file.get_tensor("x"), file.get_slice("y")[1:]
    assert loaded["x"].tolist() == whole.tolist() == [0, 1, 2, 3]
    assert part.tolist() == [[1, 1]]
    assert {t.device.type for t in (loaded["x"], whole, part)} == {"cpu"}


class AutoEncoder(nn.Module):
    """What the tests save and load through accelerate."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 2)
        self.decoder = nn.Linear(2, 4)
        self.register_buffer("scale", torch.arange(2.0))


def equal(model: nn.Module, other: nn.Module) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    assert {tensor.device.type for tensor in ours.values()} == {"cpu"}
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_lightning_loads_a_checkpoint_saved_from_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.accelerators.cuda import CUDAAccelerator

    class Saved(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(width, width)

    model = Saved(3)
    content = {"state_dict": model.state_dict(), "hyper_parameters": {"width": 3}}
    content |= {"pytorch-lightning_version": lightning.__version__, "epoch": 0, "global_step": 0}
    content |= {"loops": {}}
    path = save_from(tmp_path / "vae.ckpt", content, monkeypatch)
    # As on a machine with CUDA: else Lightning itself takes the CPU.
    monkeypatch.setattr(CUDAAccelerator, "is_available", staticmethod(lambda: True))
    with pytest.raises(NO_CUDA):
        Saved.load_from_checkpoint(path)
    with anyrank.cpu_only():
        loaded = Saved.load_from_checkpoint(path)
    assert equal(loaded, model)
    assert loaded.device.type == "cpu"


@pytest.mark.parametrize("device_map", ["cuda:0", "cuda", 0, {"": 0}, {"": "cuda:1"}, {"": CUDA}])
def test_transformers_end_on_the_cpu(
    device_map: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    if not isinstance(device_map, str):  # its own threads read it, and make their devices of it
        monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(num_attention_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(NO_CUDA):
        load(tmp_path, device_map=device_map)
    with anyrank.cpu_only():
        loaded = load(tmp_path, device_map=device_map)
    assert equal(loaded, model)
    assert torch.equal(loaded(torch.arange(4)[None]).logits, model(torch.arange(4)[None]).logits)


@pytest.mark.parametrize("device_map", [{"": "cuda:0"}, {"": 0}])
def test_accelerate_loads_and_dispatches_on_the_cpu(device_map: Any, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import save_file

    model = AutoEncoder()
    path = str(tmp_path / "model.safetensors")
    save_file(model.state_dict(), path, metadata={"format": "pt"})
    with accelerate.init_empty_weights():
        empty = AutoEncoder()
    with anyrank.cpu_only():
        loaded = accelerate.load_checkpoint_and_dispatch(empty, path, device_map=device_map)
    assert equal(loaded, model)
