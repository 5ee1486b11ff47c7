"""Runs of the transformers Trainer go on as runs of anyrank, with the losses of its own resume.

The folders are written by the Trainer itself. All samples are alike, so that losses depend on the
weights alone and not on the Trainer's order of samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integrations import tools
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks

transformers = pytest.importorskip("transformers")

SAMPLE = {"input_ids": torch.arange(1, 9), "labels": torch.arange(1, 9)}
STEPS, SAVED = 6, 3


def model(seed: int) -> Any:
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    return transformers.Qwen2ForCausalLM(config).double()


def trainer_of(folder: str, seed: int) -> Any:
    options = transformers.TrainingArguments(
        folder, max_steps=STEPS, save_steps=SAVED, logging_steps=1, learning_rate=1e-2,
        weight_decay=0.1, max_grad_norm=0.0, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], disable_tqdm=True, warmup_steps=2, adam_epsilon=1e-6,
    )  # fmt: skip
    return transformers.Trainer(model(seed), options, train_dataset=[SAMPLE] * 16)


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row][SAVED:]


def job_trainer(folder: str) -> list[float]:
    with tools.new_accelerate():
        trainer_of(folder, 0).train()
        again = trainer_of(folder, 1)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}")
        return losses_of(again)


def groups_of(net: Any) -> list[dict[str, Any]]:
    """As the Trainer makes them: what is decayed, and biases and norms that are not."""
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    rest = [p for name, p in named if "norm" in name or name.endswith("bias")]
    decay = [p for _, p in named if not any(p is other for other in rest)]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def job_adopt(source: str, folder: str, layout: str) -> tuple[list[float], anyrank.ResumeReport]:
    net = model(1)
    if layout == "fsdp":
        for layer in net.model.layers:
            fully_shard(layer)
        fully_shard(net)
    elif dist.is_initialized():
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(groups_of(net), lr=1e-2, eps=1e-6)
    scheduler = transformers.get_scheduler("linear", optimizer, 2, STEPS)
    data = anyrank.ElasticLoader([SAMPLE] * 16, global_batch=4, microbatch=1)
    state = anyrank.TrainState(net, optimizer, scheduler=scheduler, data=data)
    losses: list[float] = []
    with anyrank.Checkpoints(folder, state) as ckpts:
        report = ckpts.resume(source)
        assert report is not None
        assert state.step == SAVED
        for step in ckpts.steps(until=STEPS):
            total = torch.zeros((), dtype=torch.float64)
            for rows in step.microbatches(net):
                loss = net(**rows).loss
                step.backward(loss)
                total = loss.detach()
            losses.append(total.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert ckpts.saved()[0].step == STEPS
    return losses, report


@pytest.mark.filterwarnings("ignore")
def test_trainer(tmp_path: Path) -> None:
    for world in (1, 2):
        source = tmp_path / f"trainer-{world}"
        expected = run_ranks(world, job_trainer, str(source))[0]
        names = {path.name for path in (source / "checkpoint-3").iterdir()}
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= names
        for other, layout in ((2, "fsdp"),) if world == 1 else ((1, "plain"), (3, "ddp")):
            folder = str(tmp_path / f"run-{world}-{other}")
            for losses, report in run_ranks(
                other, job_adopt, str(source / "checkpoint-3"), folder, layout
            ):
                torch.testing.assert_close(
                    losses, expected, rtol=1e-6, atol=1e-6
                )  # its loss is in float32
                assert (report.step, report.saved_on.ranks) == (3, world)
                assert report.components["scheduler"] == "exact"
                assert report.components["data"].reason.startswith("epoch 0 restarts")
