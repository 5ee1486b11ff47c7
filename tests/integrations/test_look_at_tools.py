"""verify, inspect and diff on other tools' folders: what is missing, and which file is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.integrations import tools
from tests.integrations.test_from_deepspeed import write_stage_2

import anyrank
from anyrank.testing import run_ranks

MARK = 12345.678  # a value that is found in the bytes of a file


class Arguments:
    """As the Trainer pickles its own: a class that nobody else knows."""


def trainer(folder: Path) -> None:
    net, optimizer, scheduler = tools.trained()
    folder.mkdir()
    weights = {name: t for name, t in net.state_dict().items() if name != "head.weight"}
    save_file(weights, folder / "model.safetensors")
    optimizer.state[net.scale]["exp_avg"][0, 0] = MARK
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    torch.save(Arguments(), folder / "training_args.bin")
    (folder / "trainer_state.json").write_text('{"global_step": 3, "epoch": 0.5}')


def accelerate(folder: Path) -> None:
    from accelerate import Accelerator

    with tools.new_accelerate():
        accelerator = Accelerator(cpu=True)
        net, optimizer, scheduler = tools.trained()
        net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
        optimizer.optimizer.state[net.scale]["exp_avg"][0, 0] = MARK
        accelerator.save_state(str(folder))


def deepspeed(folder: Path) -> None:
    net, optimizer, scheduler = tools.trained()
    optimizer.state[net.head.weight]["exp_avg"].flatten()[-1] = MARK
    write_stage_2(folder, net, optimizer, scheduler, 2)


def flip(folder: Path) -> Path:
    """Change a bit of the marked value; the file that it is in."""
    for path in sorted(folder.rglob("*")):
        for dtype in (torch.float64, torch.float32):
            value = torch.tensor(MARK, dtype=dtype).numpy().tobytes()
            data = path.read_bytes() if path.is_file() else b""
            if (offset := data.find(value)) >= 0:
                path.write_bytes(data[:offset] + bytes([value[0] ^ 1]) + data[offset + 1 :])
                return path
    raise AssertionError("the value is in no file")


@pytest.mark.filterwarnings("ignore:.*(state_dict|single process).*:UserWarning")
@pytest.mark.parametrize(
    ("write", "said"),
    [
        (trainer, "optimizer.0.exp_avg: record data/"),
        (accelerate, "optimizer.0.exp_avg: record data/"),
        (deepspeed, "optimizer.blocks.1.1.weight.exp_avg: record data/"),
    ],
)
def test_a_bit_that_flipped_in_an_optimizer_is_found(
    tmp_path: Path, write: Callable[[Path], None], said: str
) -> None:
    folder = tmp_path / "checkpoint"
    write(folder)
    assert anyrank.verify(folder), anyrank.verify(folder)
    damaged = flip(folder)
    (finding,) = anyrank.verify(folder).findings
    assert finding.where == str(damaged)
    assert said in finding.what
    assert "CRC-32" in finding.what


@pytest.mark.filterwarnings("ignore:.*(state_dict|single process).*:UserWarning")
@pytest.mark.parametrize("write", [trainer, accelerate, deepspeed])
def test_folders_whose_optimizers_differ_are_not_equal(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    for name in ("a", "b"):
        write(tmp_path / name)
    assert anyrank.diff(tmp_path / "a", tmp_path / "b")
    flip(tmp_path / "b")
    report = anyrank.diff(tmp_path / "a", tmp_path / "b")
    ((name, difference),) = report.values.items()
    assert "exp_avg" in name
    assert difference.elements == 1
    assert anyrank.diff(tmp_path / "a", tmp_path / "b", ignore=name)
    assert report.equal > anyrank.load(tools.seeded(), tmp_path / "a").tensors


def test_what_is_missing_is_named_with_the_rank_that_wrote_it(tmp_path: Path) -> None:
    deepspeed(tmp_path / "zero")
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (tmp_path / "zero/global_step3" / name).unlink()
    (finding,) = anyrank.verify(tmp_path / "zero").findings
    assert "was saved on 2 ranks, but has the files of only 1" in finding.what
    assert name in finding.what
    trainer(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3/model.safetensors").unlink()
    assert not anyrank.verify(tmp_path / "checkpoint-3")


def job_dcp(folder: str, changed: bool) -> None:
    net = tools.seeded()
    with torch.no_grad():
        net.scale[0, 3] += 0.5 * changed
    dcp.save({"model": tools.wrapped("fsdp", net).state_dict()}, checkpoint_id=folder)


def test_a_folder_of_two_ranks_lacks_one_of_its_files_and_differs_from_another(
    tmp_path: Path,
) -> None:
    for name, changed in (("a", False), ("b", True)):
        run_ranks(2, job_dcp, str(tmp_path / name), changed)
    found = anyrank.diff(tmp_path / "a", tmp_path / "b")
    assert {name: each.elements for name, each in found.values.items()} == {"scale": 1}
    assert not found.only_a
    assert anyrank.verify(tmp_path / "a")
    (tmp_path / "a/__1_0.distcp").unlink()
    assert any("__1_0.distcp" in str(each) for each in anyrank.verify(tmp_path / "a").findings)
