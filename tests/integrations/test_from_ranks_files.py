"""Runs whose ranks saved a file each go on: torch_checkpointing's (torchtitan).

torch_checkpointing writes its folders itself; its exchange of metadata asks for CUDA, and is done
on the CPU here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integrations import tools
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import anyrank
from anyrank.testing import run_ranks

WORLD = 2


def manager_of(folder: str) -> Any:
    import torch_checkpointing as tc
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    class Manager(tc.DefaultMetadataManager):
        def _all_gather_pickled_data(self, data: Any, process_group: Any = None) -> Any:
            found: list[Any] = [None] * dist.get_world_size(process_group)
            dist.all_gather_object(found, data, group=process_group)
            return dict(enumerate(found))

    config = tc.CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    items = {key: tc.ItemSpec(resharder=DefaultResharder()) for key in ("model", "optimizer")}
    config.items = items
    rank, world = dist.get_rank(), dist.get_world_size()
    info = tc.RankInfo(rank, world, rank, world)
    saver = tc.make_sync_checkpoint_saver(
        rank_info=info,
        storage_config=config.storage_config,
        checkpoint_metadata_manager=Manager(rank_info=info),
    )
    manager = tc.CheckpointManager(config)
    manager._saver = saver
    return manager


def job_save(folder: str) -> list[float]:
    net = tools.wrapped("fsdp", tools.seeded())
    optimizer = tools.optimizer_of(net)
    scheduler = tools.cosine(optimizer)
    tools.train(net, optimizer, scheduler, 0, tools.SAVED)
    manager = manager_of(folder)
    state = {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
        "lr_scheduler": scheduler.state_dict(),
        "train_state": {"step": tools.SAVED},
    }
    manager.save(f"{folder}/tc", state)
    manager.close()
    return tools.train(net, optimizer, scheduler, tools.SAVED, tools.STEPS)


@pytest.mark.filterwarnings("ignore")
def test_files_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch_checkpointing")
    expected = run_ranks(WORLD, job_save, str(tmp_path))[0]
    sources = {"tc": str(tmp_path / "tc")}
    for world, layout in ((1, "ddp"), (3, "fsdp")):
        folder = str(tmp_path / f"run-{world}")
        for found in run_ranks(world, tools.job_adopt_each, sources, folder, layout):
            for kind, (losses, report, _) in found.items():
                torch.testing.assert_close(losses[:1], expected[:1], rtol=1e-12, atol=1e-12)
                assert report.components["optimizer"] == "fresh", kind
                assert "start at zero" in report.components["optimizer"].reason
                assert (report.step, report.saved_on.ranks) == (3, WORLD)
                assert report.components["scheduler"] == "exact"
                assert report.components["model"] == "resharded"
    net = tools.seeded(1)
    for name, source in sources.items():
        tools.check_weights(Path(source), tmp_path / f"of-{name}")
    (tmp_path / "tc/model_1.pt").unlink()
    state = anyrank.TrainState(net, tools.optimizer_of(net))
    with pytest.raises(
        anyrank.CheckpointError, match="A file is missing, or is from a different save"
    ):
        anyrank.Checkpoints(tmp_path / "x", state).resume(tmp_path / "tc")
