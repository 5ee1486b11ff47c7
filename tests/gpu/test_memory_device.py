"""What only a device can show of recompute, offload and tiles: streams, pins, peaks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.files.reader import synchronize
from anyrank.memory import offload_engine
from anyrank.memory.host_buffers import CopyEngine
from anyrank.memory.offload import get_engine

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WIDTH = 128 if hasattr(torch, "sim") else 1024
# Of a model whose weights, and so their gradients, are small beside one input.
NARROW, LONG = (32, 8192) if hasattr(torch, "sim") else (256, 65536)
SLOW_CYCLES = 20_000_000  # about 10 ms


class Block(nn.Module):
    """A layer with dropout, an intermediate of four times its input."""

    def __init__(self, dropout: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(x))))


def model(
    device: torch.device, blocks: int = 6, dropout: float = 0.0, width: int = WIDTH
) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout, width) for _ in range(blocks))).to(device)


def grads(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))


def assert_equal(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, wanted)


def inputs(device: torch.device, rows: int = 2048, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(3)
    return torch.randn(1, rows, width, device=device, generator=generator).requires_grad_()


class Slow(CopyEngine):
    """Streams whose copies begin late: whoever does not wait reads rubbish."""

    def copy(self, stream: Any, target: Any, source: Any, after: Any) -> Any:
        if self.device.type == "cuda":  # copies of the simulated device are as late as can be
            with stream:
                torch.cuda._sleep(SLOW_CYCLES)
        return super().copy(stream, target, source, after)


@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("copies", [CopyEngine, Slow])
def test_copies_that_are_late_are_waited_for(
    device: torch.device,
    copies: type[CopyEngine],
    keep_last: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload_engine, "CopyEngine", copies)
    net, x = model(device), inputs(device)
    plain = grads(net, x)
    offload = anyrank.Offload(256 * MIB, keep_last=keep_last)
    anyrank.recompute_(net, "*", offload=offload)
    for _ in range(5):
        assert_equal(grads(net, x), plain)
    stats = offload.stats()
    assert stats.used_bytes == 0
    assert stats.copied_bytes == 5 * (6 - keep_last) * x.numel() * 4
    assert stats.held_bytes == (6 - keep_last) * x.numel() * 4


def test_on_a_stream_of_the_users(device: torch.device) -> None:
    net, x = model(device), inputs(device)
    plain = grads(net, x)
    anyrank.recompute_(net, "*", offload=anyrank.Offload(256 * MIB, keep_last=0))
    stream = torch.Stream(device)
    with torch.accelerator.device_index(device.index):
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            ours = grads(net, x)
        torch.accelerator.current_stream(device).wait_stream(stream)
    assert_equal(ours, plain)


def test_host_buffers_are_pinned_of_exact_size_and_freed_by_close(device: torch.device) -> None:
    net, x = model(device, 2), inputs(device, 8111)
    offload = anyrank.Offload(256 * MIB, keep_last=0)
    anyrank.recompute_(net, "*", offload=offload)
    grads(net, x)
    nbytes = x.numel() * 4
    get_engine(offload).pool.collect()
    buffers = get_engine(offload).pool.idle[nbytes]
    assert [buffer.data.is_pinned() for buffer in buffers] == [True, True]
    offload.close()
    assert offload.stats().held_bytes == 0


def peak(device: torch.device, step: Callable[[], Any]) -> int:
    """Most bytes beyond those at the start."""
    step()
    gc.collect()  # whatever goes between the two readings would be taken off the peak
    synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    start = torch.accelerator.memory_allocated(device)
    step()
    return torch.accelerator.max_memory_allocated(device) - start


def test_dropout_on_the_device_draws_the_same_again(device: torch.device) -> None:
    net, x = model(device, dropout=0.5), inputs(device)
    plain = grads(net, x)
    anyrank.recompute_(net, "*", offload=anyrank.Offload(256 * MIB))
    assert_equal(grads(net, x), plain)


def test_each_part_lowers_the_peak(device: torch.device) -> None:
    net, x = model(device, 8, width=NARROW), inputs(device, LONG, NARROW)
    plain = peak(device, lambda: grads(net, x))
    handle = anyrank.recompute_(net, "*")
    recomputed = peak(device, lambda: grads(net, x))
    handle.remove()
    offload = anyrank.Offload(1024 * MIB, min_bytes=1)
    anyrank.recompute_(net, "*", offload=offload)
    offloaded = peak(device, lambda: grads(net, x))
    anyrank.tile_(net, "*", chunk_size=1024)
    tiled = peak(device, lambda: grads(net, x))
    one = x.numel() * 4
    assert recomputed < plain / 2
    assert offloaded <= recomputed - 4 * one
    assert tiled < offloaded - 4 * one


def test_no_bytes_of_inputs_are_left_on_the_device_after_forward(device: torch.device) -> None:
    net, x = model(device, 8), inputs(device, 8192)
    anyrank.recompute_(net, "*", offload=anyrank.Offload(1024 * MIB, keep_last=0))
    before = torch.accelerator.memory_allocated(device)
    loss = net(x * 1).sum()
    synchronize(device)
    assert torch.accelerator.memory_allocated(device) - before < 2 * x.numel() * 4
    loss.backward()


def test_tiled_loss_holds_one_tile_of_logits(device: torch.device) -> None:
    vocab = 4096 if hasattr(torch, "sim") else 65536
    head = nn.Linear(WIDTH, vocab, bias=False, device=device, dtype=torch.bfloat16)
    hidden = inputs(device, 8192).detach().bfloat16().requires_grad_()
    labels = torch.randint(vocab, (1, 8192), device=device)

    def step(module: nn.Module) -> list[torch.Tensor]:
        loss = anyrank.tiled_loss(module, hidden, labels, chunk_size=512)
        return list(torch.autograd.grad(loss, [hidden, head.weight]))

    floor = 2 * (hidden.numel() + head.weight.numel())
    assert peak(device, lambda: step(head)) < floor + 512 * vocab * 10
    for a, b in zip(step(head), step(nn.Sequential(head)), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-5)


@pytest.mark.cuda
def test_side_streams_overlap_with_computation(device: torch.device) -> None:
    net, x = model(device, 8).bfloat16(), inputs(device, 16384).detach().bfloat16().requires_grad_()

    def seconds() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        grads(net, x)
        start.record()
        for _ in range(5):
            grads(net, x)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    handle = anyrank.recompute_(net, "*")
    without = seconds()
    handle.remove()
    anyrank.recompute_(net, "*", offload=anyrank.Offload(2048 * MIB))
    assert seconds() < 1.5 * without
