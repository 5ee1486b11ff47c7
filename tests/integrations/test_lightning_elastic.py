"""A run of a Trainer, saved and resumed on other numbers of ranks by the callback alone."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scripts import TORCHRUN

import anyrank
from anyrank.testing import Fault, RanksFailed, run_ranks

pytest.importorskip("lightning")

END, STOP = 16, 6  # steps; an epoch has 4, validation comes after each second epoch


def train(arguments: list[str]) -> dict[str, Any]:
    """The example on this rank: its losses, what it read, and what the callbacks came to."""
    import lightning
    from examples import lightning_resume

    ids: list[int] = []

    class Seen(lightning_resume.Points):
        def __getitem__(self, index: int) -> Any:
            if len(self) == 46:
                ids.append(index)
            return super().__getitem__(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning_resume, "Points", Seen)
        patch.setattr(lightning.Trainer, "save_checkpoint", lambda *_: None)
        module, elastic = lightning_resume.main(arguments)
    trainer = module.trainer
    state = elastic.state
    return {
        "losses": module.losses,
        "ids": ids,
        "report": elastic.report,
        "receipts": elastic.loader.receipts,
        "counts": (trainer.global_step, trainer.current_epoch, state.step, state.samples),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "val": trainer.callback_metrics.get("val"),
        "weights": {
            name: getattr(value, "full_tensor", lambda value=value: value)()
            for name, value in module.state_dict().items()
        },
    }


def import_framework() -> None:
    import lightning  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def ranks() -> None:
    """Four ranks that have imported the framework, all at a time."""
    run_ranks(4, import_framework)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run on one rank, never stopped."""
    folder = tmp_path_factory.mktemp("reference")
    return run_ranks(1, train, ["--folder", str(folder)], env=TORCHRUN)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_ranks(3, train, ["--folder", folder, "--stop", str(STOP)], env=TORCHRUN)


def equal(results: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """Losses of every step, as on one rank."""
    for result in results:
        for step, loss in result["losses"].items():
            assert loss == pytest.approx(reference["losses"][step], rel=1e-9), step


@pytest.mark.slow
def test_three_ranks_go_on_on_two_and_then_on_four(
    tmp_path: Path, reference: dict[str, Any], saved: tuple[str, list[dict[str, Any]]]
) -> None:
    folder, first = saved
    shutil.copytree(folder, tmp_path / "run")
    arguments = ["--folder", str(tmp_path / "run")]
    second = run_ranks(2, train, [*arguments, "--stop", "8"], env=TORCHRUN)
    third = run_ranks(4, train, arguments, env=TORCHRUN)
    for results, steps in ((first, range(STOP)), (second, range(STOP, 8)), (third, range(8, END))):
        equal(results, reference)
        assert list(results[0]["losses"]) == [step + 1 for step in steps]
    assert second[0]["report"].saved_on.ranks == 3
    components = second[0]["report"].components
    assert {components[part] for part in ("scheduler", "data", "lightning")} == {"exact"}
    # The rest of the second epoch: each sample on one of the ranks, and nothing else.
    read = [index for result in second for index in set(result["ids"])]
    assert sorted(read) == sorted(reference["ids"][46 + 24 : 46 + 46])
    for result in third:
        assert result["counts"] == reference["counts"]
        assert result["receipts"] == [(epoch, 46, "exactly once") for epoch in range(4)]
        assert result["lr"] == pytest.approx(reference["lr"], abs=1e-12)
        assert result["val"] == pytest.approx(reference["val"])
        # What the callback EMAWeightAveraging leaves in the module at the end
        for name, tensor in reference["weights"].items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_sharded_ranks_continue_on_another_number_and_a_missing_part_is_named(
    tmp_path: Path, reference: dict[str, Any], saved: tuple[str, list[dict[str, Any]]]
) -> None:
    arguments = ["--folder", str(tmp_path / "run"), "--strategy", "fsdp2"]
    shutil.copytree(saved[0], tmp_path / "run")
    with pytest.raises(RanksFailed, match="EMAWeightAveraging_average_model"):
        run_ranks(2, train, arguments, env=TORCHRUN)  # a part of the run is not there
    arguments[1] = str(tmp_path / "sharded")
    first = run_ranks(2, train, [*arguments, "--stop", str(STOP)], env=TORCHRUN)
    second = run_ranks(3, train, [*arguments, "--stop", "8"], env=TORCHRUN)
    assert {*second[0]["report"].components.values()} >= {"resharded", "exact"}
    equal(first, reference)
    equal(second, reference)


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_step_before(
    tmp_path: Path, reference: dict[str, Any]
) -> None:
    arguments = ["--folder", str(tmp_path / "run")]
    kill = Fault(0, "save.commit", "kill", 2)  # of step 10
    with pytest.raises(RanksFailed):
        run_ranks(2, train, arguments, env=TORCHRUN, faults=[kill], grace=2)
    results = run_ranks(2, train, arguments, env=TORCHRUN)
    assert results[0]["report"].step == 5
    assert list(results[0]["losses"]) == list(range(6, END + 1))
    equal(results, reference)


def exact(folder: str, strategy: str, stop: int) -> tuple[bytes, list[str]]:
    """The bytes of the weights after clipped steps, and the loader's notes."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Dropout(0.1))

        def configure_model(self) -> None:
            if strategy == "fsdp2":
                fully_shard(self.net, mesh=self.trainer.strategy.device_mesh["data_parallel"])

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    count = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    sharded = ModelParallelStrategy(data_parallel_size=count, tensor_parallel_size=1)
    elastic = anyrank.integrations.lightning.Elastic(folder, global_batch=12, exact=True)
    rows: Any = torch.randn(36, 7, generator=torch.Generator().manual_seed(1))
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=count,
        strategy=sharded if strategy == "fsdp2" else strategy,
        max_steps=stop,
        gradient_clip_val=0.1,
        callbacks=[elastic],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True))
    tensors = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in module.parameters()]
    weights = torch.cat([tensor.flatten() for tensor in tensors])
    return weights.numpy().tobytes(), elastic.loader.notes


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.exact_fsdp)])
def test_exact_runs_have_the_same_bits_on_any_number_of_ranks(
    tmp_path: Path, strategy: str
) -> None:
    alone = run_ranks(1, exact, str(tmp_path / "one"), strategy, 5, env=TORCHRUN)
    for ranks, stop in ((3, 1), (2, 3)):
        run_ranks(ranks, exact, str(tmp_path / "many"), strategy, stop, env=TORCHRUN)
    many = run_ranks(4, exact, str(tmp_path / "many"), strategy, 5, env=TORCHRUN)
    assert many == alone * 4
    assert alone[0][1] == []


def tensor_parallel(folder: str) -> tuple[list[float], int]:
    """Both ranks share a model by tensor parallelism, and have the same data."""
    import lightning
    from examples.lightning_resume import Points, Regression
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.tensor import parallel

    class Parallel(Regression):
        def configure_model(self) -> None:
            mesh = self.trainer.strategy.device_mesh["tensor_parallel"]
            plan = {"0": parallel.ColwiseParallel(), "3": parallel.RowwiseParallel()}
            self.net[2].p = 0.0
            parallel.parallelize_module(self.net, mesh, plan)

    torch.manual_seed(0)
    elastic = anyrank.integrations.lightning.Elastic(folder, global_batch=12)
    off = ["enable_progress_bar", "enable_checkpointing", "logger"]
    options: dict[str, Any] = dict.fromkeys(off, False)
    strategy = ModelParallelStrategy()  # its default: all ranks of a node
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=4, callbacks=[elastic], **options
    )
    module = Parallel()
    points = torch.utils.data.DataLoader(Points(46, noise=0.1), batch_size=2, shuffle=True)
    trainer.fit(module, points)
    return [*module.losses.values()], elastic.loader.samples


@pytest.mark.slow
def test_ranks_of_tensor_parallelism_have_the_same_data(tmp_path: Path) -> None:
    first, second = run_ranks(2, tensor_parallel, str(tmp_path / "run"), env=TORCHRUN)
    assert first == second
    assert (len(first[0]), first[1]) == (4, 46)
    assert run_ranks(2, tensor_parallel, str(tmp_path / "run"), env=TORCHRUN)[0][0] == []


# -- one process ----------------------------------------------------------------------------------

NO_WORKERS = pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
pytestmark = [
    NO_WORKERS,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated"),
]


def small(**options: Any) -> Any:
    """A module with schedules of every kind, in one process."""
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

    class Small(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))
            self.seen: list[Any] = []
            self.extra = 0

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["extra"] = self.extra

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.extra = checkpoint["extra"]

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert isinstance(batch, torch.Tensor)
            return batch * 1.0

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            loss = self.net(batch).square().mean()
            self.log("train", loss, on_step=True, on_epoch=True)
            return {"loss": loss, "size": len(batch)}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.extra += 1
            rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
            self.seen.append((self.global_step, batch_idx, float(outputs["loss"]), rates[0]))
            assert outputs["size"] == 2

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val", self.net(batch).square().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            schedules = torch.optim.lr_scheduler
            return [optimizer], [
                {"scheduler": schedules.StepLR(optimizer, 3, 0.9), "interval": "step"},
                {"scheduler": schedules.StepLR(optimizer, 1, 0.5), "interval": "epoch"},
                {
                    "scheduler": schedules.ReduceLROnPlateau(optimizer, "max", 0.7, patience=0),
                    "monitor": "val",
                },
            ]

    module, kept = Small(), options.pop("callbacks", [])
    elastic = anyrank.integrations.lightning.Elastic(options.pop("folder"), global_batch=6)
    stopping = EarlyStopping("val", patience=50, mode="max", check_on_train_epoch_end=False)
    best = ModelCheckpoint(f"{elastic._run.folder}-best", monitor="val", save_top_k=2)
    off = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 3, **off, **options},
        callbacks=[stopping, Timer(duration="00:01:00:00"), elastic, best, *kept],
    )
    return trainer, module, elastic, (stopping, best)


def data(rows: int = 28, **options: Any) -> Any:
    loader = torch.utils.data.DataLoader
    points = torch.linspace(0, 1, 4 * rows).view(rows, 4)
    return loader(points, **{"batch_size": 2, "shuffle": True, **options})


def held_out() -> Any:
    return data(8, shuffle=False)


def counts(trainer: Any) -> list[Any]:
    loops = trainer.fit_loop
    progress = loops.epoch_loop.batch_progress, loops.epoch_progress, loops.epoch_loop
    return [
        progress[0].total.completed,
        progress[1].total.completed,
        progress[2].scheduler_progress.total.completed,
        progress[2].automatic_optimization.optim_progress.optimizer.zero_grad.total.completed,
        progress[2]._batches_that_stepped,
    ]


BY_STEPS = {"val_check_interval": 2}


@pytest.mark.parametrize(
    ("stop", "options"), [(5, {}), (7, {}), (2, BY_STEPS), (5, BY_STEPS), (9, BY_STEPS)]
)
def test_a_trainer_goes_on_as_if_it_had_not_been_stopped(
    stop: int, options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loops, schedules by step, epoch and metric, and callbacks; an epoch has 5 steps."""
    whole, module, _, callbacks = small(folder=tmp_path / "whole", **options)
    whole.fit(module, data(), held_out())
    first, stopped, *_ = small(folder=tmp_path / "run", max_steps=stop, **options)
    first.fit(stopped, data(), held_out())
    second, resumed, elastic, again = small(folder=tmp_path / "run", **options)
    second.fit(resumed, data(), held_out())
    assert stopped.seen + resumed.seen == module.seen
    assert (counts(second), resumed.extra) == (counts(whole), module.extra)
    assert again[0].state_dict() == callbacks[0].state_dict()
    assert again[1].best_model_score == callbacks[1].best_model_score
    assert elastic.report is not None
    assert f"anyrank: {elastic.report.in_a_line()}" in capsys.readouterr().out.splitlines()
    assert elastic.loader.receipts == [(epoch, 28, "exactly once") for epoch in range(3)]
    assert second.callback_metrics["val"] == whole.callback_metrics["val"]


@pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`")
def test_a_logger_a_datamodule_and_mixed_precision_go_on(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.given: Any = None

        def train_dataloader(self) -> Any:
            return data()

        def val_dataloader(self) -> Any:
            return held_out()

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.trainer.global_step}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.given = state_dict

    def fit(name: str, folder: str, **more: Any) -> tuple[list[Any], list[Any], Any]:
        clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
        logger = CSVLogger(tmp_path, name=name, version=0)
        options = {"precision": "bf16-mixed", "log_every_n_steps": 1, "logger": logger, **clip}
        trainer, module, *_ = small(folder=tmp_path / folder, **options, **more)
        points = Module()
        trainer.fit(module, datamodule=points)
        with open(tmp_path / name / "version_0/metrics.csv") as file:
            lines = [(row["step"], row["train_step"], row["val"]) for row in csv.DictReader(file)]
        return module.seen, [line for line in lines if any(line[1:])], points.given

    whole, first, second = fit("a", "whole"), fit("b", "run", max_steps=7), fit("c", "run")
    assert [first[0] + second[0], first[1] + second[1]] == [whole[0], whole[1]]
    assert second[2] == {"step": 7}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"accumulate_grad_batches": 2},
            "remove accumulate_grad_batches=2; global_batch determines",
        ),
        ({"limit_train_batches": 3}, "limit_train_batches, overfit_batches and fast_dev_run"),
        ({"overfit_batches": 2}, "limit_train_batches, overfit_batches and fast_dev_run"),
        ({"fast_dev_run": True}, "limit_train_batches, overfit_batches and fast_dev_run"),
        (
            {"reload_dataloaders_every_n_epochs": 1},
            "reload_dataloaders_every_n_epochs changes the data",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    trainer, module, *_ = small(folder=tmp_path / "run", **options)
    with pytest.raises(ValueError, match=problem):
        trainer.fit(module, data(), held_out())
    assert not (tmp_path / "run").exists()


def test_manual_optimization_and_several_optimizers_are_refused(tmp_path: Path) -> None:
    trainer, module, *_ = small(folder=tmp_path / "run")
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"manual optimization .* Use automatic optimization"):
        trainer.fit(module, data(), held_out())


def test_a_callback_that_trains_steps_of_its_own_is_refused(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import LearningRateFinder

    trainer, module, *_ = small(folder=tmp_path / "run", callbacks=[LearningRateFinder()])
    with pytest.raises(ValueError, match="LearningRateFinder runs its own training steps"):
        trainer.fit(module, data(), held_out())


def test_the_best_weights_are_there_for_validation_in_a_later_process_too(tmp_path: Path) -> None:
    for epochs in (1, 2):
        trainer, module, _, (_, best) = small(folder=tmp_path / "run", max_epochs=epochs)
        trainer.fit(module, data(), held_out())
        (found,) = trainer.validate(
            module, held_out(), ckpt_path="best", verbose=False, weights_only=False
        )
        assert found["val"] == pytest.approx(float(best.best_model_score))


def test_an_epoch_that_is_left_is_an_error_and_saves_nothing(tmp_path: Path) -> None:
    trainer, module, *_ = small(folder=tmp_path / "run", max_epochs=1)
    module.on_train_batch_start = lambda batch, number: -1 if number == 2 else None
    with pytest.raises(ValueError, match="returned -1 at batch 2, so the rest"):
        trainer.fit(module, data(), held_out())
    assert not list((tmp_path / "run").glob("step-*"))


def test_two_callbacks_are_refused(tmp_path: Path) -> None:
    other = anyrank.integrations.lightning.Elastic(tmp_path / "other", global_batch=6)
    trainer, module, *_ = small(folder=tmp_path / "run", callbacks=[other])
    with pytest.raises(ValueError, match="it appears twice in Trainer"):
        trainer.fit(module, data(), held_out())


def test_data_whose_order_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    """By what all frameworks share; its tests have the other kinds."""
    trainer, module, *_ = small(folder=tmp_path / "run")
    with pytest.raises(TypeError, match="the training data is a dict"):
        trainer.fit(module, {"a": data(), "b": data()}, held_out())


@pytest.mark.filterwarnings("ignore:The dirpath has changed from")
def test_lightnings_own_resume_is_refused_beside_it(tmp_path: Path) -> None:
    trainer, module, *_ = small(folder=tmp_path / "run", max_epochs=1)
    trainer.fit(module, data(), held_out())
    path = str(tmp_path / "own.ckpt")
    trainer.save_checkpoint(path)
    trainer, module, *_ = small(folder=tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"remove ckpt_path='.*own.ckpt' from fit\(\): Elastic resumes from"
    ):
        trainer.fit(module, data(), held_out(), ckpt_path=path, weights_only=False)
    assert not (tmp_path / "other").exists()


def test_the_trainer_is_given_back_as_it_was(tmp_path: Path) -> None:
    trainer, module, *_ = small(folder=tmp_path / "run", max_steps=5)
    trainer.fit(module, data(), held_out())
    assert not {"training_step", "batch_to_device"} & vars(trainer.strategy).keys()
    assert "_on_before_batch_transfer" not in vars(module)
    assert not trainer.fit_loop._skip_backward
    assert trainer.validate(module, held_out(), verbose=False)
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 3, -1
    trainer.fit(module, data(), held_out())  # continues its run
    assert trainer.global_step == 15


def test_an_error_in_a_step_leaves_the_newest_checkpoint(tmp_path: Path) -> None:
    class Fail(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Fail.calls += 1
            if Fail.calls > 9:  # two of a sanity check, then in the third step
                raise RuntimeError("a defect")
            return x

    trainer, module, elastic, _ = small(folder=tmp_path / "run")
    elastic._run._of_checkpoints["every"] = 1
    module.net.append(Fail())
    with pytest.raises(RuntimeError, match="a defect"):
        trainer.fit(module, data(), held_out())
    with anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState()) as ckpts:
        assert [saved.step for saved in ckpts.saved()] == [2, 1]
    assert not vars(trainer.strategy).keys() & {"training_step"}


def test_what_lightning_saved_begins_a_run(tmp_path: Path) -> None:
    import lightning

    off = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    own = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, enable_checkpointing=False, **off
    )
    _, module, *_ = small(folder=tmp_path / "unused")
    own.fit(module, data(), held_out())
    own.save_checkpoint(tmp_path / "own.ckpt")
    trainer, taken, elastic, _ = small(folder=tmp_path / "run", max_epochs=2)
    elastic._which = tmp_path / "own.ckpt"
    trainer.fit(taken, data(), held_out())
    assert elastic.report is not None
    assert str(elastic.report.components["model"]) == "exact"
    begin = own.global_step  # of one process: an optimizer step for each batch
    assert [seen[0] for seen in taken.seen] == [*range(begin + 1, begin + 6)]
    assert trainer.current_epoch == 2
    assert taken.seen[0][2] < module.seen[0][2]
