"""The transformers Trainer and LoRA, on any number of ranks: `elastic` is the line that is new.

torchrun --nproc-per-node 3 examples/trainer_resume.py --folder runs/a --stop 4
torchrun --nproc-per-node 2 examples/trainer_resume.py --folder runs/a     # goes on from there
python examples/trainer_resume.py --folder runs/a --adapter adapter/
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from anyrank.integrations import peft
from anyrank.integrations.transformers import elastic, enable_recompute

STEPS, ROWS, TOKENS = 12, 56, 16


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Counting, from anywhere, with another number of tokens to learn in each row."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(TOKENS) + index) % 64
        labels = tokens.clone()
        labels[: index % 9] = -100
        return {"input_ids": tokens, "labels": labels}


class Stop(TrainerCallback):
    """Ends the training early, as a job that is cut short does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


def make_model() -> torch.nn.Module:
    """A small language model with adapters; its frozen base is "downloaded" by its seed."""
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, **sizes, **heads))
    lora = LoraConfig(r=8, lora_dropout=0.1, target_modules="all-linear")
    return get_peft_model(model, lora).double()


def main(arguments: Sequence[str] | None = None) -> Any:
    """Train as far as --stop; the trainer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/trainer")
    parser.add_argument("--stop", type=int, default=STEPS)
    parser.add_argument("--adapter", help="write the adapter to this folder")
    args = parser.parse_args(arguments)
    model = make_model()
    enable_recompute(model)
    training = TrainingArguments(
        f"{args.folder}-logs",
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
    )
    trainer = Trainer(model, training, train_dataset=Rows(), callbacks=[Stop(args.stop)])
    trainer = elastic(trainer, args.folder, global_batch=12, every="10min", base="seed 0")
    trainer.train(resume_from_checkpoint=True)
    if args.adapter:
        peft.save(model, args.adapter)
    return trainer


if __name__ == "__main__":
    main()
