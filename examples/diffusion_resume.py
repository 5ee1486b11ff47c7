"""A small diffusion model: start from weights, or go on with a run, on any number of ranks.

    torchrun --nproc-per-node 7 examples/diffusion_resume.py --folder runs/a --stop 12
    torchrun --nproc-per-node 6 examples/diffusion_resume.py --folder runs/a --resume
    python examples/diffusion_resume.py --folder runs/b --load-from runs/a --seed 1

--resume is the whole run: weights, their average, optimizer, schedule, position in the data and
random numbers. --load-from is weights alone, for a new run with a data order and random numbers of
its own. Nothing is downloaded: the images are made here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import anyrank

SIZE, WIDTH, STEPS = 8, 16, 28


class Images(torch.utils.data.Dataset[Tensor]):
    """Colored discs, each drawn from its number, and mirrored at random."""

    def __len__(self) -> int:
        return 168

    def __getitem__(self, index: int) -> Tensor:
        drawn = torch.rand(6, generator=torch.Generator().manual_seed(index))
        y, x = torch.meshgrid(*[torch.linspace(0, 1, SIZE)] * 2, indexing="ij")
        disc = ((y - drawn[0]) ** 2 + (x - drawn[1]) ** 2 < drawn[2] / 4).float()
        image = (2 * drawn[3:, None, None] - 1) * disc
        return image.flip(-1) if torch.rand(()) < 0.5 else image  # seeded by epoch and sample


class Denoiser(nn.Module):
    """Images [n, 3, SIZE, SIZE] at times [n, 1] -> the noise in them, of the images' shape."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.Sequential(nn.GroupNorm(4, WIDTH), nn.SiLU(), nn.Dropout(0.1))
        self.leave = nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        return self.leave(self.norm(self.enter(images) + self.time(times)[:, :, None, None]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. A run starts anew, from weights, or goes on; never two of these."""
    parser = argparse.ArgumentParser(description="Train a small diffusion model.")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--load-from", help="weights for a new run: a file, or another run's folder")
    start.add_argument("--resume", action="store_true", help="go on with the run in --folder")
    parser.add_argument("--folder", default="runs/diffusion", help="of the run's checkpoints")
    parser.add_argument("--seed", type=int, help="of the run; default 0")
    parser.add_argument("--stop", type=int, default=STEPS, help="save and stop after this step")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    args = parser.parse_args(arguments)
    if args.load_from and args.seed is None:
        parser.error("--load-from starts a new run: give it a --seed of its own")
    ckpts = anyrank.Checkpoints(args.folder, anyrank.TrainState())  # only to look
    if not args.resume and ckpts.latest() is not None:
        parser.error(f"{args.folder} holds a run: give --resume, or another --folder")
    return args


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Build, start or resume, train; the losses by step, the report, the loader and the average."""
    args = parse(arguments)
    torch.manual_seed(seed := args.seed or 0)
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    on = f"cuda:{dist.get_node_local_rank(0)}" if torch.cuda.is_available() else "cpu"
    device, dtype = torch.device(on), torch.float64 if args.double else torch.float32
    net = Denoiser().to(device, dtype)
    if args.load_from:
        anyrank.load(net, args.load_from)
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = anyrank.ElasticLoader(Images(), global_batch=24, microbatch=1, seed=seed)
    state = anyrank.TrainState(model, optimizer, scheduler=cosine, data=loader, seed=seed, ema=ema)
    losses: dict[int, float] = {}
    with anyrank.Checkpoints(args.folder, state, every=7) as ckpts:
        report = ckpts.resume("must") if args.resume else None
        for step in ckpts.steps(until=args.stop):
            for images in step.microbatches(model):
                clean = images.to(device, dtype)
                noise, times = torch.randn_like(clean), torch.rand_like(clean[:, :1, 0, 0])
                found = model(torch.lerp(clean, noise, times[:, :, None, None]), times)
                step.backward(nn.functional.mse_loss(found, noise))
            losses[step.number] = step.loss()
            optimizer.step()
            optimizer.zero_grad()
            cosine.step()
            ema.update_parameters(net)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(report or f"a new run with {args.load_from or 'first'} weights")
        print("loss", *(f"{loss:.3f}" for loss in losses.values()))
    if dist.is_torchelastic_launched():
        dist.destroy_process_group()
    return {"losses": losses, "report": report, "loader": loader, "ema": ema.state_dict()}


if __name__ == "__main__":
    main()
