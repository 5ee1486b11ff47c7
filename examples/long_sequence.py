"""A small transformer at a sequence length that plain training cannot reach within a memory limit.

Tries a plain step first, under a limit of the process's memory, and then trains with recomputed
layers whose inputs wait in host memory, tiled MLPs and a tiled loss, under the same limit.

    python examples/long_sequence.py                   # 4096 tokens, 640 MiB beyond the start
    python examples/long_sequence.py --tokens 16384 --limit-mib 1280
    torchrun --nproc-per-node 2 examples/long_sequence.py
"""

from __future__ import annotations

import argparse
import os
import resource

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import anyrank

WIDTH, HEADS, LAYERS, VOCAB = 128, 4, 4, 16384
MIB = 1 << 20


class Layer(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Returns the loss: with FSDP2 or DDP, all that uses weights is inside of forward."""

    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.tiled = tiled

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        labels = F.pad(tokens[:, 1:], (0, 1), value=-100)  # shifted; the last has none
        if self.tiled:
            return anyrank.tiled_loss(self.head, x, labels, chunk_size=512)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def train(tokens: Tensor, steps: int, tiled: bool) -> list[float]:
    """Losses of some steps on the same text."""
    torch.manual_seed(0)
    model = Model(tiled)
    if tiled:
        offload = anyrank.Offload(pool_bytes=64 * MIB)  # moves nothing on a CPU
        anyrank.tile_(model, "layers.*.mlp", chunk_size=1024)
        anyrank.recompute_(model, "layers.*", offload=offload)
    # A rank that runs out of memory would leave the others waiting: plain has no partners.
    alone = not (tiled and dist.is_initialized())
    wrapped = model if alone else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(steps):
        loss = wrapped(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if tiled:
        print(f"offload: {offload.stats().copied_bytes // MIB} MiB went to the host")
    return losses


def limit_memory(mib: int) -> None:
    """Let this process take so much more memory than it has, and no more."""
    with open("/proc/self/status", encoding="ascii") as file:
        used_kib = next(int(line.split()[1]) for line in file if line.startswith("VmData"))
    _, highest = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used_kib * 1024 + mib * MIB, highest))


def main() -> None:
    """Plain, which fails, then tiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-mib", type=int, default=640)
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    tokens = torch.randint(VOCAB, (1, options.tokens), generator=generator)
    train(tokens[:, :64], 1, True)  # threads and libraries take their memory now
    limit_memory(options.limit_mib)
    try:
        train(tokens, 1, False)
        print("plain: fits")
    except RuntimeError as error:
        print(f"plain: {str(error).splitlines()[0].rpartition('Allocator: ')[2]}")
    print("anyrank:", " ".join(f"{loss:.3f}" for loss in train(tokens, options.steps, True)))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
