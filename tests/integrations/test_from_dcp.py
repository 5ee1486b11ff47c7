"""Runs that were saved with torch.distributed.checkpoint go on, in every layout in use.

torch itself writes the folders, from FSDP2 models on two ranks. The layouts are those that the
sources of torchtitan, torch's tutorials and Lightning's `ModelParallelStrategy` define;
the folders of Accelerate with FSDP2 are written by what its `save_state` calls.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.integrations import tools
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import anyrank
from anyrank.testing import run_ranks


class App:
    """As in torch's tutorial."""

    def __init__(self, net: Any, optimizer: Any) -> None:
        self.net, self.optimizer = net, optimizer

    def state_dict(self) -> dict[str, Any]:
        model = get_model_state_dict(self.net)
        return {"model": model, "optim": get_optimizer_state_dict(self.net, self.optimizer)}

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError


def layouts(net: Any, optimizer: Any, scheduler: Any) -> dict[str, tuple[Any, Any]]:
    """Name -> what DCP saves, and what Lightning keeps in a file besides."""
    model = get_model_state_dict(net)
    nested = get_optimizer_state_dict(net, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = get_optimizer_state_dict(net, optimizer, options=options)
    titan = {
        **model,
        "optimizer": flattened,
        "lr_scheduler": scheduler.state_dict(),
        "train_state": {"step": torch.tensor(tools.SAVED, dtype=torch.int32)},
        "dataloader": {f"dp_rank_{dist.get_rank()}": pickle.dumps({"a": 1}), "world_size": 2},
    }
    current = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    rest = {
        "epoch": 0,
        "global_step": tools.SAVED,
        "pytorch-lightning_version": "2.6.6",
        "lr_schedulers": [scheduler.state_dict()],
        "loops": {
            "fit_loop": {
                "epoch_progress": {"current": current},
                "epoch_loop.batch_progress": {"is_last_batch": False, "current": {"completed": 3}},
            }
        },
    }
    return {
        "plain": ({"model": model, "optimizer": nested}, None),
        "torchtitan": (titan, None),
        "app": ({"app": App(net, optimizer)}, None),
        "lightning": ({"state_dict": model, "optimizer_0": nested}, rest),
    }


def job_save(folder: str) -> list[float]:
    net = tools.wrapped("fsdp", tools.seeded())
    optimizer = tools.optimizer_of(net)
    scheduler = tools.cosine(optimizer)
    tools.train(net, optimizer, scheduler, 0, tools.SAVED)
    for name, (state, rest) in layouts(net, optimizer, scheduler).items():
        dcp.save(state, checkpoint_id=f"{folder}/{name}")
        if rest is not None and dist.get_rank() == 0:
            torch.save(rest, f"{folder}/{name}/meta.pt")
    return tools.train(net, optimizer, scheduler, tools.SAVED, tools.STEPS)


def job_adopt(folder: str, layout: str) -> dict[str, tuple[list[float], anyrank.ResumeReport, int]]:
    found: dict[str, Any] = {}
    for name in ("plain", "torchtitan", "app", "lightning"):
        net = tools.wrapped(layout, tools.seeded(1))
        optimizer = tools.optimizer_of(net)
        scheduler = tools.cosine(optimizer)
        state = anyrank.TrainState(net, optimizer, scheduler=scheduler)
        world = dist.get_world_size() if dist.is_initialized() else 1
        with anyrank.Checkpoints(f"{folder}/run-{name}-{layout}-{world}", state) as ckpts:
            report = ckpts.resume(f"{folder}/{name}")
        if name in ("plain", "app"):  # they hold no scheduler of torch's
            tools.move_to(scheduler, optimizer, tools.SAVED)
        losses = tools.train(net, optimizer, scheduler, tools.SAVED, tools.STEPS)
        found[name] = losses, report, state.step
    return found


@pytest.mark.filterwarnings("ignore")
def test_dcp(tmp_path: Path) -> None:
    expected = run_ranks(2, job_save, str(tmp_path))[0]
    for world, layout in ((1, "ddp"), (3, "fsdp")):
        for found in run_ranks(world, job_adopt, str(tmp_path), layout):
            for name, (losses, report, step) in found.items():
                parts = report.components
                torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12, msg=name)
                assert parts["model"] == parts["optimizer"] == "resharded"
                assert report.saved_on.ranks == 2
                assert step == tools.SAVED, name  # else by the optimizer's count
                known = name in ("torchtitan", "lightning")
                assert parts["scheduler"] == ("exact" if known else "fresh")

    for name, beside in BESIDE.items():
        tools.check_weights(tmp_path / name, tmp_path / f"of-{name}", 1e-6, beside)


BESIDE = {  # layout -> what is not weights
    "plain": "optimizer.state.scale.exp_avg",
    "torchtitan": "train_state.step",
    "app": "app.optim.state.scale.exp_avg",
    "lightning": "optimizer_0.state.scale.exp_avg",
}


KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


def job_accelerate(folder: str) -> list[float]:
    """As `Accelerator.save_state` saves FSDP2 models; it shards none itself on a CPU."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.checkpointing import save_accelerator_state, save_custom_state
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    rank, world = dist.get_rank(), dist.get_world_size()
    like: Any = SimpleNamespace(
        num_processes=world,
        process_index=rank,
        is_main_process=rank == 0,
        is_fsdp2=True,
        wait_for_everyone=dist.barrier,
    )
    with tools.new_accelerate():
        Accelerator(cpu=True)  # for its logging
        net = tools.wrapped("fsdp", tools.seeded())
        optimizer = tools.optimizer_of(net)
        scheduler = tools.cosine(optimizer)
        tools.train(net, optimizer, scheduler, 0, tools.SAVED)
        for kind in KINDS:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
            path = f"{folder}/{kind}"
            save_fsdp_model(plugin, like, net, path)
            save_fsdp_optimizer(plugin, like, optimizer, net, path)
            save_accelerator_state(path, [], [], [], [], rank, tools.SAVED)
            if rank == 0:
                save_custom_state(scheduler, path)
            dist.barrier()
        return tools.train(net, optimizer, scheduler, tools.SAVED, tools.STEPS)


def job_adopt_fsdp(folder: str, layout: str) -> list[tuple[list[float], anyrank.ResumeReport]]:
    found: list[Any] = []
    for kind in KINDS:
        net = tools.wrapped(layout, tools.seeded(1))
        optimizer = tools.optimizer_of(net)
        scheduler = tools.cosine(optimizer)
        state = anyrank.TrainState(net, optimizer, custom_checkpoint_0=scheduler)
        with anyrank.Checkpoints(f"{folder}/run-{kind}-{layout}", state) as ckpts:
            report = ckpts.resume(f"{folder}/{kind}")
        found.append((tools.train(net, optimizer, scheduler, 3, 6), report))
    return found


@pytest.mark.filterwarnings("ignore")
def test_accelerate_with_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expected = run_ranks(2, job_accelerate, str(tmp_path))[0]
    beside = ["custom_checkpoint_0.pkl", "random_states_0.pkl", "random_states_1.pkl"]
    own = {"SHARDED": ["optimizer_0", "pytorch_model_fsdp_0"]}
    own["FULL"] = ["optimizer.bin", "pytorch_model_fsdp.bin"]
    for kind in KINDS:
        names = sorted(path.name for path in (tmp_path / kind).iterdir())
        assert names == sorted([*beside, *own[kind.partition("_")[0]]])
    for world, layout in ((1, "ddp"), (3, "fsdp")):
        for found in run_ranks(world, job_adopt_fsdp, str(tmp_path), layout):
            for losses, report in found:
                torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
                assert report.step == tools.SAVED
                assert report.components["custom_checkpoint_0"] == "exact"
    trainers = tmp_path / "trainer"  # with FSDP, it saves the weights and the optimizer as these
    trainers.mkdir()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (trainers / name).symlink_to(tmp_path / "SHARDED_STATE_DICT" / name)
    (trainers / "trainer_state.json").write_text('{"global_step": 3, "epoch": 0.5}')
    for name in (*KINDS, "trainer"):
        tools.check_weights(tmp_path / name, tmp_path / f"of-{name}")


def test_several_models_are_not_chosen_from(tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(anyrank.LoadError, match=r"several sets .*fsdp.bin, .*fsdp_1.bin"):
        anyrank.inspect(tmp_path)
