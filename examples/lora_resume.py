"""LoRA with PEFT in your own loop under FSDP2, on any number of ranks; the run is without the base.

torchrun --nproc-per-node 3 examples/lora_resume.py --folder runs/a --stop 4
torchrun --nproc-per-node 2 examples/lora_resume.py --folder runs/a --adapter adapter/  # goes on
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM

import anyrank
from anyrank.integrations import peft

STEPS, ROWS, TOKENS, WORDS = 12, 56, 16, 64


def make_model() -> nn.Module:
    """A small language model with adapters; its frozen base is "downloaded" by its seed."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    base = Qwen2ForCausalLM(Qwen2Config(vocab_size=WORDS, **sizes, **heads))
    lora = LoraConfig(r=8, lora_dropout=0.1, target_modules="all-linear")
    return get_peft_model(base, lora).double()


def shard(model: nn.Module) -> None:
    """FSDP2, where there are ranks."""
    if dist.is_initialized():
        for layer in model.get_submodule("base_model.model.model.layers").children():
            fully_shard(layer)
        fully_shard(model)


def rows() -> torch.Tensor:
    """Counting, from anywhere."""
    return (torch.arange(TOKENS) + torch.arange(ROWS)[:, None]) % WORDS


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    """Train as far as --stop; step -> loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/lora")
    parser.add_argument("--stop", type=int, default=STEPS)
    parser.add_argument("--adapter", help="write the adapter to this folder")
    args = parser.parse_args(arguments)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
    model = make_model()
    shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = anyrank.ElasticLoader(rows(), global_batch=12, microbatch=2, seed=0)
    state = anyrank.TrainState(
        model, optimizer, scheduler=scheduler, data=loader, base="the model of seed 0"
    )
    losses: dict[int, float] = {}
    with anyrank.Checkpoints(args.folder, state, every=4) as ckpts:
        ckpts.resume()
        for step in ckpts.steps(until=args.stop):
            for tokens in step.microbatches(model):
                logits = model(input_ids=tokens).logits[:, :-1]
                step.backward(cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
            step.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses[step.number + 1] = step.loss()
    if args.adapter:
        peft.save(model, args.adapter)
    return losses


if __name__ == "__main__":
    main()
