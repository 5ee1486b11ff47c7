"""What docs/frameworks.md takes for granted: a Trainer, with its model and data."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

options: dict[str, Any] = {"use_cpu": True, "per_device_train_batch_size": 2, "report_to": []}
options |= {"save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no"}


def make(steps: int) -> Trainer:
    """A quiet Trainer of a tiny Llama on 24 rows."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=2, **sizes))
    rows: Any = [{"input_ids": [n % 16, 1, 2], "labels": [n % 16, 1, 2]} for n in range(24)]
    arguments = TrainingArguments("out", max_steps=steps, **options)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer
