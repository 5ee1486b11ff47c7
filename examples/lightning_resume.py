"""A LightningModule whose run continues on any number of processes: the callback is all there is.

    torchrun --nproc-per-node 3 examples/lightning_resume.py --folder runs/a --stop 7
    torchrun --nproc-per-node 2 examples/lightning_resume.py --folder runs/a

With --strategy fsdp2 the parameters are sharded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import anyrank


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of a sine, with noise."""

    def __init__(self, count: int, noise: float) -> None:
        self.x, self.noise = torch.linspace(-3, 3, count, dtype=torch.float64)[:, None], noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return x + self.noise * torch.randn_like(x), x.sin()


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)
        self.net = nn.Sequential(*layers).double()
        self.losses: dict[int, float] = {}

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for layer in (self.net[0], self.net[3], self.net):
                fully_shard(layer, mesh=self.trainer.strategy.device_mesh["data_parallel"])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses[self.global_step] = float(outputs["loss"])  # over the global batch

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


def main(arguments: Sequence[str] | None = None) -> tuple[Regression, Any]:
    """Train as far as --stop; the module with its losses, and the callback."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/lightning")
    parser.add_argument("--stop", type=int, default=16)
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    sharded = ModelParallelStrategy(data_parallel_size=count, tensor_parallel_size=1)
    elastic = anyrank.integrations.lightning.Elastic(args.folder, global_batch=12, every=5)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=count,
        strategy=sharded if args.strategy == "fsdp2" else "ddp" if count > 1 else "auto",
        max_steps=args.stop,
        gradient_clip_val=1.0,
        check_val_every_n_epoch=2,
        logger=False,
        callbacks=[elastic, *([EMAWeightAveraging(decay=0.9)] if args.strategy == "ddp" else [])],
    )
    module = Regression()
    train = DataLoader(Points(46, noise=0.1), batch_size=2, shuffle=True)
    trainer.fit(module, train, DataLoader(Points(8, noise=0), batch_size=4))
    return module, elastic


if __name__ == "__main__":
    print("loss", *(f"{loss:.3f}" for loss in main()[0].losses.values()))
