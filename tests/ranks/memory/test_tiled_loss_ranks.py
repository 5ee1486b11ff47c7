"""`tiled_loss` and `tile_` beside tensor parallelism, and means over the tokens of all ranks."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import RanksFailed, run_ranks

WIDTH, VOCAB, TOKENS = 4, 12, 8
D = torch.float64


class Net(nn.Module):
    """A norm and a head; the loss is ours, or that of all logits at once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=D)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=D)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, kind: str = "head") -> torch.Tensor:
        hidden: Any = self.norm(x)

        def capped(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits: Any = self.head(hidden)
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            return F.cross_entropy(3 * torch.tanh(logits / 3), labels, reduction="none")

        if kind == "plain":
            return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        if kind == "plain capped":
            return capped(hidden.flatten(0, 1), labels.flatten()).mean()
        fn = self.head if kind == "head" else capped
        return anyrank.tiled_loss(fn, hidden, labels, chunk_size=3)


HEADS: dict[str, Any] = {
    "whole logits": ColwiseParallel(output_layouts=Replicate()),
    "sharded logits": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    "rowwise": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "takes shards": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
    "not parallel": None,
}


PLAIN = {"head": "plain", "capped": "plain capped"}


def job_tensor_parallel(kind: str) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrong: list[str] = []
    for name, head in HEADS.items():
        for sequence in (False, True):
            if name == "takes shards" and not sequence:
                continue
            grads: list[list[torch.Tensor]] = []
            for ours in (False, True):
                torch.manual_seed(0)
                net = Net()
                x = torch.randn(2, TOKENS, WIDTH, dtype=D)
                labels = torch.randint(VOCAB, (2, TOKENS))
                if ours:
                    plan: dict[str, Any] = {"head": head} if head else {}
                    if sequence:
                        plan["norm"] = SequenceParallel()
                        x = distribute_tensor(x, mesh, [Shard(1)])
                    parallelize_module(net, mesh, plan)
                parallel = loss_parallel() if ours and head else contextlib.nullcontext()
                with parallel:
                    loss = net(x, labels, kind if ours else PLAIN[kind])
                    loss.backward()
                grads.append([loss.detach(), *(whole(p) for p in net.parameters())])
            wrong += [
                f"{name}, sequence parallel {sequence}: {n}"
                for n, (mine, wanted) in enumerate(zip(*reversed(grads), strict=True))
                if not torch.allclose(mine, wanted, rtol=1e-10, atol=1e-12)
            ]
    return wrong


def whole(parameter: nn.Parameter) -> Any:
    grad: Any = parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


@pytest.mark.parametrize("kind", PLAIN)
def test_heads_sharded_over_the_vocabulary_and_sequence_parallel_states_are_right(
    kind: str,
) -> None:
    assert run_ranks(2, job_tensor_parallel, kind) == [[]] * 2


def job_part_of_the_logits() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: list[str] = []
    net = parallelize_module(Net(), mesh, {"head": ColwiseParallel()})
    x, labels = torch.randn(2, TOKENS, WIDTH, dtype=D), torch.zeros(2, TOKENS, dtype=torch.long)
    try:
        net(x, labels)
    except ValueError as error:
        found.append(str(error))
    mlp = nn.Sequential(nn.Linear(WIDTH, 6, dtype=D), nn.Linear(6, WIDTH, dtype=D))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(1))}
    mlp = parallelize_module(mlp, mesh, plan)
    for value in (x, distribute_tensor(x, mesh, [Shard(1)])):
        try:
            anyrank.tile(mlp, chunk_size=4)(value)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_part_of_the_logits_or_of_the_rows_is_refused_by_name() -> None:
    logits, rows, argument = run_ranks(2, job_part_of_the_logits)[0]
    assert "returns 6 of 12 logits. It is sharded over the vocabulary" in logits
    assert "sequence parallel" in rows
    assert "args[0] is a DTensor" in argument


def job_count(wrapper: str) -> bool:
    """The mean over the tokens of all ranks, of which each has another number."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(size, 1, TOKENS, WIDTH, dtype=D)
    labels = torch.randint(VOCAB, (size, 1, TOKENS))
    labels[0, 0, :5] = -100
    hidden = net.norm(x)
    plain = F.cross_entropy(net.head(hidden).flatten(0, 2), labels.flatten())
    wanted = torch.autograd.grad(plain, list(net.parameters()))
    model = DistributedDataParallel(net) if wrapper == "ddp" else fully_shard(net)
    tokens = (labels[rank] != -100).sum()
    dist.all_reduce(tokens)
    net.forward = lambda x, y: anyrank.tiled_loss(  # type: ignore[method-assign]
        net.head, net.norm(x), y, chunk_size=3, count=tokens / size
    )
    model(x[rank], labels[rank]).backward()
    found = [whole(p) for p in net.parameters()]
    return all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_count_as_documented_gives_the_mean_over_the_tokens_of_all_ranks(wrapper: str) -> None:
    assert run_ranks(2, job_count, wrapper) == [True] * 2


def job_unit_in_tiles(how: str) -> list[bool]:
    """Ranks with different numbers of rows, where each call of the module is a collective."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))
    module, plain = layers.double(), copy.deepcopy(layers)
    if how == "inside":
        anyrank.tile_(module, "", chunk_size=4)
    unit: Any = fully_shard(module, reshard_after_forward=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(1, 10 - rank if how == "equal" else (3, 10)[rank], WIDTH, dtype=D)
    fn: Any = unit
    if how == "loss":
        labels = torch.zeros(x.shape[:2], dtype=torch.int64)
        fn = lambda x: anyrank.tiled_loss(unit, x, labels, chunk_size=4)  # noqa: E731
    elif how != "inside":
        fn = anyrank.tile(unit, chunk_size=4)
    fn(x).sin().sum().backward()
    plain(x).sin().sum().backward()
    for ours, expected in zip(module.parameters(), plain.parameters(), strict=True):
        dist.all_reduce(expected.grad)
        torch.testing.assert_close(whole(ours), expected.grad / size)
    return [parameter.grad is not None for parameter in module.parameters()]


def test_ranks_with_different_numbers_of_tiles_do_not_wait_for_each_other() -> None:
    for how in ("around", "loss"):
        with pytest.raises(RanksFailed, match="between 1 and 3") as caught:
            run_ranks(2, job_unit_in_tiles, how)
        assert "RankError" in str(caught.value)
    for how in ("inside", "equal"):
        assert run_ranks(2, job_unit_in_tiles, how) == [[True] * 4] * 2
