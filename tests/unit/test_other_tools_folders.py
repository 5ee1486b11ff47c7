"""A folder with another tool's checkpoint is never an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.runs import resume, save
from torch import nn

import anyrank
from anyrank.testing import run_ranks

DIST = {"model": {"weight": torch.ones(2)}}
TENSORS = {"weight": torch.ones(2)}


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def stock_dcp(folder: Path) -> None:
    dcp.save(DIST, checkpoint_id=folder, no_dist=True)


MAKERS = {
    "dcp": stock_dcp,
    "torchtitan": lambda folder: stock_dcp(folder / "step-10"),
    "torchtitan, as wide as a run": lambda folder: stock_dcp(folder / "step-00000010"),
    "accelerate": lambda folder: touch(folder, "optimizer.bin", "random_states_0.pkl"),
    "accelerate with FSDP": lambda folder: touch(folder, "pytorch_model_fsdp_0/__0_0.distcp"),
    "deepspeed": lambda folder: touch(folder, "latest", "global_step7/mp_rank_00.pt"),
    "trainer": lambda folder: touch(folder, "checkpoint-500/model.safetensors"),
    "lightning": lambda folder: touch(folder, "epoch=3-step=100.ckpt"),
    "sharded safetensors": lambda folder: touch(folder, "model.safetensors.index.json"),
    "safetensors": lambda folder: save_file(TENSORS, folder / "model.safetensors"),
    "torch": lambda folder: torch.save(TENSORS, folder / "weights.pt"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", ["auto", "must"])
@pytest.mark.parametrize("tool", MAKERS)
def test_another_tools_checkpoint_is_an_error_with_its_way_out(
    tmp_path: Path, tool: str, which: str
) -> None:
    MAKERS[tool](tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(anyrank.CheckpointError, match=r"another tool saved.*anyrank\.load\(model"):
        resume(tmp_path, anyrank.TrainState(nn.Linear(1, 1)), which)
    after = sorted(path.name for path in tmp_path.iterdir() if "lock" not in path.name)
    assert after == before


def test_a_file_in_the_folders_place_is_an_error(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "weights.pt")
    with pytest.raises(anyrank.CheckpointError, match=r"weights.pt \(a file\)"):
        resume(tmp_path / "weights.pt", anyrank.TrainState(nn.Linear(1, 1)))


def test_a_step_in_the_runs_place_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, anyrank.TrainState(nn.Linear(1, 1)))
    with pytest.raises(
        anyrank.CheckpointError, match="is one step of a run: give the run's folder"
    ):
        resume(tmp_path / "step-00000000", anyrank.TrainState(nn.Linear(1, 1)))


def test_unrelated_files_are_an_empty_folder(tmp_path: Path) -> None:
    assert resume(tmp_path / "none", anyrank.TrainState(nn.Linear(1, 1))) is None
    touch(tmp_path, "README.md", "config.json", "train.log", "logs/events.tfevents.1")
    touch(tmp_path, "step-00000003.tmp-0123abcd-0123abcd/__0_0.distcp", "checkpoint-1/notes.txt")
    assert resume(tmp_path, anyrank.TrainState(nn.Linear(1, 1))) is None


def _resume(path: str) -> str:
    try:
        resume(path, anyrank.TrainState(nn.Linear(1, 1)))
    except anyrank.CheckpointError as error:
        return str(error)
    return ""


def test_every_rank_raises_the_error(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors")
    for text in run_ranks(2, _resume, str(tmp_path)):
        assert "what another tool saved" in text
