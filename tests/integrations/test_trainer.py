"""The transformers Trainer with `elastic`: saved on 3, resumed on 2, then on 4, as on one rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import anyrank
from anyrank.integrations.transformers import elastic
from anyrank.testing import run_ranks

ROWS, GLOBAL, EPOCH = 46, 12, 4  # samples, of a step; steps of an epoch, the last one short


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows with labels on some of their tokens; remembers which were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: 12 if index == 5 else index % 7] = -100
        return {"input_ids": ids, "labels": labels}


class Log(TrainerCallback):
    """What the Trainer logs, and stops it after some steps."""

    def __init__(self, stop: int | None) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self.stop = stop

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            lr = logs["learning_rate"]
            line = (state.global_step, logs["epoch"], logs["loss"], lr, logs["grad_norm"])
            self.lines.append(line)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.stop:
            control.should_training_stop = True


def model(kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_dropout=0.1,
    )
    made: Any = transformers.Qwen2ForCausalLM(config)
    if "lora" in kind:
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(made, LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear"))
    made = made.double()
    if "fsdp2" in kind:
        from torch.distributed.fsdp import fully_shard

        for layer in made.model.layers:
            fully_shard(layer)
        fully_shard(made)
    return made


def arguments(out: str, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 9,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "disable_tqdm": True,
        "seed": 1,
        "optim": "adamw_torch",
        "ddp_backend": "gloo",
    }
    return TrainingArguments(out, **(given | more))


def job(out: str, kind: str = "ddp", stop: int | None = None, **more: Any) -> dict[str, Any]:
    """Train on this rank. Returns what it logged and read."""
    AcceleratorState._reset_state(True)
    transformers.logging.set_verbosity_error()
    if "gc" in kind:
        more |= {"gradient_checkpointing": True}
        more |= {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    rows, log = Rows(), Log(stop)
    trainer = Trainer(
        model(kind), arguments(out, **more), train_dataset=rows, callbacks=[log]
    )
    trainer = elastic(trainer, f"{out}/run", global_batch=GLOBAL)
    trainer.train(resume_from_checkpoint=True)
    report, loader, state = trainer.elastic.report, trainer.elastic.loader, trainer.state
    return {
        "lines": log.lines,
        "read": rows.read,
        "step": state.global_step,
        "epoch": state.epoch,
        "flos": state.total_flos,
        "history": [line.get("loss") for line in state.log_history if "loss" in line],
        "components": None if report is None else report.components,
        "receipts": loader.receipts,
        "samples": loader.samples,
    }


@pytest.mark.parametrize("kind", ["ddp", "lora gc", "fsdp2"])
def test_saved_on_3_resumed_on_2_then_on_4_as_on_one_rank(tmp_path: Path, kind: str) -> None:
    (whole,) = run_ranks(1, job, str(tmp_path / "one"), kind)
    parts: list[dict[str, Any]] = []
    for ranks, stop in ((3, 2), (2, 5), (4, None)):
        results = run_ranks(ranks, job, str(tmp_path / "many"), kind, stop=stop)
        assert all(result["lines"] == results[0]["lines"] for result in results)
        parts.append(results[0])
    lines = [line for part in parts for line in part["lines"]]
    print(lines, whole["lines"])
    assert [line[0] for line in lines] == list(range(1, 10))
    for line, expected in zip(lines, whole["lines"], strict=True):
        assert line == pytest.approx(expected, rel=1e-6)
    assert parts[-1]["epoch"] == whole["epoch"]
    assert parts[-1]["flos"] == whole["flos"]
    assert parts[-1]["history"] == pytest.approx(whole["history"], rel=1e-6)
    assert parts[-1]["receipts"] == whole["receipts"]
    assert parts[-1]["samples"] == whole["samples"]
