"""The weights of every tool's folder are loaded, converted and verified, as those of a file are.

The folders are those from which runs go on in the tests of each tool.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.integrations import (
    test_from_accelerate,
    test_from_dcp,
    test_from_deepspeed,
    test_from_ranks_files,
    tools,
)

import anyrank
from anyrank.testing import run_ranks


def of_dcp(folder: Path) -> dict[str, Path]:
    run_ranks(2, test_from_dcp.job_save, str(folder))
    return {path.name: path for path in folder.iterdir()}


def of_accelerate(folder: Path) -> dict[str, Path]:
    run_ranks(2, test_from_accelerate.job_accelerate, str(folder / "ddp"))
    run_ranks(2, test_from_dcp.job_accelerate, str(folder))
    trainers = folder / "trainer"  # with FSDP, it saves the weights and the optimizer as Accelerate
    trainers.mkdir()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (trainers / name).symlink_to(folder / "SHARDED_STATE_DICT" / name)
    (trainers / "trainer_state.json").write_text('{"global_step": 3, "epoch": 0.5}')
    found = {path.name: path for path in folder.iterdir()}
    assert found.keys() == {"ddp", "trainer", *test_from_dcp.KINDS}
    return found


def of_deepspeed(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for kind, write in test_from_deepspeed.WRITERS.items():
        found[kind] = folder / kind
        write(folder / kind, *test_from_deepspeed.reference(), world=3)
    found["step"] = folder / "stage 2/global_step3"
    accelerate = found["accelerate"] = folder / "accelerate"
    accelerate.mkdir()
    (accelerate / "pytorch_model").symlink_to(folder / "stage 2/global_step3")
    torch.save({"step": 3}, accelerate / "random_states_0.pkl")
    return found


def of_files_of_ranks(folder: Path) -> dict[str, Path]:
    pytest.importorskip("torch_checkpointing")
    run_ranks(2, test_from_ranks_files.job_save, str(folder))
    return {"tc": folder / "tc", "verl": folder / "global_step_3/actor"}


BESIDE = {  # layout of DCP -> what is not weights
    "plain": "optimizer.state.scale.exp_avg",
    "torchtitan": "train_state.step",
    "app": "app.optim.state.scale.exp_avg",
    "lightning": "optimizer_0.state.scale.exp_avg",
}


@pytest.mark.parametrize("write", [of_dcp, of_accelerate, of_deepspeed, of_files_of_ranks])
@pytest.mark.filterwarnings("ignore")
def test_weights_alone(tmp_path: Path, write: Callable[[Path], dict[str, Path]]) -> None:
    expected = test_from_deepspeed.reference()[0].state_dict()
    (tmp_path / "in").mkdir()
    for name, source in write(tmp_path / "in").items():
        net = tools.seeded(1)
        loaded = anyrank.load(net, source)
        near = {"rtol": 1e-2, "atol": 1e-2} if name == "megatron" else {"rtol": 1e-6, "atol": 1e-7}
        torch.testing.assert_close(dict(net.state_dict()), dict(expected), **near)
        report = anyrank.convert(source, tmp_path / name)
        written = load_file(tmp_path / name / "model.safetensors")
        ties = {"head.weight", "embed.weight"}
        assert expected.keys() - ties <= written.keys() <= expected.keys(), (name, report)
        assert ties & written.keys()
        same = {key: expected[key] for key in written}
        torch.testing.assert_close(written, same, **near, check_dtype=False, msg=name)
        if name in BESIDE:
            assert f"{BESIDE[name]}: not weights" in loaded.skipped
            assert f"{BESIDE[name]}: not weights" in report.skipped
        assert anyrank.verify(source), name


def test_several_models_are_not_chosen_from(tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(anyrank.LoadError, match=r"several sets .*fsdp.bin, .*fsdp_1.bin"):
        anyrank.inspect(tmp_path)
