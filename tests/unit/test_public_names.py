"""What is not documented is private: the public attributes of each public class, listed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.public import integration_names, public_names, returned_classes
from torch import nn

import anyrank
from anyrank.testing import RankPool

WEIGHTS = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}


def checkpoints() -> anyrank.Checkpoints:
    return anyrank.Checkpoints("run", anyrank.TrainState(nn.Linear(1, 1)))


def saved() -> anyrank.Checkpoints:
    ckpts = checkpoints()
    ckpts.save()
    ckpts.close()
    return ckpts


DATA = torch.zeros(8, 1)
POSITION = "epoch step consumed samples dropped notes receipts in_step commit"
POSITION += " state_dict load_state_dict position"


def loader() -> anyrank.ElasticLoader:
    return anyrank.ElasticLoader(DATA, global_batch=4, microbatch=2)


def share() -> Any:
    sampler = anyrank.ElasticSampler(8, global_batch=4, microbatch=2)
    next(iter(sampler))
    return sampler.share(0)


def watching() -> Any:
    made = anyrank.watch("1h")
    made.close()
    return made


# A function that makes an instance of the class, and the instance's public attributes.
NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "Watching": (watching, "close"),
    "TrainState": (anyrank.TrainState, "step epoch samples run lineage data parts"),
    "Checkpoints": (
        checkpoints,
        "path resume steps step_done save wait close latest saved stats",
    ),
    "SavedStep": (
        lambda: saved().saved()[0],
        "step epoch samples written ranks nbytes path",
    ),
    "SaveRecord": (
        lambda: saved().stats()[0],
        "step path nbytes seconds stall_seconds removed",
    ),
    "ResumeReport": (
        lambda: saved().resume(),
        "step epoch samples path saved_on ranks lost_steps lost_samples set_aside components"
        " notes verified bytes_read seconds to_json",
    ),
    "LoadReport": (
        lambda: anyrank.load(nn.Linear(2, 2), WEIGHTS),
        "missing unexpected initialised rebuilt kept tied duplicates cast renewed own_code"
        " own_code_not_run frozen format strategy reason nonfinite verified skipped tensors"
        " bytes_read bytes_sent peak_host_bytes peak_device_bytes seconds to_json",
    ),
    "LoadPlan": (
        lambda: anyrank.plan(nn.Linear(2, 2), WEIGHTS),
        "strategy reason world_size model_bytes source_bytes share_bytes read_bytes sent_bytes"
        " peak_bytes format missing unexpected to_json",
    ),
    "Sync": (lambda: anyrank.Sync(nn.Linear(2, 2), nn.Linear(2, 2)), "version"),
    "SyncReport": (
        lambda: anyrank.sync(nn.Linear(2, 2), nn.Linear(2, 2)),
        "tensors missing unexpected kept initialised rebuilt renamed tied duplicates cast frozen"
        " renewed bytes_sent bytes_received bytes_copied peak_host_bytes peak_device_bytes"
        " is_planned merged verified seconds to_json",
    ),
    "the result of convert": (
        lambda: anyrank.convert(WEIGHTS, "out"),
        "source path replaced format files tensors nbytes tied cast renamed merged copied skipped"
        " verified seconds to_json",
    ),
    "the result of diff": (
        lambda: anyrank.diff(WEIGHTS, WEIGHTS),
        "a b equal only_a only_b renamed shapes dtypes values numbers data step newest"
        " parts steps_equal steps_only unreadable to_json",
    ),
    "the result of inspect": (
        lambda: anyrank.inspect(WEIGHTS),
        "path format files tensors dtypes tied quantised parameters nbytes metadata skipped"
        " steps run_time to_json",
    ),
    "the result of verify": (
        lambda: anyrank.verify(WEIGHTS),
        "path format findings tensors nbytes checked steps to_json",
    ),
    "the result of check": (
        lambda: anyrank.check(nn.Linear(2, 2)),
        "append clear copy count extend index insert num_ranks pop remove reverse sort to_json",
    ),
    "ElasticLoader": (loader, f"{POSITION} from_shards"),
    "ElasticSampler": (
        lambda: anyrank.ElasticSampler(8, global_batch=4, microbatch=2),
        f"{POSITION} share",
    ),
    "Share": (share, "weight is_last step k seed scale seeded"),
    "Step": (
        lambda: next(iter(loader())),
        "number epoch samples k is_copy microbatches backward scale loss clip_grad_norm_",
    ),
    "Offload": (lambda: anyrank.Offload(1), "stats close"),
    "OffloadStats": (
        lambda: anyrank.Offload(1).stats(),
        "held_bytes used_bytes peak_bytes copied_bytes kept",
    ),
    "the result of tile": (lambda: anyrank.tile(nn.Linear(1, 1)), ""),
    "RankPool": (RankPool, "max_ranks run close"),
    "the handle of recompute_": (
        lambda: anyrank.recompute_(nn.Sequential(nn.ReLU()), "*"),
        "names remove",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_class_shows_what_is_documented_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, names = NAMES[name]
    assert {each for each in dir(make()) if not each.startswith("_")} == set(names.split())


# What each class defines itself, beside what it has of its framework.
OF_INTEGRATIONS = {
    "integrations.accelerate.Accelerator": (
        "accumulate backward clip_grad_norm_ clip_grad_value_ end_training free_memory load_state"
        " prepare prepare_data_loader prepare_model prepare_optimizer prepare_scheduler"
        " prepared_models report run save_state skip_first_batches step_loss unscale_gradients"
    ),
    "integrations.lightning.Elastic": (
        "loader on_exception on_fit_start on_train_end on_train_epoch_end on_train_start report"
        " setup state teardown"
    ),
    "integrations.torchtitan.CheckpointManager": (
        "close load maybe_wait_for_saving maybe_wait_for_staging save"
    ),
    "integrations.transformers.ElasticRun": "",
}


def test_a_class_of_an_integration_shows_no_more() -> None:
    classes = {name: kind for name, kind in integration_names().items() if inspect.isclass(kind)}
    found = {
        name: {each for each in vars(kind) if each[0] != "_"} for name, kind in classes.items()
    }
    assert found == {name: set(names.split()) for name, names in OF_INTEGRATIONS.items()}


def test_no_class_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: set[type] = set()
    for number, (make, _) in enumerate(NAMES.values()):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        looked_at.add(type(make()))
    public = [*public_names().values()]
    wanted = {*filter(inspect.isclass, public), *returned_classes(public).values()}
    left = {
        kind for kind in wanted - looked_at if not issubclass(kind, (BaseException, str, tuple))
    }
    assert not {kind.__name__ for kind in left if not is_dataclass(kind)}
