"""What a device shows of background saves and offloads: order, page-locked memory, its release."""

from __future__ import annotations

import gc
import mmap
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tests.runs import resume
from torch import nn

import anyrank
from anyrank import faults
from anyrank.files.reader import synchronize
from anyrank.memory.offload import get_engine
from anyrank.world.pinned import page_locked

pytestmark = pytest.mark.gpu
Built = tuple[nn.Sequential, torch.optim.Optimizer, anyrank.TrainState]


def build(device: torch.device, width: int = 200) -> Built:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 9))
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=0.1)
    return model, optimizer, anyrank.TrainState(model, optimizer)


def train(device: torch.device, built: Built, steps: int) -> list[float]:
    model, optimizer, _ = built
    losses: list[float] = []
    for step in range(steps):
        loss = model(torch.eye(4, 200, device=device) + step).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_background_copy_is_ordered_with_the_training(
    device: torch.device, tmp_path: Path, own_stream: bool
) -> None:
    """On a stream of its own: behind the step before it, and before the step after it."""
    stream = torch.Stream(device) if own_stream else torch.accelerator.current_stream(device)
    synchronize(device)
    with torch.accelerator.device_index(device.index), stream:
        built = build(device)
        with closing(anyrank.Checkpoints(tmp_path, built[2], every=1, background=True)) as ckpts:
            for _ in range(4):
                train(device, built, 1)
                ckpts.step_done()
            ckpts.wait()
            expected = train(device, built, 2)
        fresh = build(device)
        report = resume(tmp_path, fresh[2], "must")
        assert report is not None
        assert set(report.components.values()) == {"exact"}
        assert train(device, fresh, 2) == expected
    synchronize(device)


def test_a_save_has_the_values_of_its_step_whatever_is_written_behind_it(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, fresh = build(device), build(device)
    train(device, built, 1)
    written = threading.Event()
    monkeypatch.setitem(faults.armed, "save.write", lambda: written.wait(20))
    with closing(anyrank.Checkpoints(tmp_path, built[2], background=True)) as ckpts:
        ckpts.save()
        saved = {name: value.clone() for name, value in built[0].state_dict().items()}
        train(device, built, 1)
        with torch.no_grad():
            built[0][0].weight.mul_(2)
        written.set()
        ckpts.wait()
    resume(tmp_path, fresh[2], "must")
    for name, value in fresh[0].state_dict().items():
        assert torch.equal(value, saved[name]), name


def test_page_locked_memory_is_of_exact_size_and_released_with_its_last_view(
    device: torch.device,
) -> None:
    memory = page_locked((1 << 20) + 3, device)
    view = memory[5:]
    assert memory.numel() == (1 << 20) + 3
    assert memory.is_pinned()
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    source = torch.randint(255, (len(view),), dtype=torch.uint8, device=device)
    view.copy_(source, non_blocking=True)
    address = memory.data_ptr()
    del memory
    gc.collect()
    synchronize(device)
    assert view.is_pinned()
    assert torch.equal(view, source.cpu())
    view.copy_(source, non_blocking=True)  # under way when the last view goes
    del view
    gc.collect()
    if device.type == "sim":
        assert address not in torch.get_device_module(device).registered()


def test_an_offload_that_nobody_closed_unlocks_its_memory(device: torch.device) -> None:
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device)
    offload = anyrank.Offload(1 << 24, keep_last=0, min_bytes=1)
    anyrank.recompute_(net, "*", offload=offload)
    net(torch.randn(100, 64, device=device, requires_grad=True)).sum().backward()
    get_engine(offload).pool.collect()
    held = [one.data for buffers in get_engine(offload).pool.idle.values() for one in buffers]
    addresses = [one.data_ptr() for one in held]
    assert len(addresses) == 3
    assert all(address % mmap.PAGESIZE == 0 for address in addresses)
    assert all(one.is_pinned() for one in held)
    del net, offload, held
    gc.collect()
    if device.type == "sim":
        assert not set(addresses) & torch.get_device_module(device).registered()


class Handing(nn.Module):
    """A layer that lets another stream know that it has used its input."""

    def __init__(self, stream: torch.Stream) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.stream = stream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.stream.wait_stream(torch.accelerator.current_stream(x.device))
        return y


def test_memory_of_another_stream_is_not_used_again_under_its_copy(device: torch.device) -> None:
    """A block's input is freed to the stream that made it, and that knows of no copy."""
    torch.manual_seed(0)
    maker = torch.Stream(device)
    net = nn.Sequential(Handing(maker), nn.Linear(256, 256)).to(device)
    values = torch.randn(512, 256, device=device)
    with torch.accelerator.device_index(device.index):
        plain = grads(net, net(values))
        anyrank.recompute_(net, "*", offload=anyrank.Offload(1 << 26, keep_last=0, min_bytes=1))
        current = torch.accelerator.current_stream(device)
        maker.wait_stream(current)
        with maker:
            inputs = [values.clone()]
        current.wait_stream(maker)
        result = net(inputs.pop())
        with maker:
            rubbish = [torch.full_like(values, torch.nan) for _ in range(4)]
        ours = grads(net, result)
        current.wait_stream(maker)
    assert len(rubbish) == 4
    for mine, wanted in zip(ours, plain, strict=True):
        assert torch.equal(mine, wanted)


def grads(net: nn.Module, result: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(result.square().sum(), list(net.parameters())))
