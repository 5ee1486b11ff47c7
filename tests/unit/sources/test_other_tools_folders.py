"""A folder with another tool's checkpoint is never an empty folder."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.runs import resume, save
from torch import nn

import anyrank
from anyrank.files.manifest import STEP
from anyrank.files.object_store import RemoteStorage
from anyrank.runs.adopt.folders import MAX_FOLDERS, find_other_content
from anyrank.sources.endings import ENDINGS
from anyrank.testing import run_ranks

DIST = {"model": {"weight": torch.ones(2)}}
TENSORS = {"weight": torch.ones(2)}


def touch(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


@contextlib.contextmanager
def counted(filesystem: Any, method: str) -> Iterator[list[str]]:
    calls, real = list[str](), getattr(filesystem, method)

    def call(path: str, **options: Any) -> Any:
        calls.append(path)
        return real(path, **options)

    setattr(filesystem, method, call)
    try:
        yield calls
    finally:
        delattr(filesystem, method)


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
    "lightning, checkpoints": lambda folder: touch(folder, "checkpoints/last.ckpt"),
    "a script's": lambda folder: touch(folder, "config.py", "checkpoints/epoch_1_step_100.pth"),
    "megatron": lambda folder: touch(
        folder, "latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"
    ),
    "verl": lambda folder: touch(
        folder,
        "latest_checkpointed_iteration.txt",
        "global_step_10/actor/model_world_size_1_rank_0.pt",
    ),
    "best": lambda folder: touch(folder, "best/model.safetensors"),
    "last": lambda folder: touch(folder, "last/pytorch_model.bin"),
}

# What `resume` is told to take, where that is not the folder with the files.
PLACES = {
    "lightning": "epoch=3-step=100.ckpt",
    "lightning, checkpoints": "checkpoints/last.ckpt",
    "trainer": "checkpoint-500",
    "torchtitan": "step-10",
    "a script's": "checkpoints/epoch_1_step_100.pth",
    "deepspeed": "",
    "best": "best",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", ["auto", "must"])
@pytest.mark.parametrize("tool", MAKERS)
def test_another_tools_checkpoint_is_an_error_with_its_way_out(
    tmp_path: Path, tool: str, which: str
) -> None:
    MAKERS[tool](tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        anyrank.CheckpointError, match=r"another tool's checkpoint.*anyrank\.load\(model"
    ):
        resume(tmp_path, anyrank.TrainState(nn.Linear(1, 1)), which)
    after = sorted(path.name for path in tmp_path.iterdir() if "lock" not in path.name)
    assert after == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", PLACES)
def test_the_error_names_the_path_that_is_read(tmp_path: Path, tool: str) -> None:
    MAKERS[tool](tmp_path)
    place = f"{tmp_path}/{PLACES[tool]}".rstrip("/")
    with pytest.raises(anyrank.CheckpointError, match=re.escape(f"resume('{place}')")):
        resume(tmp_path, anyrank.TrainState(nn.Linear(1, 1)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", MAKERS)
def test_a_save_without_a_resume_is_refused_there_too(tmp_path: Path, tool: str) -> None:
    MAKERS[tool](tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(anyrank.CheckpointError, match="another tool's checkpoint"):
        save(tmp_path, anyrank.TrainState(nn.Linear(1, 1)))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_of_several_checkpoints_the_newest_is_named(tmp_path: Path) -> None:
    touch(tmp_path, *(f"checkpoint-{n}/model.safetensors" for n in (2, 10)))
    touch(tmp_path, *(f"samples/{n}/0.png" for n in range(250)))
    with pytest.raises(anyrank.CheckpointError, match=r"resume\('.*/checkpoint-10'\)"):
        resume(tmp_path, anyrank.TrainState(nn.Linear(1, 1)))


def test_an_object_store_is_asked_for_few_listings() -> None:
    store = RemoteStorage("memory://others")
    store.filesystem.pipe({f"/others/{n}/a.csv": b"x" for n in range(300)})
    with counted(store.filesystem, "ls") as listings:
        assert find_other_content(store, "memory://others", STEP) is None
        assert len(listings) < 2 * MAX_FOLDERS


@pytest.mark.parametrize("call", [save, resume])
def test_a_folder_of_runs_is_refused_and_names_the_run(tmp_path: Path, call: Any) -> None:
    save(tmp_path / "a", anyrank.TrainState(nn.Linear(1, 1)))
    match = (
        "contains run folders but is not one itself. Pass one of them, such as "
        f"Checkpoints\\('{tmp_path}/a'\\)"
    )
    with pytest.raises(anyrank.CheckpointError, match=match):
        call(tmp_path, anyrank.TrainState(nn.Linear(1, 1)))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("call", [save, resume])
def test_a_run_whose_steps_are_all_damaged_is_still_a_run(tmp_path: Path, call: Any) -> None:
    save(tmp_path / "b", anyrank.TrainState(nn.Linear(1, 1)))
    (tmp_path / "b/step-00000000/anyrank.json").unlink()
    for place, match in (
        ("", "contains run folders but is not one itself"),
        ("b/step-00000005", "is step 5 of the run"),
    ):
        with pytest.raises(anyrank.CheckpointError, match=match):
            call(tmp_path / place, anyrank.TrainState(nn.Linear(1, 1)))


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_dcp_folders_begins_no_run(tmp_path: Path) -> None:
    stock_dcp(tmp_path / "mine")
    with pytest.raises(anyrank.CheckpointError, match=r"resume\('.*/mine'\)"):
        resume(tmp_path, anyrank.TrainState(nn.Linear(1, 1)))


@pytest.mark.parametrize("call", [save, resume])
def test_a_folder_of_what_convert_wrote_as_dcp_begins_no_run(tmp_path: Path, call: Any) -> None:
    anyrank.convert(TENSORS, tmp_path / "runs" / "mine", to="dcp")
    assert (tmp_path / "runs" / "mine" / "__0_0.xxh3").exists()
    with pytest.raises(anyrank.CheckpointError, match=r"resume\('.*/mine'\)"):
        call(tmp_path / "runs", anyrank.TrainState(nn.Linear(1, 1)))


@pytest.mark.parametrize("place", ["folder", "object store"])
@pytest.mark.parametrize("call", [save, resume])
@pytest.mark.parametrize("within", ["step-00000009", "step-00000009/mine", "step-00000000/a/b"])
def test_a_step_of_a_run_is_no_place_for_another_run(
    tmp_path: Path, call: Any, place: str, within: str
) -> None:
    run = str(tmp_path) if place == "folder" else f"memory://{tmp_path.name}"
    save(run, anyrank.TrainState(nn.Linear(1, 1)))
    match = r"is (inside )?step [09] of the run .*\. Pass .*; to return .*, call resume\([09]\)"
    with pytest.raises(anyrank.CheckpointError, match=match):
        call(f"{run}/{within}", anyrank.TrainState(nn.Linear(1, 1)))
    assert [saved.step for saved in anyrank.inspect(run).steps] == [0]


def test_a_file_in_the_folders_place_is_an_error(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "weights.pt")
    with pytest.raises(anyrank.CheckpointError, match=r"weights\.pt, a file"):
        resume(tmp_path / "weights.pt", anyrank.TrainState(nn.Linear(1, 1)))


def test_a_folder_that_cannot_be_made_is_an_error_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("")
    with pytest.raises(anyrank.CheckpointError, match=r"notes is a file\. Pass a different path"):
        resume(tmp_path / "notes/run", anyrank.TrainState(nn.Linear(1, 1)))


@pytest.mark.parametrize("call", [save, resume])
def test_a_step_in_the_runs_place_is_an_error(tmp_path: Path, call: Any) -> None:
    save(tmp_path, anyrank.TrainState(nn.Linear(1, 1)))
    before = sorted((tmp_path / "step-00000000").iterdir())
    with pytest.raises(
        anyrank.CheckpointError, match=r"is a step of a run\. Pass the run's folder"
    ):
        call(tmp_path / "step-00000000", anyrank.TrainState(nn.Linear(1, 1)))
    assert sorted((tmp_path / "step-00000000").iterdir()) == before


def test_unrelated_files_are_an_empty_folder(tmp_path: Path) -> None:
    assert resume(tmp_path / "none", anyrank.TrainState(nn.Linear(1, 1))) is None
    touch(tmp_path, "README.md", "config.json", "train.log", "logs/events.tfevents.1")
    touch(tmp_path, "data/train.bin", "samples/10/latents.pt")  # a user's own
    touch(tmp_path, "samples/10/0.png", "tensorboard/version_0/hparams.yaml", ".cache/hub/a.bin")
    touch(tmp_path, "wandb/run-1/files/config.yaml", "profile/rank0.pt.trace.json", "checkpoints/a")
    touch(tmp_path, "lightning_logs/version_0/checkpoints/epoch=3.ckpt")  # three levels down
    save(tmp_path / "an" / "older-run", anyrank.TrainState(nn.Linear(1, 1)))
    touch(tmp_path, "step-00000003.tmp-0123abcd-0123abcd/__0_0.distcp", "checkpoint-1/notes.txt")
    assert resume(tmp_path, anyrank.TrainState(nn.Linear(1, 1))) is None


@pytest.mark.parametrize("ending", ENDINGS)
def test_weights_in_a_subfolder_are_known_by_every_ending_that_is_read(
    tmp_path: Path, ending: str
) -> None:
    touch(tmp_path, f"best/model{ending}")
    with pytest.raises(anyrank.CheckpointError, match="another tool's checkpoint"):
        resume(tmp_path, anyrank.TrainState(nn.Linear(1, 1)))


def _resume(path: str) -> str:
    try:
        resume(path, anyrank.TrainState(nn.Linear(1, 1)))
    except anyrank.CheckpointError as error:
        return str(error)
    return ""


def test_every_rank_raises_the_error(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors")
    for text in run_ranks(2, _resume, str(tmp_path)):
        assert "another tool's checkpoint" in text


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model_world_size_2_rank_0.pt", "optim_world_size_2_rank_0.pt"], "verl.model_merger"),
        ([".metadata", "common.pt"], "Megatron Bridge"),
    ],
)
def test_folders_that_only_their_own_tool_reads_say_which(
    names: list[str], words: str, tmp_path: Path
) -> None:
    touch(tmp_path / "saved", *names)
    net = torch.nn.Linear(2, 2)
    calls: list[Any] = [
        lambda: anyrank.load(net, tmp_path / "saved"),
        lambda: anyrank.inspect(tmp_path / "saved"),
        lambda: anyrank.convert(tmp_path / "saved", tmp_path / "out"),
        lambda: anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState(net)).resume(
            tmp_path / "saved"
        ),
    ]
    for call in calls:
        with pytest.raises(anyrank.AnyrankError, match=words):
            call()
    assert words in str(anyrank.verify(tmp_path / "saved").findings[0])


def test_a_folder_of_weights_is_that_whatever_lies_beside_them(tmp_path: Path) -> None:
    """AReaL's engine writes its optimizer's files beside a Hugging Face folder."""
    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    for rank in range(2):
        torch.save({"state": {}}, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    report = anyrank.load(other, tmp_path)
    assert torch.equal(net.weight, other.weight)
    assert [note.partition(":")[0] for note in report.skipped] == [
        f"optim_world_size_2_rank_{rank}.pt" for rank in range(2)
    ]
    assert anyrank.verify(tmp_path)
    assert len(anyrank.inspect(tmp_path).tensors) == 2
    anyrank.convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-out")


def test_where_the_package_of_a_protocol_is_missing_the_source_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def url_to_fs(*_: object, **__: object) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    with pytest.raises(ImportError, match=r"gs://a/b\.pt: Please install gcsfs"):
        anyrank.load(nn.Linear(2, 2), "gs://a/b.pt")
