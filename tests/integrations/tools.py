"""A small training, the same in every tool and in anyrank, so that losses can be compared."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank

STEPS = 6  # of the whole training; a tool saves in the middle
SAVED = 3
ROWS = 12


@contextmanager
def new_accelerate() -> Generator[None, None, None]:
    """Accelerate as in a new process: it keeps state in classes, and a rank serves many jobs."""
    from accelerate.state import AcceleratorState, GradientState

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    forget()
    try:
        yield
    finally:
        forget()


class Net(nn.Module):
    """A tied head, a norm, and a row that most ranks hold nothing of. In float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in "ab"])
        self.scale = nn.Parameter(torch.ones(1, 8))
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def seeded(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with a group for what is not decayed."""
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": decay}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def cosine(optimizer: torch.optim.Optimizer, times: int = 1) -> Any:
    """A schedule over the training; `times` as long, for tools that step once for each process."""

    def curve(n: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * n / (STEPS * times)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, curve)


def move_to(scheduler: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set a schedule that no checkpoint held to a step."""
    scheduler.last_epoch = step
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * scheduler.lr_lambdas[0](step)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one step, on all ranks together."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = torch.randint(0, 17, (ROWS, 2), generator=generator)
    return rows[:, 0], rows[:, 1]


def share_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tokens, labels = batch(step)
    return tokens[rank::world], labels[rank::world]


def loss_of(net: nn.Module, step: int) -> torch.Tensor:
    """The mean loss of this rank's rows."""
    tokens, labels = share_of(step)
    return nn.functional.cross_entropy(net(tokens), labels)


def mean_over_ranks(loss: torch.Tensor) -> float:
    value = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def wrapped(layout: str, net: nn.Module) -> nn.Module:
    if layout == "fsdp":
        for block in net.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        return fully_shard(net)
    return DistributedDataParallel(net) if dist.is_initialized() else net


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, first: int, last: int
) -> list[float]:
    """Steps of the training in plain PyTorch; the losses."""
    losses: list[float] = []
    for step in range(first, last):
        loss = loss_of(net, step)
        loss.backward()
        losses.append(mean_over_ranks(loss))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def job_adopt(
    source: str, folder: str, layout: str, **options: Any
) -> tuple[list[float], anyrank.ResumeReport, list[int]]:
    """Adopt a tool's checkpoint into a run, train to the end in it, and resume that once more.

    The losses, the report, and the steps that the run has in the end.
    """
    net = wrapped(layout, seeded(1))
    optimizer = optimizer_of(net)
    scheduler = cosine(optimizer)
    state = anyrank.TrainState(net, optimizer, scheduler=scheduler)
    with anyrank.Checkpoints(folder, state) as ckpts:
        report = ckpts.resume(source, **options)
        assert report is not None
        losses: list[float] = []
        for step in range(SAVED, STEPS):
            losses += train(net, optimizer, scheduler, step, step + 1)
            ckpts.step_done()
            if step == SAVED:
                ckpts.save()
    with anyrank.Checkpoints(folder, state) as ckpts:
        again = ckpts.resume(source, **options)
        assert again is not None
        assert again.step == state.step == report.step + STEPS - SAVED
        assert any("was ignored" in note for note in again.notes)
        return losses, report, [saved.step for saved in ckpts.saved()]


def job_adopt_each(sources: dict[str, str], folder: str, layout: str) -> dict[str, Any]:
    """As `job_adopt`, for several checkpoints."""
    return {
        name: job_adopt(source, f"{folder}-{layout}-{name}", layout)
        for name, source in sources.items()
    }


def trained() -> tuple[Any, Any, Any]:
    """A net at the step at which the tools save, its optimizer, and its schedule."""
    net = seeded()
    optimizer = optimizer_of(net)
    scheduler = cosine(optimizer)
    train(net, optimizer, scheduler, 0, SAVED)
    return net, optimizer, scheduler


def check_weights(source: Path, to: Path, near: float = 1e-6, beside: str = "") -> None:
    """The weights of a tool's folder are loaded, converted and verified, as those of a file are.

    Args:
        source: the folder of a tool, saved at step SAVED.
        to: a folder for what is converted.
        near: how far the weights may be.
        beside: what else is in the folder, and passed over.
    """
    expected, net = trained()[0].state_dict(), seeded(1)
    loaded = anyrank.load(net, source)
    torch.testing.assert_close(dict(net.state_dict()), dict(expected), rtol=near, atol=near)
    report = anyrank.convert(source, to)
    written = load_file(to / "model.safetensors")
    ties = {"head.weight", "embed.weight"}
    assert expected.keys() - ties <= written.keys() <= expected.keys(), (source, report)
    assert ties & written.keys(), (source, report)
    same = {key: expected[key] for key in written}
    torch.testing.assert_close(written, same, rtol=near, atol=near, check_dtype=False)
    for each in (loaded, report) if beside else ():
        assert f"{beside}: not weights" in each.skipped, (source, each)
    assert anyrank.verify(source), source
