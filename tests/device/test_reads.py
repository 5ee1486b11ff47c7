"""What a device shows of reads and copies: bytes are used again, or read, when their copy is over.

The simulated device runs a copy as late as it may, so each of these is wrong every time, or never.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyrank
from anyrank.files.content_hash import content_hash
from anyrank.files.reader import synchronize

pytestmark = pytest.mark.gpu
BUFFER_BYTES = 1 << 18
Tensors = dict[str, torch.Tensor]


def deep(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(512, 512, dtype=dtype) for _ in range(6)))


def zeros(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    model = deep(dtype)
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


@pytest.fixture
def tensors() -> Tensors:
    torch.manual_seed(0)
    return {name: torch.randn_like(value) for name, value in deep().state_dict().items()}


@pytest.fixture
def path(tmp_path: Path, tensors: Tensors) -> str:
    save_file(tensors, tmp_path / "w.safetensors")
    return str(tmp_path / "w.safetensors")


def wrong(model: nn.Module, tensors: Tensors) -> list[str]:
    values = model.state_dict().items()
    return [name for name, v in values if not torch.equal(v.cpu(), tensors[name].to(v.dtype))]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_slot_is_filled_again_when_its_copy_is_over(
    device: torch.device,
    path: str,
    tensors: Tensors,
    threads: int,
    real: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYRANK_READ_THREADS", str(threads))
    if real:
        model = zeros(dtype).to(device)
    else:
        with anyrank.meta():
            model = deep(dtype)
    report = anyrank.load(model, path, buffer_bytes=BUFFER_BYTES)
    assert {p.device for p in model.parameters()} == {device}
    assert wrong(model, tensors) == []
    share = sum(p.numel() * p.element_size() for p in model.parameters())
    assert report.peak_device_bytes[0] >= (0 if real else share)


@pytest.mark.several_devices
@pytest.mark.parametrize("threads", ["1", "2"])
def test_every_device_of_a_pipeline_is_waited_for(
    device: torch.device,
    path: str,
    tensors: Tensors,
    threads: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("this machine has one device")
    monkeypatch.setenv("ANYRANK_READ_THREADS", threads)
    model = zeros()
    for number, layer in enumerate(model):
        layer.to(torch.device(device.type, number % 2))
    anyrank.load(model, path, buffer_bytes=BUFFER_BYTES)
    assert wrong(model, tensors) == []


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("real", [False, True])
def test_a_load_in_a_stream_comes_behind_what_the_stream_does(
    device: torch.device,
    path: str,
    tensors: Tensors,
    threads: str,
    real: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANYRANK_READ_THREADS", threads)
    model = zeros().to(device)
    ones = torch.ones(512, 512, dtype=torch.bfloat16).pin_memory()
    synchronize(device)
    with torch.accelerator.device_index(device.index), torch.Stream(device):
        model[0].weight.data.copy_(ones, non_blocking=True)
        if not real:
            del model
            with anyrank.meta():
                model = deep()
        anyrank.load(model, path, buffer_bytes=BUFFER_BYTES)
    assert wrong(model, tensors) == []


@pytest.mark.parametrize("kind", ["file", "host", "device", "to the host"])
def test_a_load_in_a_stream_comes_behind_what_other_streams_do(
    device: torch.device, path: str, tensors: Tensors, kind: str
) -> None:
    """As with weights that the caller has just made, or moved there."""
    model = zeros() if kind == "to the host" else zeros().to(device)
    pinned = {name: value.pin_memory() for name, value in tensors.items()}
    late = [torch.ones(512, 512, dtype=torch.bfloat16).pin_memory() for _ in range(6)]
    synchronize(device)
    with torch.accelerator.device_index(device.index):
        source: Any = {"file": path, "host": pinned}.get(kind)
        if source is None:
            source = {name: value.to(device, non_blocking=True) for name, value in pinned.items()}
        for layer, value in zip(model, late, strict=True):
            if kind != "to the host":
                layer.weight.data.copy_(value, non_blocking=True)
        with torch.Stream(device):
            anyrank.load(model, source, buffer_bytes=BUFFER_BYTES)
    synchronize(device)
    assert wrong(model, tensors) == []


def test_a_load_in_a_stream_has_read_its_source_when_it_returns(
    device: torch.device, tensors: Tensors
) -> None:
    model = zeros().to(device)
    source = {name: value.pin_memory() for name, value in tensors.items()}
    with torch.accelerator.device_index(device.index), torch.Stream(device):
        anyrank.load(model, source)
    for value in source.values():
        value.zero_()
    assert wrong(model, tensors) == []


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_comes_from_a_device_is_there_when_load_returns(
    device: torch.device, tensors: Tensors, dtype: torch.dtype, pinned: bool
) -> None:
    source = {name: value.to(device) for name, value in tensors.items()}
    model = zeros(dtype)
    if pinned:
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()
    anyrank.load(model, source)
    assert wrong(model, tensors) == []


@pytest.mark.parametrize("numel", [5, 1000, 1 << 20])
def test_a_hash_is_of_the_values_wherever_they_are(device: torch.device, numel: int) -> None:
    values = torch.randn(numel)
    assert content_hash(values.to(device)) == content_hash(values)


def test_a_frozen_part_on_the_device_is_compared_by_its_values(
    device: torch.device, path: str, tensors: Tensors
) -> None:
    model: Any = deep().to(device)
    model.load_state_dict(tensors)
    anyrank.freeze(model)
    anyrank.load(model, path, verify=True)
    assert wrong(model, tensors) == []


def test_a_staged_block_leaves_the_device_alone(device: torch.device) -> None:
    """In a process that has not begun to use it."""
    module: Any = torch.get_device_module(device)
    was = module.is_initialized()
    with anyrank.cpu_only():
        assert deep().to(device)[0].weight.is_cpu
        assert getattr(torch.ones(2), device.type)(device.index).is_cpu
        assert getattr(deep(), device.type)()[0].weight.is_cpu
    assert module.is_initialized() == was
