"""Promise 3 without a GPU: the rank's device by its local rank, and files that name others.

`tests/unit/models/test_cpu_only.py` has the guard around third-party loaders, `tests/gpu` what only
a device can show.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import anyrank
from anyrank.testing import run_ranks
from anyrank.world.device import rank_device, read_threads


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight devices, of which torch is only asked for the kind and the number."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_without_an_accelerator_it_is_the_cpu() -> None:
    assert rank_device() == torch.device("cpu")


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_the_launcher_says_which_device(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "5")
    assert rank_device() == torch.device("cuda", 5)


@pytest.mark.usefixtures("eight_gpus")
def test_a_process_that_sees_one_device_owns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert rank_device() == torch.device("cuda", 0)


@pytest.mark.usefixtures("eight_gpus")
def test_a_rank_beyond_the_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(anyrank.RankError, match=r"local rank 8 .* this machine has 8 cuda devices"):
        rank_device()


def job_beyond_the_devices(call: str) -> str:
    """Two ranks of a machine, of which the launcher numbers the second too high."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = torch.device("cuda")
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
        patch.setattr(torch.accelerator, "device_count", lambda: 2)
        if torch.distributed.get_rank() == 1:
            patch.setenv("LOCAL_RANK", "2")
            model = nn.Linear(2, 2, device="meta")
        else:
            model = nn.Linear(2, 2)
        weights = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
        with pytest.raises(anyrank.RankError) as caught:
            anyrank.load(model, weights) if call == "load" else anyrank.materialize(model)
    return str(caught.value)


@pytest.mark.parametrize("call", ["load", "materialize"])
def test_a_rank_beyond_the_devices_is_an_error_on_all_ranks(call: str) -> None:
    first, second = run_ranks(2, job_beyond_the_devices, call)
    assert first == second
    assert "[rank 1] local rank 2 has no device: this machine has 2" in first


def test_a_checkpoint_saved_on_a_gpu_touches_none(tmp_path: Path) -> None:
    """The place that torch.save wrote down is not even looked at."""
    torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "cpu.pt")
    with (
        zipfile.ZipFile(tmp_path / "cpu.pt") as old,
        zipfile.ZipFile(tmp_path / "gpu.pt", "w") as new,
    ):
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):
                assert b"X\x03\x00\x00\x00cpu" in data
                data = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            new.writestr(name, data)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(tmp_path / "gpu.pt", weights_only=True)  # what others do with it
    model = nn.Linear(2, 2)
    anyrank.load(model, tmp_path / "gpu.pt")
    assert bool((model.weight == 1).all())
    assert model.weight.device.type == "cpu"


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert [read_threads(n) for n in (1, 4, 8, 32)] == [16, 4, 2, 1]
    monkeypatch.setenv("ANYRANK_READ_THREADS", "2")
    assert read_threads(1) == 2
