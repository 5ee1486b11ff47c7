"""Twelve ways in which tiling, recomputing and offloading have gone wrong elsewhere: each written
anew in its shortest form, failing, beside ours, which does not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.unit.test_offload import Late
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import anyrank
from anyrank.memory import offload_engine
from anyrank.memory.host_buffers import HostPool
from anyrank.testing import RanksFailed, run_ranks

WIDTH, ROWS, CHUNK = 4, 10, 4


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))
    return layers.double()


def rows(number: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(1, number, WIDTH, dtype=torch.float64, generator=generator)


def grads_of(module: nn.Module, fn: Callable[..., torch.Tensor], x: torch.Tensor) -> list[Any]:
    """`.grad` after a backward pass, as an optimizer sees it."""
    for parameter in module.parameters():
        parameter.grad = None
    fn(x).sin().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def assert_close(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> None:
    for mine, wanted in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, wanted)


def far(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> bool:
    return any(not torch.allclose(a, b) for a, b in zip(ours, plain, strict=True))


class NestedBackward(torch.autograd.Function):
    """Runs a module without a graph, and a backward pass of its own for each tile in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module, chunk: int, sync: Any) -> Any:
        ctx.module, ctx.chunk, ctx.sync = module, chunk, sync
        ctx.save_for_backward(x)
        return torch.cat([module(part) for part in x.split(chunk, 1)], 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        found = []
        for part, of in zip(x.split(ctx.chunk, 1), grad.split(ctx.chunk, 1), strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.module(part)
            with ctx.sync():
                torch.autograd.backward(y, of)
            found.append(part.grad)
        return torch.cat(found, 1), None, None, None


# -- 1, 2, 3: marked ready twice ------------------------------------------------------------------


class Twice(nn.Module):
    """A module that is called twice in a forward pass, as a tower for two images is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).double()
        self.mlp = mlp()
        self.how = how
        self.sync: Any = torch.enable_grad
        if how == "ours":
            self.offload = anyrank.Offload(1 << 20, min_bytes=1, keep_last=0, force=True)
            anyrank.tile_(self, "mlp", chunk_size=CHUNK)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.how == "plain":
            return self.mlp(self.mlp(x))
        if self.how == "ours":
            x = anyrank.recompute(self.mlp, x, offload=self.offload)
            return anyrank.recompute(self.mlp, x, offload=self.offload)
        if self.how == "reentrant":
            for _ in range(2):
                with torch.autograd.graph.save_on_cpu():
                    x = checkpoint(self.mlp, x, use_reentrant=True)
            return x
        return NestedBackward.apply(x, self.mlp, CHUNK, self.sync)


def job_ddp(how: str, find_unused: bool) -> list[torch.Tensor]:
    model = Twice(how)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    wrapped = DistributedDataParallel(model, find_unused_parameters=find_unused)
    if how == "nested, no_sync":
        model.sync = wrapped.no_sync
    wrapped(rows(ROWS - dist.get_rank())).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("how", ["reentrant", "nested", "nested, no_sync"])
def test_1_2_3_ddp_marks_each_parameter_once(how: str) -> None:
    # 1: a reentrant region with offload. 2: a backward pass per tile. 3: no_sync around those.
    with pytest.raises(RanksFailed, match=r"marked as ready twice|ready only once"):
        run_ranks(2, job_ddp, how, False)
    for find_unused in (False, True):
        for ours, plain in zip(
            run_ranks(2, job_ddp, "ours", find_unused),
            run_ranks(2, job_ddp, "plain", find_unused),
            strict=True,
        ):
            assert_close(ours, plain)


# -- 4, 5, 6: the wrong factor --------------------------------------------------------------------


def test_4_a_hook_on_a_parameter_sees_the_total_once() -> None:
    module, x = mlp(), rows()
    handles = [p.register_hook(lambda grad: grad.clamp(-0.1, 0.1) * 3) for p in module.parameters()]
    plain = grads_of(module, module, x)

    def nested(x: torch.Tensor) -> torch.Tensor:
        return NestedBackward.apply(x, module, CHUNK, torch.enable_grad)

    assert far(grads_of(module, nested, rows().requires_grad_()), plain)
    assert_close(grads_of(module, anyrank.tile(module, chunk_size=CHUNK), x), plain)
    for handle in handles:
        handle.remove()
    assert not far(grads_of(module, nested, rows().requires_grad_()), grads_of(module, module, x))


class WritesAndReturns(torch.autograd.Function):
    """A head that adds to `.grad` in backward and returns the gradient as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        found = (grad.transpose(1, 2) @ x)[0]
        ctx.weight.grad = found if ctx.weight.grad is None else ctx.weight.grad + found
        return grad @ ctx.weight, found


def test_5_a_gradient_is_not_counted_twice() -> None:
    head, x = nn.Linear(WIDTH, 7, bias=False).double(), rows()
    plain = grads_of(head, head, x)
    peer = grads_of(head, lambda x: WritesAndReturns.apply(x, head.weight), x)
    assert_close([peer[0] / 2], plain)
    assert_close(grads_of(head, anyrank.tile(head, chunk_size=3), x), plain)


def test_6_a_mean_is_one_division() -> None:
    head, hidden = nn.Linear(WIDTH, 7).double(), rows()
    labels = torch.arange(ROWS).reshape(1, ROWS) % 7
    labels[0, :3] = -100
    plain = F.cross_entropy(head(hidden)[0], labels[0])
    tiles = zip(hidden.split(CHUNK, 1), labels.split(CHUNK, 1), strict=True)
    means = torch.stack([F.cross_entropy(head(h)[0], y[0]) for h, y in tiles]).mean()
    assert not torch.allclose(means, plain)
    torch.testing.assert_close(anyrank.tiled_loss(head, hidden, labels, chunk_size=CHUNK), plain)


# -- 7, 8, 9, 10: offload -------------------------------------------------------------------------


def test_7_a_copy_is_finished_before_its_source_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Late(torch.device("cpu"))

    def early(x: torch.Tensor) -> torch.Tensor:
        host = torch.empty(x.numel(), dtype=x.dtype)
        done = lanes.to_host(host.view(torch.uint8), x.flatten().view(torch.uint8).clone(), ())
        done.synchronize()  # too late: the clone is gone
        return host.reshape(x.shape)

    x = rows()
    assert not torch.equal(early(x), x)
    monkeypatch.setattr(offload_engine, "CopyEngine", Late)
    module = mlp()
    plain = grads_of(module, module, x)
    offload = anyrank.Offload(1 << 20, min_bytes=1, keep_last=0, force=True)
    ours = grads_of(module, lambda x: anyrank.recompute(module, x * 1, offload=offload), x)
    assert_close(ours, plain)
    assert offload.stats().copied_bytes


class ByAddress:
    """Keeps one host copy per address."""

    def __init__(self) -> None:
        self.copies: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> int:
        self.copies.setdefault(tensor.data_ptr(), tensor.clone())
        return tensor.data_ptr()

    def unpack(self, address: int) -> torch.Tensor:
        return self.copies[address]


def test_8_views_of_one_storage_are_told_apart() -> None:
    weight = torch.randn(ROWS, ROWS, dtype=torch.float64, requires_grad=True)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.sin() * b.cos()

    def grad(result: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(result.sum(), weight))

    x = weight * 1
    plain = grad(fn(x, x.t()))
    peer = ByAddress()
    x = weight * 1
    with torch.autograd.graph.saved_tensors_hooks(peer.pack, peer.unpack):
        assert far(grad(fn(x, x.t())), plain)
    offload = anyrank.Offload(1 << 20, min_bytes=1, keep_last=0, force=True)
    x = weight * 1
    assert_close(grad(anyrank.recompute(fn, x, x.t(), offload=offload)), plain)
    assert offload.stats().copied_bytes == x.numel() * 8  # once for both


class Stash:
    """Numbers what is saved, for all graphs together, and forgets at the first tensor of a step."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> int:
        self.tensors[len(self.tensors)] = tensor.clone()
        return len(self.tensors) - 1

    def unpack(self, number: int) -> torch.Tensor:
        return self.tensors.pop(number)


def test_9_a_forward_pass_without_backward_leaves_nothing_behind() -> None:
    module, x = mlp(), rows()
    peer = Stash()
    with torch.autograd.graph.saved_tensors_hooks(peer.pack, peer.unpack):
        for _ in range(3):
            module(x.requires_grad_())  # evaluation, with the loss thrown away
    assert len(peer.tensors) > 3
    offload = anyrank.Offload(1 << 20, min_bytes=1, keep_last=0, force=True)
    for _ in range(3):
        anyrank.recompute(module, x * 1, offload=offload)
        with torch.no_grad():
            anyrank.recompute(module, x * 1, offload=offload)
    assert offload.stats().used_bytes == 0
    plain = grads_of(module, module, x)
    assert_close(
        grads_of(module, lambda x: anyrank.recompute(module, x, offload=offload), x), plain
    )


def test_10_host_memory_is_what_is_stored_and_ends_with_close() -> None:
    nbytes = (1 << 20) + 8
    power_of_two = 1 << (nbytes - 1).bit_length()
    assert power_of_two > 1.9 * nbytes
    pool = HostPool(10 * nbytes)
    taken: list[Any] = []
    for _ in range(4):
        taken.append(pool.take(nbytes, torch.device("cpu")))
        pool.returned.append(taken[-1])
    assert pool.held_bytes == nbytes
    assert all(buffer is taken[0] for buffer in taken)
    pool.close()
    assert pool.held_bytes == 0


# -- 11: collectives in tiles ---------------------------------------------------------------------


def job_unit_in_tiles(how: str) -> list[Any]:
    module = mlp()
    plain = copy.deepcopy(module)
    if how == "inside":
        anyrank.tile_(module, "", chunk_size=CHUNK)
    unit: Any = fully_shard(module, reshard_after_forward=True)
    fn: Any = unit
    x = rows(ROWS if dist.get_rank() else 3)
    if how == "peer":
        fn = lambda x: torch.cat([unit(part) for part in x.split(CHUNK, 1)], 1)  # noqa: E731
    elif how == "loss":
        labels = torch.zeros(x.shape[:2], dtype=torch.int64)
        fn = lambda x: anyrank.tiled_loss(unit, x, labels, chunk_size=CHUNK)  # noqa: E731
    elif how != "inside":
        fn = anyrank.tile(unit, chunk_size=CHUNK)
        if how == "equal":
            x = rows(ROWS - dist.get_rank())
    ours = [grad.full_tensor() for grad in grads_of(module, fn, x)]
    expected = grads_of(plain, plain, x)
    for grad in expected:
        dist.all_reduce(grad)
    assert_close(ours, [grad / dist.get_world_size() for grad in expected])
    return [p.grad is not None for p in module.parameters()]


def test_11_ranks_with_different_numbers_of_tiles_do_not_wait_for_each_other() -> None:
    with pytest.raises(RanksFailed):
        run_ranks(2, job_unit_in_tiles, "peer", timeout=4)
    for how in ("ours", "loss"):
        with pytest.raises(RanksFailed, match="between 1 and 3") as caught:
            run_ranks(2, job_unit_in_tiles, how)
        assert "RankError" in str(caught.value)
    for how in ("inside", "equal"):
        assert run_ranks(2, job_unit_in_tiles, how) == [[True] * 4] * 2


# -- 12: what is not seen -------------------------------------------------------------------------


def test_12_tensors_in_keywords_and_containers_are_moved() -> None:
    def fn(inputs: dict[str, Any], *, mask: torch.Tensor) -> torch.Tensor:
        return (inputs["hidden"][0] * mask).tanh()

    def moved(call: Callable[..., torch.Tensor], **options: Any) -> int:
        packed: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.numel())
            return tensor

        x = rows().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call(fn, {"hidden": [x]}, mask=rows(), **options).sum().backward()
        return sum(packed)

    assert moved(checkpoint, use_reentrant=False) == 0
    assert moved(anyrank.recompute) == 2 * ROWS * WIDTH
