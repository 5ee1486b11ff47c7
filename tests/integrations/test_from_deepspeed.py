"""Runs of DeepSpeed go on as runs of anyrank, on any number of ranks.

DeepSpeed has no wheel, and the tests do not install it (0.19.8 runs on CPU ranks from its unpacked
sdist, without a compiler): the folders are written here, in the layout that its source defines
(`runtime/engine.py`, `runtime/zero/stage_1_and_2.py` and `stage3.py`), from a training in plain
PyTorch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations import tools
from torch import nn

import anyrank
from anyrank.testing import run_ranks


def named(net: nn.Module, optimizer: Any) -> list[list[tuple[str, nn.Parameter]]]:
    names = {id(p): name for name, p in net.named_parameters()}
    return [[(names[id(p)], p) for p in group["params"]] for group in optimizer.param_groups]


def model_states(net: nn.Module, optimizer: Any, scheduler: Any, world: int) -> dict[str, Any]:
    shapes = [OrderedDict((n, p.shape) for n, p in group) for group in named(net, optimizer)]
    return {
        "module": {name: t.bfloat16() for name, t in net.state_dict().items()},
        "buffer_names": [],
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "shared_params": {"head.weight": "embed.weight"},
        "lr_scheduler": scheduler.state_dict(),
        "global_steps": tools.SAVED,
        "global_samples": tools.SAVED * tools.ROWS,
        "dp_world_size": world,
        "ds_version": "0.17.5",
    }


def parts_of(tensors: list[torch.Tensor], world: int) -> list[torch.Tensor]:
    """Equal flat partitions, aligned to twice the number of ranks; the last is padded."""
    flat = torch.cat([one.flatten() for one in tensors])
    size = 2 * math.ceil(flat.numel() / (2 * world))
    flat = torch.cat([flat, flat.new_zeros(size * world - flat.numel())])
    return [*flat.split(size)]


def groups_now(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [n]}
        for n, group in enumerate(optimizer.param_groups)
    ]


def write_stage_2(folder: Path, net: Any, optimizer: Any, scheduler: Any, world: int) -> None:
    step = folder / "global_step3"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    torch.save(model_states(net, optimizer, scheduler, world), step / "mp_rank_00_model_states.pt")
    groups = [[p for _, p in group] for group in named(net, optimizer)]
    masters = [parts_of([p.detach() for p in group], world) for group in groups]
    moments = {
        key: [parts_of([optimizer.state[p][key] for p in group], world) for group in groups]
        for key in ("exp_avg", "exp_avg_sq")
    }
    for rank in range(world):
        left = [sum(p.numel() for p in group) for group in groups]
        unpadded = [
            part[rank][: max(0, min(part[rank].numel(), left[g] - rank * part[rank].numel()))]
            for g, part in enumerate(masters)
        ]
        state = {
            g: {
                "step": torch.tensor(3.0),
                **{key: m[g][rank].clone() for key, m in moments.items()},
            }
            for g in range(len(groups))
        }
        saved = {
            "zero_stage": 2,
            "partition_count": [world] * len(groups),
            "base_optimizer_state": {"state": state, "param_groups": groups_now(optimizer)},
            "single_partition_of_fp32_groups": unpadded,
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": saved}, step / name)


def write_stage_3(folder: Path, net: Any, optimizer: Any, scheduler: Any, world: int) -> None:
    """Group 0 is two subgroups."""
    folder.mkdir()
    model = model_states(net, optimizer, scheduler, world)
    first, second = named(net, optimizer)
    subgroups = [first[:1], first[1:], second]
    model["param_shapes"] = [OrderedDict((n, p.shape) for n, p in group) for group in subgroups]
    model["module"] = {name: torch.empty(0) for name in model["module"]}

    def part(tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for tensor in tensors:
            each = math.ceil(tensor.numel() / world)
            flat = torch.cat([tensor.flatten(), tensor.new_zeros(each * world - tensor.numel())])
            found.append(flat[rank * each : (rank + 1) * each])
        return torch.cat(found)

    for rank in range(world):
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {
            n: {
                "step": 3,  # as DeepSpeed's own Adam counts
                **{
                    key: part([optimizer.state[p][key] for _, p in group], rank)
                    for key in ("exp_avg", "exp_avg_sq")
                },
            }
            for n, group in enumerate(subgroups)
        }
        groups = groups_now(optimizer)
        groups[0]["params"], groups[1]["params"] = [0, 1], [2]
        saved = {
            "zero_stage": 3,
            "partition_count": world,
            "fp32_flat_groups": [part([p.detach() for _, p in g], rank) for g in subgroups],
            "optimizer_state_dict": {"state": state, "param_groups": groups},
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": saved}, folder / name)


WRITERS = {"stage 2": write_stage_2, "stage 3": write_stage_3}


def test_deepspeed(tmp_path: Path) -> None:
    trained = tools.trained()
    sources: dict[str, str] = {}
    for kind, write in WRITERS.items():
        sources[kind] = str(tmp_path / kind)
        write(tmp_path / kind, *trained, world=3)
    expected = tools.train(*trained, tools.SAVED, tools.STEPS)
    for world, layout in ((1, "ddp"), (2, "fsdp")):
        folder = str(tmp_path / f"run-{world}")
        for found in run_ranks(world, tools.job_adopt_each, sources, folder, layout):
            for kind, (losses, report, _) in found.items():
                torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12, msg=kind)
                assert report.step == 3
                assert report.saved_on.ranks == 3
                assert report.components["scheduler"] == "exact"
    assert anyrank.load(tools.seeded(1), sources["stage 3"]).tied
    for source in (*sources.values(), f"{sources['stage 2']}/global_step3"):
        tools.check_weights(Path(source), tmp_path / "of" / Path(source).name)


@pytest.mark.parametrize("tool", ["transformers Trainer", "Accelerate"])
def test_frameworks_with_deepspeed(tmp_path: Path, tool: str) -> None:
    """In the places where `Trainer` and `Accelerator.save_state` let DeepSpeed save."""
    write_stage_2(tmp_path / "a", *tools.trained(), world=2)
    if tool == "Accelerate":
        (tmp_path / "a/global_step3").rename(tmp_path / "a/pytorch_model")
        torch.save({"step": 3}, tmp_path / "a/random_states_0.pkl")
    else:
        (tmp_path / "a/trainer_state.json").write_text('{"global_step": 3, "epoch": 0.5}')
    net = tools.seeded(1)
    optimizer = tools.optimizer_of(net)
    state = anyrank.TrainState(net, optimizer, scheduler=tools.cosine(optimizer))
    report = anyrank.Checkpoints(tmp_path / "run", state).resume(tmp_path / "a")
    assert report is not None
    assert (report.step, report.saved_on.layout) == (3, tool)
    parts = {"model": "resharded", "optimizer": "resharded", "scheduler": "exact"}
    assert report.components == parts | {"random": "derived"}
    tools.check_weights(tmp_path / "a", tmp_path / "weights")


def lose(path: Path) -> None:
    path.unlink()


def rename(path: Path) -> None:
    path.rename(path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))


def swap(path: Path) -> None:
    """A rank's file of another model."""
    saved = torch.load(path)
    masters = saved["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    masters[0] = masters[0][:-4].clone()
    torch.save(saved, path)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lose, r"rank_1_mp_rank_00_optim_states.pt is missing; copy the files of all ranks"),
        (rename, "tensor, pipeline or expert parallelism"),
        (swap, "A file belongs to a different save"),
    ],
)
def test_a_file_of_one_rank_that_is_wrong_is_named(tmp_path: Path, damage: Any, match: str) -> None:
    write_stage_2(tmp_path / "a", *tools.trained(), world=3)
    damage(tmp_path / "a/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    net = tools.seeded(1)
    state = anyrank.TrainState(net, tools.optimizer_of(net))
    with pytest.raises(anyrank.CheckpointError, match=match):
        anyrank.Checkpoints(tmp_path / "run", state).resume(tmp_path / "a")


def test_the_last_ranks_file_that_is_missing_is_named(tmp_path: Path) -> None:
    write_stage_2(tmp_path / "a", *tools.trained(), world=3)
    (tmp_path / "a/global_step3/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(anyrank.LoadError, match=r"saved on 3 ranks.*rank_2_mp_rank_00.* missing"):
        anyrank.load(tools.seeded(1), tmp_path / "a")


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("elastic", "is of elastic ZeRO"),
        ("fragments", "has frozen parameters under ZeRO 3"),
        ("universal", "is a universal checkpoint"),
    ],
)
def test_layouts_that_are_not_read_are_refused(tmp_path: Path, kind: str, what: str) -> None:
    folder = tmp_path / "a"
    if kind == "elastic":
        write_stage_2(folder, *tools.trained(), world=2)
        path = folder / "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
        saved = torch.load(path)
        state = saved["optimizer_state_dict"]
        state["base_optimizer_state"] = [*state["base_optimizer_state"]["state"].values()]
    else:
        write_stage_3(folder, *tools.trained(), world=2)
        if kind == "universal":
            (folder / "zero").mkdir()
        path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        saved = torch.load(path)
        saved["frozen_param_shapes"] = {"frozen.weight": (2,)} if kind == "fragments" else None
    torch.save(saved, path)
    with pytest.raises(
        anyrank.LoadError, match=rf"{what}, which is not supported\. Run the zero_to_fp32\.py"
    ):
        anyrank.load(tools.seeded(1), folder)
