"""What is not documented is private: of each public class, the attributes of an instance."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.public import (
    INTERNAL,
    described,
    integration_names,
    public_names,
    returned_classes,
)
from torch import nn

import anyrank
from anyrank.testing import RankPool
from anyrank.tools.convert.format_names import FormatName
from anyrank.tools.convert.formats import OUTPUTS
from anyrank.tools.inspect.inspect import Inspection

WEIGHTS = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}


def checkpoints() -> anyrank.Checkpoints:
    return anyrank.Checkpoints("run", anyrank.TrainState(nn.Linear(1, 1)))


def saved() -> anyrank.Checkpoints:
    ckpts = checkpoints()
    ckpts.save()
    ckpts.close()
    return ckpts


DATA = torch.zeros(8, 1)


def loader() -> anyrank.ElasticLoader:
    return anyrank.ElasticLoader(DATA, global_batch=4, microbatch=2)


def watching() -> Any:
    made = anyrank.watch("1h")
    made.close()
    return made


def record() -> Any:
    records: list[Any] = []
    checkpoints = anyrank.Checkpoints("record", anyrank.TrainState(), on_commit=records.append)
    checkpoints.save()
    return records[0]


# Functions that make an instance of each public class.
MAKERS: list[Callable[[], Any]] = [
    watching,
    anyrank.TrainState,
    checkpoints,
    lambda: saved().saved()[0],
    record,
    lambda: saved().resume(),
    lambda: anyrank.load(nn.Linear(2, 2), WEIGHTS),
    lambda: anyrank.plan(nn.Linear(2, 2), WEIGHTS),
    lambda: anyrank.Sync(nn.Linear(2, 2), nn.Linear(2, 2)),
    lambda: anyrank.sync(nn.Linear(2, 2), nn.Linear(2, 2)),
    lambda: anyrank.convert(WEIGHTS, "out"),
    lambda: anyrank.diff(WEIGHTS, WEIGHTS),
    lambda: anyrank.inspect(WEIGHTS),
    lambda: anyrank.verify(WEIGHTS),
    lambda: anyrank.check(nn.Linear(2, 2)),
    loader,
    lambda: next(iter(loader())),
    lambda: anyrank.Pack(4),
    lambda: anyrank.Buckets("size"),
    lambda: anyrank.Offload(1),
    lambda: anyrank.Offload(1).stats(),
    lambda: anyrank.tile(nn.Linear(1, 1)),
    RankPool,
    lambda: anyrank.recompute_(nn.Sequential(nn.ReLU()), "*"),
]


def undocumented(instance: Any) -> set[str]:
    """Public attributes of an object that no docstring of its class says something of."""
    kind = type(instance)
    told = set[str]().union(*map(described, kind.__mro__))
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        if callable(value) or isinstance(value, property | classmethod | staticmethod):
            told |= {name} if inspect.getdoc(value) else set()
    return {each for each in dir(instance) if not each.startswith("_")} - told - {*INTERNAL}


@pytest.fixture
def instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    for number, make in enumerate(MAKERS):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        made.append(make())
    return made


def test_a_class_shows_what_is_documented_alone(instances: list[Any]) -> None:
    assert {type(one).__name__: found for one in instances if (found := undocumented(one))} == {}


def test_an_undocumented_attribute_is_found() -> None:
    class Shown:
        """A class.

        Attributes:
            told: of this one.
        """

        def __init__(self) -> None:
            self.told = self.other = 1

        def bare(self) -> None: ...

    assert undocumented(Shown()) == {"other", "bare"}


# What each class defines itself, beside what it has of its framework.
OF_INTEGRATIONS = {
    "integrations.accelerate.Accelerator": (
        "accumulate backward clip_grad_norm_ clip_grad_value_ end_if_asked end_training"
        " free_memory load_state prepare prepare_data_loader prepare_model prepare_optimizer"
        " prepare_scheduler prepared_models report run save_state skip_first_batches step_loss"
        " unscale_gradients"
    ),
    "integrations.lightning.Elastic": (
        "end_if_asked loader on_exception on_fit_start on_train_end on_train_epoch_end"
        " on_train_start report setup state teardown"
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


def test_no_class_is_left_out(instances: list[Any]) -> None:
    looked_at = {type(one) for one in instances}
    public = [*public_names().values()]
    wanted = {*filter(inspect.isclass, public), *returned_classes(public).values()}
    left = {
        kind for kind in wanted - looked_at if not issubclass(kind, (BaseException, str, tuple))
    }
    assert not {kind.__name__ for kind in left if not is_dataclass(kind)}


# Programs read these: a name that is spelled otherwise is another name.
FIELDS = {
    anyrank.LoadReport: "missing unexpected initialised rebuilt kept tied duplicates cast renewed "
    "verified tensors bytes_sent peak_host_bytes peak_device_bytes seconds own_code "
    "own_code_not_run frozen format strategy reason nonfinite skipped bytes_read",
    anyrank.SyncReport: "missing unexpected initialised rebuilt kept tied duplicates cast renewed "
    "verified tensors bytes_sent peak_host_bytes peak_device_bytes seconds renamed merged frozen "
    "bytes_received bytes_copied channel channel_bytes group_bytes is_planned",
    anyrank.LoadPlan: "strategy reason world_size model_bytes source_bytes share_bytes read_bytes "
    "sent_bytes peak_bytes format missing unexpected",
    anyrank.ResumeReport: "step epoch samples path saved_on ranks lost_steps lost_samples "
    "set_aside redone_steps components notes verified bytes_read seconds",
    Inspection: "path format files tensors dtypes parameters nbytes metadata skipped tied "
    "quantised steps run_time",
}


@pytest.mark.parametrize("report", FIELDS)
def test_fields_of_reports_keep_their_names(report: Any) -> None:
    assert [field.name for field in fields(report)] == FIELDS[report].split()


def test_convert_takes_the_formats_of_its_table_and_no_others() -> None:
    assert inspect.signature(anyrank.convert).parameters["to"].annotation == "FormatName"
    assert get_args(FormatName) == tuple(OUTPUTS)
