"""What the integrations share: versions that were tested, and a DataLoader as a loader of steps."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import anyrank
from anyrank.integrations import framework_names
from anyrank.integrations.dataloaders import elastic_loader
from anyrank.integrations.run import FrameworkRun
from anyrank.versions import TESTED, warn_if_untested


@pytest.mark.parametrize(
    ("installed", "lines"),
    [("2.6.0", 0), ("2.6.9rc1", 0), ("2.5.1", 1), ("2.60", 1), ("3.0", 1), (None, 0)],
)
def test_an_untested_version_gives_a_line_and_no_error(
    installed: str | None,
    lines: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setitem(TESTED, "lightning", "2.6")
    monkeypatch.setattr("importlib.metadata.version", version)
    warn_if_untested.cache_clear()
    with caplog.at_level(logging.WARNING, "anyrank"):
        warn_if_untested("lightning")
        warn_if_untested("lightning")
    warn_if_untested.cache_clear()
    assert len(caplog.records) == lines


class Framework:
    """A class of a framework, as in the table below."""

    def __init__(self) -> None:
        self._loader: list[int] | None = None

    def _run(self, step: int, *rest: int, scale: float = 1.0, **more: int) -> None: ...


@pytest.mark.parametrize(
    ("name", "tested", "problem"),
    [
        ("_run", "self, step, *rest, scale, **more", None),
        ("_loader", None, None),
        (
            "_run",
            "self, step",
            r"Framework\._run has the parameters \(self, step, \*rest, scale, \*\*more\), not",
        ),
        ("_train", "self", r"Framework has no method _train\(self\)"),
        ("_steps", None, "Framework has no _steps"),
    ],
)
def test_a_name_that_differs_from_the_table_is_an_import_error(
    name: str, tested: str | None, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(framework_names.TESTED, "torch", "2.13")
    monkeypatch.setattr(torch, "Framework", Framework, raising=False)
    monkeypatch.setitem(framework_names.NAMES, "torch", {"Framework": {name: tested}})
    if problem is None:
        framework_names.check_names("torch")
    else:
        with pytest.raises(
            ImportError, match=rf"torch \S+ does .*: {problem}.*Install torch==2\.13"
        ):
            framework_names.check_names("torch")


GONE = {
    "transformers": ("transformers.trainer_callback", "ExportableState"),
    "lightning": ("lightning.pytorch.loops", "_FitLoop"),
    "accelerate": ("accelerate.scheduler", "AcceleratedScheduler"),
}
IMPORTS = """
for integration, (module, name) in GONE.items():
    owner = importlib.import_module(module)
    value = vars(owner).pop(name)
    try:
        importlib.import_module(f"anyrank.integrations.{integration}")
    except ImportError as error:
        print(error)
    setattr(owner, name, value)
"""


def test_a_class_that_is_gone_is_an_import_error() -> None:
    for integration in GONE:
        pytest.importorskip(integration)
    script = f"import importlib\nGONE = {GONE}\n{IMPORTS}"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for (integration, place), said in zip(GONE.items(), run.stdout.splitlines(), strict=True):
        assert f"{'.'.join(place)} does not exist. Install" in said
        assert f"{integration}=={framework_names.TESTED[integration]}.*" in said


def overridden_methods(kind: type) -> set[str]:
    """What a class of an integration, or a base of it, overrides of a framework's."""
    own = [one for one in kind.__mro__ if one.__module__.startswith("anyrank.")]
    rest = [one for one in kind.__mro__ if one not in own]
    names = {name for one in own for name, value in vars(one).items() if inspect.isfunction(value)}
    return {name for name in names if any(name in vars(one) for one in rest)} - {"__init__"}


def test_every_method_that_is_overridden_is_in_the_table() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("lightning")
    from anyrank.integrations import accelerate, lightning, trainer_loop

    kinds = {"Trainer": trainer_loop.ElasticTrainer, "Accelerator": accelerate.Accelerator}
    packages = {"Trainer": "transformers", "Accelerator": "accelerate", "Callback": "lightning"}
    for owner, kind in {**kinds, "Callback": lightning.Elastic}.items():
        listed = framework_names.NAMES[packages[owner]][owner]
        assert overridden_methods(kind) - listed.keys() == set()
        assert len(overridden_methods(kind)) > 5


def test_a_run_of_a_framework_refuses_options_that_it_does_not_have() -> None:
    state = anyrank.TrainState
    with pytest.raises(
        TypeError, match="unknown option 'evry'; the options of a run are microbatch, seed"
    ):
        FrameworkRun("runs/a", state, global_batch=4, say=print, evry=3)
    with pytest.raises(ValueError, match="keep=1: must be at least 2"):
        FrameworkRun("runs/a", state, global_batch=4, say=print, keep=1)


def test_a_run_of_a_framework_counts_a_step_once_and_saves_nothing_after_an_error(
    tmp_path: Path,
) -> None:
    def make() -> FrameworkRun:
        model = torch.nn.Linear(1, 1)
        return FrameworkRun(
            tmp_path / "run", lambda: anyrank.TrainState(model), global_batch=4, say=said.append
        )

    said: list[str] = []
    run = make()
    run.begin("resume it")
    run.note_step()
    run.count()
    run.count()
    assert run.state is not None
    assert run.state.step == 1
    run.note_step()
    run.abandon(RuntimeError())
    assert not list((tmp_path / "run").glob("step-*"))
    with run:
        run.begin("resume it")
        run.note_step()
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000001"]
    with pytest.raises(
        ValueError, match=r"run already contains a run\. resume it, or use a different folder"
    ):
        make().begin("resume it")
    assert said == []  # as nothing was resumed
    make().resume("auto")
    step = tmp_path / "run" / "step-00000001"
    assert said == [
        f"anyrank: resumed {step} (step 1, epoch 0, 0 samples; saved on 1 rank, now 1): "
        "nothing lost"
    ]


DATA: Any = torch.arange(10)


def steps_of(dataloader: Any, **options: Any) -> list[list[list[int]]]:
    """The samples of an epoch, by step and microbatch."""
    loader = elastic_loader(dataloader, global_batch=4, process_group=anyrank.ALONE, **options)
    model = torch.nn.Identity()
    return [[batch.tolist() for batch in step.microbatches(model)] for step in loader]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [index for step in steps for batch in step for index in batch]


def test_a_dataloader_keeps_its_order_and_its_end() -> None:
    assert steps_of(DataLoader(DATA, batch_size=2)) == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9]],
    ]
    assert len(steps_of(DataLoader(DATA, batch_size=2, drop_last=True))) == 2
    assert steps_of(DataLoader(DATA, batch_size=2), microbatch=4)[0] == [[0, 1, 2, 3]]
    shuffled = flat(steps_of(DataLoader(DATA, batch_size=2, shuffle=True)))
    assert shuffled != sorted(shuffled) == list(range(10))
    weights = WeightedRandomSampler([0.0] * 9 + [1.0], 10)
    assert {*flat(steps_of(DataLoader(DATA, batch_size=2, sampler=weights)))} == {9}


class ShardedStream(IterableDataset[Any]):
    num_shards = 2

    def shard(self, num_shards: int, index: int) -> ShardedStream:
        return self

    def __iter__(self) -> Any:
        return iter(())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


@pytest.mark.parametrize(
    ("dataloader", "problem"),
    [
        (lambda: [1, 2], "the training data is a list"),
        (lambda: DataLoader(Stream(), batch_size=2), "a stream, whose order cannot be planned"),
        (
            lambda: DataLoader(ShardedStream(), batch_size=2, drop_last=True),
            "drop_last=True, which is not supported for streams",
        ),
        (lambda: DataLoader(DATA, batch_size=None), "has a batch_sampler, or no batching"),
        (
            lambda: DataLoader(DATA, sampler=torch.utils.data.RandomSampler(DATA, num_samples=4)),
            "sampler is a RandomSampler, whose order",
        ),
        (
            lambda: DataLoader(DATA, sampler=torch.utils.data.RandomSampler(DATA, True)),
            "sampler is a RandomSampler, whose order",
        ),
        (
            lambda: DataLoader(DATA, sampler=torch.utils.data.DistributedSampler(DATA, 1, 0)),
            "has a DistributedSampler. anyrank already divides the data",
        ),
        (
            lambda: DataLoader(DATA, sampler=torch.utils.data.SubsetRandomSampler(range(9))),
            "sampler is a SubsetRandomSampler, whose order is unknown",
        ),
        (
            lambda: DataLoader(DATA, sampler=torch.utils.data.SequentialSampler(range(9))),
            r"sampler is a SequentialSampler, .* some of the samples, over a torch",
        ),
        (lambda: DataLoader(DATA, worker_init_fn=print), "worker_init_fn, which is not supported"),
        (
            lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 3)),
            r"sampler is a WeightedRandomSampler, .* num_samples=len\(dataset\)",
        ),
    ],
)
def test_a_dataloader_that_cannot_be_kept_is_refused(dataloader: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        elastic_loader(dataloader(), global_batch=4)


@pytest.mark.parametrize("title", ["Lightning", "The transformers Trainer", "Accelerate"])
def test_a_script_changes_in_at_most_three_lines(title: str) -> None:
    text = (Path(__file__).parents[3] / "docs/frameworks.md").read_text(encoding="utf-8")
    part = text.split(f"\n## {title}\n")[1]
    diff = part.split("```diff\n")[1].split("```")[0].splitlines()
    assert 1 <= sum(line.startswith("+") for line in diff) <= 3
