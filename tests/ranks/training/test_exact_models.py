"""Promise 9 with exact=True on models as people train: LoRA, a denoising UNet, tiled losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tests.ranks.exact_runs import KINDS, digests_on, run, wrap
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import anyrank


def train(net: nn.Module, loader: anyrank.ElasticLoader, loss_of: Any) -> str:
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return run(net, optimizer, loader, loss_of, clip=1.0)


class Texts(torch.utils.data.Dataset[Any]):
    """Sample i: up to 13 tokens of an alphabet of 37."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, i: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(i)
        return torch.randint(0, 37, (3 + 5 * i % 11,), generator=g)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    """Samples of a microbatch, as long as its longest; -100 where one has ended."""
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)


def texts() -> anyrank.ElasticLoader:
    return anyrank.ElasticLoader(
        Texts(), global_batch=10, microbatch=2, collate_fn=padded, exact=True
    )


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 41, "vocab_size": 37}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **heads))


def lora(kind: str) -> str:
    """Adapters with dropout on a frozen Llama."""
    targets = ["q_proj", "v_proj", "down_proj"]
    net: Any = get_peft_model(llama(), LoraConfig(r=3, lora_dropout=0.2, target_modules=targets))
    net = wrap(net, kind, *net.base_model.model.model.layers)

    def loss_of(net: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        ids, mask = batch.clamp(min=0), batch >= 0
        loss = net(input_ids=ids, attention_mask=mask, labels=batch).loss
        return loss, float((batch[:, 1:] >= 0).sum())

    return train(net, texts(), loss_of)


class Tiled(nn.Module):
    """A Llama whose loss is computed in tiles, as many as a microbatch's tokens need."""

    def __init__(self) -> None:
        super().__init__()
        whole = llama()
        self.body, self.head = whole.model, whole.lm_head

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.body(input_ids=batch.clamp(min=0)).last_hidden_state
        return anyrank.tiled_loss(self.head, hidden[:, :-1], batch[:, 1:], chunk_size=5)


def tiled(kind: str) -> str:
    net: Any = Tiled()
    net = wrap(net, kind, *net.body.layers)
    return train(net, texts(), lambda net, batch: (net(batch), float((batch[:, 1:] >= 0).sum())))


class Pictures(torch.utils.data.Dataset[Any]):
    """Sample i: a picture of 8 x 8, flipped and shifted at random."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> torch.Tensor:
        picture = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(i))
        picture = picture.flip(-1) if torch.rand(()) < 0.5 else picture
        return picture.roll(int(torch.randint(0, 8, ())), dims=-1)


class Residual(nn.Module):
    """Two convolutions with GroupNorm, the time and dropout between them, and a way around."""

    def __init__(self, width: int, out: int, splits: bool) -> None:
        super().__init__()
        self.splits = splits
        self.first = nn.Sequential(
            nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, out, 3, 1, 1)
        )
        self.time = nn.Linear(16, out)
        self.second = nn.Sequential(
            nn.GroupNorm(2, out), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(out, out, 3, 1, 1)
        )
        self.around = nn.Conv2d(width, out, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        # FSDP2 adds up the gradients of both uses before that of the skip connection.
        x = x.view_as(x) if self.splits else x
        h = self.first(x) + self.time(time)[:, :, None, None]
        return self.around(x) + self.second(h)


class UNet(nn.Module):
    """Predicts the noise in a picture: down, attention in the middle, and up."""

    def __init__(self, splits: bool) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter = nn.Conv2d(3, 6, 3, padding=1)
        sizes = ((6, 10), (10, 10), (16, 6))
        self.blocks = nn.ModuleList([Residual(*size, splits) for size in sizes])
        self.down = nn.Conv2d(10, 10, 3, 2, 1)
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(10, 10, 2, 2)
        self.leave = nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, noise_level: torch.Tensor) -> torch.Tensor:
        time = self.time(noise_level[:, None])
        skipped = self.enter(x)
        h = self.down(self.blocks[0](skipped, time))
        h = self.blocks[1](h, time)
        tokens = h.flatten(2).transpose(1, 2)
        h = h + self.attention(tokens, tokens, tokens)[0].transpose(1, 2).reshape(h.shape)
        return self.leave(self.blocks[2](torch.cat([self.up(h), skipped], 1), time))


def unet(kind: str, splits: bool = True) -> str:
    """A diffusion model, whose pictures are augmented by a worker; the last step is short."""
    torch.manual_seed(0)
    net: Any = UNet(splits)
    net = wrap(net, kind, *net.blocks)

    def loss_of(net: nn.Module, pictures: torch.Tensor) -> tuple[torch.Tensor]:
        level, noise = torch.rand(len(pictures)), torch.randn_like(pictures)
        mixed = pictures.lerp(noise, level[:, None, None, None])
        return (F.mse_loss(net(mixed, level), noise),)

    loader = anyrank.ElasticLoader(
        Pictures(), global_batch=8, microbatch=2, num_workers=1, exact=True
    )
    return train(net, loader, loss_of)


def job_models() -> dict[str, str]:
    found = {f"{of.__name__} {kind}": of(kind) for of in (lora, unet, tiled) for kind in KINDS}
    return found | {"unet of another order": unet("fsdp", splits=False)}


@pytest.mark.exact_fsdp
def test_promise_9_the_same_bits_of_real_models() -> None:
    alone = digests_on((3,), job_models)
    for name in ("lora", "unet", "tiled"):
        assert len({alone[f"{name} {kind}"] for kind in KINDS}) == 1, name
    assert len(set(alone.values())) == 3
