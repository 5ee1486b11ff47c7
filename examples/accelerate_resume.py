"""A loop of Accelerate's whose run goes on, on any number of processes.

    torchrun --nproc-per-node 3 examples/accelerate_resume.py --folder runs/a --stop 6
    torchrun --nproc-per-node 2 examples/accelerate_resume.py --folder runs/a

Lines that are not of a script for accelerate itself are marked: three by number, and by a plus two
that ask for the step that was resumed and for the global batch's loss, which it does not know.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from anyrank.integrations.accelerate import Accelerator  # 1: instead of accelerate's

EPOCHS, WARMUP = 4, 5


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of a sine, with noise."""

    def __init__(self, count: int, noise: float) -> None:
        self.x, self.noise = torch.linspace(-3, 3, count, dtype=torch.float64)[:, None], noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return x + self.noise * torch.randn_like(x), x.sin()


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as far as --stop; the losses of the global batches, and what they led to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/accelerate")
    parser.add_argument("--stop", type=int, help="leave after this step")
    args = parser.parse_args(arguments)

    accelerator = Accelerator(cpu=True, folder=args.folder, global_batch=12, every=5)  # 2
    torch.manual_seed(0)
    layers = nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)
    model = nn.Sequential(*layers).double()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / WARMUP))
    train = DataLoader(Points(46, noise=0.1), batch_size=2, shuffle=True)
    test = DataLoader(Points(7, noise=0), batch_size=2)
    model, optimizer, train, test, scheduler = accelerator.prepare(
        model, optimizer, train, test, scheduler
    )
    accelerator.register_for_checkpointing(ema)
    accelerator.load_state()  # 3: also where there is nothing yet

    losses: dict[int, float] = {}
    errors: list[float] = []
    step = accelerator.run.step if accelerator.run else 0  # +
    for _ in range(EPOCHS):
        for x, y in train:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                ema.update_parameters(accelerator.unwrap_model(model))
                losses[step] = accelerator.step_loss()  # +
                if step == args.stop:
                    break
        else:
            ema.eval()
            with torch.no_grad():
                seen = [accelerator.gather_for_metrics((ema(x) - y) ** 2) for x, y in test]
            errors.append(float(torch.cat(seen).mean()))
            continue
        break
    accelerator.save_state()
    accelerator.print("loss", *(f"{loss:.3f}" for loss in losses.values()))
    return {
        "losses": losses,
        "errors": errors,
        "ema": ema,
        "accelerator": accelerator,
        "data": train,
    }


if __name__ == "__main__":
    main()["accelerator"].end_training()
