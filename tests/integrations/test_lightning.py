"""A frozen autoencoder in a LightningModule: the example as users run it, and what it stands on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scripts import run_script

from anyrank.models.dialects.frozen.freeze import check_frozen

pytest.importorskip("lightning")

EXAMPLE = Path(__file__).parents[2] / "examples/frozen_autoencoder.py"
# Lightning's advice, which does not apply to a few steps on one core
QUIET = "ignore:The 'train_dataloader' does not have many workers"


def run(command: list[str], seconds: float) -> str:
    """What a command and its children print; they are all ended after so many seconds."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4], ids=["python", "torchrun"])
def test_the_example_keeps_what_it_promises(num_ranks: int, tmp_path: Path) -> None:
    if num_ranks == 2:  # Lightning starts the second process
        output = run([sys.executable, str(EXAMPLE), str(tmp_path)], 240)
    else:
        output = run_script(num_ranks, str(EXAMPLE), str(tmp_path))[0]
    assert f"{num_ranks} ranks\n" in output
    assert output.count("\nyes ") == 4


@pytest.fixture
def stage_one(tmp_path: Path) -> str:
    """An autoencoder's Lightning checkpoint."""
    from examples.frozen_autoencoder import AutoEncoder

    path = str(tmp_path / "vae.ckpt")
    train(AutoEncoder(), 2).save_checkpoint(path)
    return path


def train(model: Any, steps: int, resume: str | None = None) -> Any:
    """A trainer that has trained for some steps in this process."""
    from examples.frozen_autoencoder import WIDTH
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    off = ["enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
    options = dict.fromkeys(off, False)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=steps, logger=False, **options)
    data = DataLoader(torch.randn(32, WIDTH), batch_size=16)  # two steps an epoch
    trainer.fit(model, data, ckpt_path=resume)
    return trainer


@pytest.mark.filterwarnings(QUIET)
def test_a_run_resumes_from_a_checkpoint_without_the_frozen_part(
    stage_one: str, tmp_path: Path
) -> None:
    from examples.frozen_autoencoder import LatentDiffusion

    path = str(tmp_path / "diffusion.ckpt")
    train(LatentDiffusion(stage_one), 2).save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert {key.split(".")[0] for key in saved["state_dict"]} == {"denoiser"}
    assert len(saved["optimizer_states"][0]["state"]) == len(saved["state_dict"])
    model = LatentDiffusion(stage_one)
    assert train(model, 4, resume=path).global_step == 4
    check_frozen(model.vae)
    assert not model.vae.training
