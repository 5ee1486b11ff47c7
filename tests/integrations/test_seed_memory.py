"""The seed case: a vision-language model with LoRA, recomputed with offload and tiled MLPs, on DDP
ranks of which some have no image in a step, and on FSDP2.
"""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from tests.integrations.families import build
from tests.nets import whole
from tests.offloads import offload_of_cpu
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

IMAGE, PATCHES, TOKENS = 95, 4, 14
STEPS = 6  # each rank twice without an image, at other steps than its neighbors


def make(ours: bool) -> Any:
    """Two towers with adapters; everything else is frozen."""
    torch.manual_seed(0)
    base = build("llava").double()
    base.config.text_config.use_cache = False
    names = ["q_proj", "v_proj", "up_proj", "down_proj", "fc1", "fc2", "linear_1"]
    # dropout: the tiles draw in another order than the whole, so it has a test of its own
    adapters = peft.LoraConfig(r=2, target_modules=names, lora_dropout=0.0)
    model = peft.get_peft_model(base, adapters).double()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    if ours:
        offload = offload_of_cpu(1 << 24)
        tiles = anyrank.tile_(model, "**.mlp", chunk_size=3)
        blocks = anyrank.recompute_(model, "**.layers.*", offload=offload)
        assert len(tiles.names) == len(blocks.names) == 4
        model.offload = offload
    return model.train()


def inputs(step: int, rank: int, images: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    length = TOKENS - rank % 3
    tokens = torch.randint(90, (2, length), generator=generator)
    found: dict[str, torch.Tensor] = {"labels": tokens}
    if images:
        tokens[:, 2 : 2 + PATCHES] = IMAGE
        pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
        found["pixel_values"] = pixels
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    return found | {"input_ids": tokens, "attention_mask": mask}


def train(model: Any, wrapped: Any, uneven: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Some steps; losses and the first step's gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05)
    losses: list[float] = []
    grads: list[torch.Tensor] = []
    for step in range(STEPS):
        images = (step + (dist.get_rank() if uneven else 0)) % 3 != 1
        loss = wrapped(**inputs(step, dist.get_rank(), images)).loss
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            # CLIP's last layer is not used: its gradients stay None
            grads = [whole(p.grad).clone() for p in trained if p.grad is not None]
            assert len(grads) > 20
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads


def wrap(model: Any, wrapper: str) -> Any:
    if wrapper == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    for name, module in model.named_modules():
        if name.split(".")[-2:-1] == ["layers"]:
            fully_shard(module)
    return fully_shard(model)


def job(wrapper: str) -> tuple[list[float], list[torch.Tensor], int]:
    outcomes: list[tuple[list[float], list[torch.Tensor]]] = []
    for ours in (False, True):
        model = make(ours)
        outcomes.append(train(model, wrap(model, wrapper), uneven=wrapper == "ddp"))
    (plain_losses, plain), (losses, grads) = outcomes
    for mine, wanted in zip(grads, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-7)
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    stats = model.offload.stats()
    assert stats.used_bytes == 0
    weights = [whole(p.detach()).clone() for p in model.parameters() if p.requires_grad]
    return losses, weights, stats.copied_bytes


@pytest.mark.parametrize(("world", "wrapper"), [(2, "ddp"), (4, "ddp"), (2, "fsdp")])
def test_a_model_of_two_towers_trains_as_the_plain_one(world: int, wrapper: str) -> None:
    found = run_ranks(world, job, wrapper)
    for _, weights, copied in found:
        assert copied > 0
        for mine, first in zip(weights, found[0][1], strict=True):
            assert torch.equal(mine, first)
