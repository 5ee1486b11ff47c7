"""A trainer and a generator on ranks of their own: the generator gets the weights at every step.

    torchrun --nproc-per-node 4 examples/rl_sync.py

FSDP2 trains on the first half of the ranks; tensor parallelism generates on the others. Each step
the generator writes samples with the weights of the step before, the trainer learns from their
rewards, and `anyrank.sync` moves the new weights: each byte once, straight from shard to shard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import anyrank

STEPS, WIDTH, TOKENS, BATCH = 5, 32, 11, 16


class Policy(nn.Module):
    """A next token for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.down(torch.relu(self.up(x))))


def reward(tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """1 where the next token is the next number."""
    return (following == (tokens + 1) % TOKENS).float()


def main() -> None:
    """Train, sync and generate, in turn."""
    dist.init_process_group("gloo")
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    trains = rank < half
    train_mesh = DeviceMesh("cpu", list(range(half)))  # every rank makes every mesh
    generate_mesh = DeviceMesh("cpu", list(range(half, dist.get_world_size())))
    torch.manual_seed(0)
    trainer: Any = None
    generator: Any = None
    if trains:
        trainer = fully_shard(Policy(), mesh=train_mesh)
        optimizer = torch.optim.Adam(trainer.parameters(), lr=3e-2)
    else:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        generator = parallelize_module(Policy(), generate_mesh, plan, src_data_rank=None)

    weights = anyrank.Sync(generator, trainer, verify=True)
    for step in range(STEPS):
        report = weights()
        assert weights.version == step + 1  # on every rank
        samples = torch.zeros(2, BATCH, dtype=torch.long)
        if generator is not None:
            torch.manual_seed(step)
            with torch.no_grad():
                tokens = torch.randint(TOKENS, (BATCH,))
                samples = torch.stack([tokens, torch.randint(TOKENS, (BATCH,))])
                likely = generator(tokens).argmax(-1)
                samples[1] = torch.where(torch.rand(BATCH) < 0.5, likely, samples[1])
        dist.broadcast(samples, half)  # the first generator's
        rewards = reward(*samples)
        if trainer is not None:
            chosen = trainer(samples[0]).log_softmax(-1).gather(1, samples[1:2].T)[:, 0]
            loss = -(chosen * (rewards - rewards.mean())).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: reward {rewards.mean():.2f}, sent {sum(report.bytes_sent)} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
