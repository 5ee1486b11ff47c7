"""A latent diffusion model around a frozen autoencoder, with Lightning, on one rank or many.

Stage one trains the autoencoder and saves it. Stage two loads it in its constructor, by Lightning's
own loader on every rank, freezes it, and trains a denoiser on its latents.

    python examples/frozen_autoencoder.py                  # two processes, started by Lightning
    torchrun --nproc-per-node 4 examples/frozen_autoencoder.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

import anyrank

WIDTH, LATENT = 16, 4


class AutoEncoder(LightningModule):
    """A small variational autoencoder, with running statistics and dropout that training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 2 * LATENT)
        )
        self.decoder = nn.Linear(LATENT, WIDTH)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, 16] -> a sample of the latent, its mean and its log variance, each [n, 4]."""
        mean, log_var = self.encoder(x).chunk(2, dim=-1)
        noise = torch.randn(mean.shape, device=self.device)
        return mean + noise * (log_var / 2).exp(), mean, log_var

    def training_step(self, x: Tensor, index: int) -> Tensor:
        latent, mean, log_var = self.encode(x)
        divergence = (mean.square() + log_var.exp() - log_var - 1).mean()
        return nn.functional.mse_loss(self.decoder(latent), x) + 1e-3 * divergence

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class LatentDiffusion(LightningModule):
    """A denoiser of the autoencoder's latents."""

    def __init__(self, vae_path: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        with anyrank.cpu_only():  # else every rank lands on the device that the file was saved from
            vae = AutoEncoder.load_from_checkpoint(vae_path)
        self.vae = anyrank.freeze(vae, source=vae_path)
        # A witness for the check below: a broadcast would give all ranks the first one's.
        self.vae.register_buffer("witness", torch.zeros(()), persistent=False)
        self.denoiser = nn.Sequential(nn.Linear(LATENT + 1, 64), nn.SiLU(), nn.Linear(64, LATENT))

    def setup(self, stage: str) -> None:
        self.vae.witness.fill_(self.global_rank)

    def training_step(self, x: Tensor, index: int) -> Tensor:
        assert not any(module.training for module in self.vae.modules())
        latent = self.vae.encode(x)[1]
        noise, time = torch.randn_like(latent), torch.rand(len(latent), 1, device=self.device)
        noisy = (1 - time) * latent + time * noise
        return nn.functional.mse_loss(self.denoiser(torch.cat([noisy, time], dim=-1)), noise)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fit(model: LightningModule, path: str) -> Trainer:
    """Train a model for a few steps on all ranks, and save a Lightning checkpoint."""
    off = ["enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
    options = dict.fromkeys(off, False)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
    trainer = Trainer("cpu", "ddp", devices, max_steps=8, logger=False, **options)
    data = torch.randn(512, LATENT) @ torch.randn(LATENT, WIDTH)
    trainer.fit(model, DataLoader(data, batch_size=16))
    trainer.save_checkpoint(path)
    return trainer


def main(folder: str = "runs/frozen_autoencoder") -> None:
    """Both stages, and what came of them; exit code 1 when something is not as it should be."""
    seed_everything(0)
    vae_path, path = f"{folder}/vae.ckpt", f"{folder}/diffusion.ckpt"
    fit(AutoEncoder(), vae_path)
    model = LatentDiffusion(vae_path)
    trainer = fit(model, path)

    first = torch.load(vae_path)["state_dict"]
    again = LatentDiffusion.load_from_checkpoint(path)
    kept = [torch.equal(m.vae.state_dict()[k], first[k]) for m in (model, again) for k in first]
    mine = (int(model.vae.witness), all(kept), [p.tolist() for p in model.parameters()])
    ranks: list = [mine] * trainer.world_size
    if trainer.world_size > 1:
        dist.all_gather_object(ranks, mine)
    second = [key for key in torch.load(path)["state_dict"] if key.startswith("vae.")]
    results = {
        "the autoencoder was not broadcast": [one[0] for one in ranks] == [*range(len(ranks))],
        "it is as stage one saved it, after training and loaded again": all(o[1] for o in ranks),
        "it is not in stage two's checkpoint": not second,
        "the denoiser is equal on all ranks": all(one[2] == mine[2] for one in ranks),
    }
    if trainer.is_global_zero:
        print(f"{len(ranks)} ranks")
        for name, result in results.items():
            print("yes" if result else "NO ", name)
    if dist.is_initialized():
        dist.destroy_process_group()  # left to the interpreter's end, its threads may abort it
    sys.exit(not all(results.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
