"""torchtitan's components in a loop like its trainer's, with anyrank's manager in its place.

torchrun --nproc-per-node 3 examples/torchtitan_resume.py --folder runs/a --stop 4
torchrun --nproc-per-node 2 examples/torchtitan_resume.py --folder runs/a  # goes on
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torchtitan.components.checkpoint import CheckpointManager as Titan
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

import anyrank
from anyrank.integrations.torchtitan import CheckpointManager

STEPS, ROWS, TOKENS, WORDS = 12, 56, 16, 64


class Trainer:
    """The loop; what torchtitan saves as `train_state`."""

    def __init__(self, folder: str) -> None:
        self.step = self.tokens_seen = 0
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        words, head = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)
        self.model = nn.Sequential(words, nn.TransformerEncoder(layer, 2), head).double()
        if dist.is_initialized():
            fully_shard(self.model)
        group = ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "eps": 1e-6}
        )
        config = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
        self.optimizers = OptimizersContainer(config, model_parts=[self.model])
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda n: 1 - n / STEPS)
        rows = (torch.arange(TOKENS) + torch.arange(ROWS)[:, None]) % WORDS
        self.loader = anyrank.ElasticLoader(rows, global_batch=12, microbatch=2)
        self.checkpointer = CheckpointManager(
            Titan.Config(enable=True, interval=4, async_mode="async"),
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            base_folder=folder,
        )

    def train(self, stop: int) -> dict[int, float]:
        """Go on from the last checkpoint as far as `stop`; step -> loss."""
        losses: dict[int, float] = {}
        self.checkpointer.load()
        while self.step < stop:
            for step in self.loader:
                for tokens in step.microbatches(self.model):
                    logits = self.model(tokens[:, :-1])
                    step.backward(cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
                step.clip_grad_norm_(1.0)
                self.optimizers.step()
                self.optimizers.zero_grad()
                self.schedulers.step()
                self.step += 1
                self.tokens_seen += step.samples * TOKENS
                losses[self.step] = step.loss()
                self.loader.commit()
                self.checkpointer.save(self.step, last_step=self.step == stop)
                if self.step == stop:
                    break
        self.checkpointer.close()
        return losses

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "tokens_seen": self.tokens_seen}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.step, self.tokens_seen = saved["step"], saved["tokens_seen"]


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    """Train as far as --stop; step -> loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/torchtitan")
    parser.add_argument("--stop", type=int, default=STEPS)
    args = parser.parse_args(arguments)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
    return Trainer(args.folder).train(args.stop)


if __name__ == "__main__":
    main()
