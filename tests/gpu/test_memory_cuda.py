"""What only a CUDA device can show of recompute, offload and tiles: streams, pins, peaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.memory import offload as offload_module
from anyrank.memory.lanes import Streams

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WIDTH = 1024
SLOW_CYCLES = 20_000_000  # about 10 ms


class Block(nn.Module):
    """A layer with dropout, an intermediate of four times its input."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(x))))


def model(blocks: int = 6, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout) for _ in range(blocks))).cuda()


def grads(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))


def assert_equal(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, wanted)


def inputs(rows: int = 2048) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(3)
    return torch.randn(1, rows, WIDTH, device="cuda", generator=generator).requires_grad_()


class Slow(Streams):
    """Streams whose copies begin late: whoever does not wait reads rubbish."""

    def copy(self, stream: Any, target: Any, source: Any, after: Any) -> Any:
        with self.module.stream(stream):
            torch.cuda._sleep(SLOW_CYCLES)
        return super().copy(stream, target, source, after)


@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize("lanes", [Streams, Slow])
def test_copies_that_are_late_are_waited_for(
    lanes: type[Streams], keep_last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_module, "lanes_of", lanes)
    net, x = model(), inputs()
    plain = grads(net, x)
    offload = anyrank.Offload(256 * MIB, keep_last=keep_last)
    anyrank.recompute_(net, "*", offload=offload)
    for _ in range(5):
        assert_equal(grads(net, x), plain)
    stats = offload.stats()
    assert stats.used_bytes == 0
    assert stats.copied_bytes == 5 * (6 - keep_last) * x.numel() * 4
    assert stats.allocated == 6 - keep_last


def test_on_a_stream_of_the_users() -> None:
    net, x = model(), inputs()
    plain = grads(net, x)
    anyrank.recompute_(net, "*", offload=anyrank.Offload(256 * MIB, keep_last=0))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours = grads(net, x)
    torch.cuda.current_stream().wait_stream(stream)
    assert_equal(ours, plain)


def test_host_buffers_are_pinned_of_exact_size_and_freed_by_close() -> None:
    net, x = model(2), inputs(1111)
    offload = anyrank.Offload(256 * MIB, keep_last=0)
    anyrank.recompute_(net, "*", offload=offload)
    grads(net, x)
    nbytes = x.numel() * 4
    offload.pool.collect()
    buffers = offload.pool.idle[nbytes]
    assert [buffer.data.is_pinned() for buffer in buffers] == [True, True]
    offload.close()
    assert offload.stats().held_bytes == 0


def peak(step: Callable[[], Any]) -> int:
    """Most bytes beyond those at the start."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - start


def test_dropout_on_the_device_draws_the_same_again() -> None:
    net, x = model(dropout=0.5), inputs()
    plain = grads(net, x)
    anyrank.recompute_(net, "*", offload=anyrank.Offload(256 * MIB))
    assert_equal(grads(net, x), plain)


def test_each_part_lowers_the_peak() -> None:
    net, x = model(8), inputs(8192)
    plain = peak(lambda: grads(net, x))
    handle = anyrank.recompute_(net, "*")
    recomputed = peak(lambda: grads(net, x))
    handle.remove()
    offload = anyrank.Offload(1024 * MIB)
    anyrank.recompute_(net, "*", offload=offload)
    offloaded = peak(lambda: grads(net, x))
    anyrank.tile_(net, "*", chunk_size=1024)
    tiled = peak(lambda: grads(net, x))
    one = x.numel() * 4
    assert recomputed < plain / 2
    assert offloaded <= recomputed - 4 * one
    assert tiled < offloaded - 4 * one


def test_no_bytes_of_inputs_are_left_on_the_device_after_forward() -> None:
    net, x = model(8), inputs(8192)
    anyrank.recompute_(net, "*", offload=anyrank.Offload(1024 * MIB, keep_last=0))
    before = torch.cuda.memory_allocated()
    loss = net(x * 1).sum()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2 * x.numel() * 4
    loss.backward()


def test_tiled_loss_holds_one_tile_of_logits() -> None:
    vocab = 65536
    head = nn.Linear(WIDTH, vocab, bias=False, device="cuda", dtype=torch.bfloat16)
    hidden = inputs(8192).detach().bfloat16().requires_grad_()
    labels = torch.randint(vocab, (1, 8192), device="cuda")

    def step(impl: Any) -> list[torch.Tensor]:
        loss = anyrank.tiled_loss(head, hidden, labels, chunk_size=512, impl=impl)
        return list(torch.autograd.grad(loss, [hidden, head.weight]))

    floor = 2 * (hidden.numel() + head.weight.numel())
    assert peak(lambda: step("fused")) < floor + 512 * vocab * 10
    for a, b in zip(step("fused"), step("recompute"), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-5)


def test_side_streams_overlap_with_computation() -> None:
    net, x = model(8).bfloat16(), inputs(16384).detach().bfloat16().requires_grad_()

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
