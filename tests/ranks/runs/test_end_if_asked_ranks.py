"""SIGTERM to one rank in an evaluation: all ranks end, and the step that is done is saved."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.scripts import TORCHRUN
from torch import nn

import anyrank
from anyrank.testing import run_ranks


def train(path: str, until: int) -> tuple[Any, int]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = anyrank.ElasticLoader(torch.randn(96, 4), global_batch=4, microbatch=2)
    state = anyrank.TrainState(model, optimizer, data=loader)
    code = None
    with anyrank.Checkpoints(path, state, every=100) as ckpts:
        ckpts.resume()
        try:
            for step in ckpts.steps(until=until):
                for batch in step.microbatches(model):
                    step.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                for batch in range(3 if step.number == 2 else 0):
                    if batch == dist.get_rank() == 1:
                        signal.raise_signal(signal.SIGTERM)
                    ckpts.end_if_asked()
        except SystemExit as end:
            code = end.code
    return code, state.step


def test_a_signal_to_one_rank_ends_all_with_the_step_saved(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    assert run_ranks(2, train, path, 6) == [(128 + signal.SIGTERM, 3)] * 2
    assert run_ranks(1, train, path, 5) == [(None, 5)]


def under_trainer(folder: Path, steps: int) -> tuple[Any, int]:
    import transformers
    from tests.integrations.test_trainer import arguments, model

    from anyrank.integrations.transformers import elastic

    class Ends(transformers.TrainerCallback):
        def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                signal.raise_signal(signal.SIGTERM)
            trainer.elastic.end_if_asked()

    rows = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 24
    options = arguments(
        str(folder),
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=1,
        lr_scheduler_type="constant",
    )
    made = transformers.Trainer(
        model("plain", torch.float32),
        options,
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
        eval_dataset=rows[:4],  # pyright: ignore[reportArgumentType]
        callbacks=[Ends()],
    )
    trainer: Any = elastic(made, folder / "run", global_batch=4)
    code = None
    try:
        trainer.train(resume_from_checkpoint=True)
    except SystemExit as end:
        code = end.code
    saved = anyrank.Checkpoints(folder / "run", anyrank.TrainState()).saved()
    return code, saved[0].step


def test_an_evaluation_of_the_trainers_ends(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ended = run_ranks(1, under_trainer, tmp_path, 4, env=TORCHRUN)
    assert ended == [(128 + signal.SIGTERM, 2)]
    assert run_ranks(1, under_trainer, tmp_path, 4, env=TORCHRUN) == [(None, 4)]
