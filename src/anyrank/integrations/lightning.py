"""A callback of Lightning that saves a run, and resumes it on any number of ranks.

Tested with lightning 2.6.

Lightning iterates over one `Step` for each optimizer step, so that everything it counts (steps,
epochs, validation intervals, schedulers) is the same on any number of ranks. Its `training_step`
runs for each of this rank's microbatches.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Unpack

import anyrank
from anyrank.integrations.framework_names import check_names
from anyrank.integrations.lightning_loops import (
    LoopState,
    Replaced,
    Steps,
    problems_of,
)
from anyrank.integrations.run import FrameworkRun, RunOptions, numbered

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _callback_class() -> Any:
    """Return the Callback class of the imported packages, or of an installed one."""
    names = [name for name in PACKAGES if name in sys.modules]
    names = names or [name for name in PACKAGES if find_spec(name)][:1]
    if not names:
        raise ImportError("anyrank.integrations.lightning needs lightning: pip install lightning")
    bases: list[type] = []
    for name in names:
        package = importlib.import_module(PACKAGES[name])
        check_names(name, PACKAGES[name])
        bases.append(package.Callback)
    return type("Callback", tuple(bases), {})


_Callback: Any = _callback_class()


class Elastic(_Callback):
    """A callback that saves a Trainer's run, and resumes it on any number of ranks.

    Every rank must create one. `fit` resumes the newest step of the folder, if any, and saves when
    a save is due and at the end. To Lightning each optimizer step is one batch; `training_step` is
    called for each of this rank's microbatches. Works with SingleDeviceStrategy, DDPStrategy and
    ModelParallelStrategy (FSDP2), and automatic optimization with one optimizer. The page on
    Lightning in the documentation says what is saved, and what counts steps.

    Args:
        path: folder or URL of the run.
        global_batch: samples of an optimizer step, on all ranks together.
        resume: "auto", "must", a step or a path, as for `Checkpoints.resume`.
        options: options of the run, such as `every="10min"`: see
            `anyrank.integrations.run.RunOptions`.

    Raises:
        ValueError: in `fit`, on every rank: `ckpt_path`, accumulate_grad_batches, a limit of
            batches, an unsupported sharding, manual optimization, several optimizers, or a strategy
            that is not listed above.
        TypeError: in `fit`: training data that is not a DataLoader over a dataset with a length, or
            over a stream with shards.

    Example::

        import lightning
        from torch.utils.data import DataLoader

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(4, 1)

            def training_step(self, batch, batch_idx):
                return self.net(batch).square().mean()

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

        elastic = anyrank.integrations.lightning.Elastic("runs/a", global_batch=8, every=2)
        quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, callbacks=[elastic], **quiet
        )
        trainer.fit(Module(), DataLoader(torch.randn(32, 4), batch_size=2, shuffle=True))
        assert (trainer.global_step, elastic.loader.samples) == (4, 32)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        global_batch: int,
        resume: str | int | os.PathLike[str] = "auto",
        **options: Unpack[RunOptions],
    ) -> None:
        super().__init__()
        self._run = FrameworkRun(
            path, self._make_state, global_batch=global_batch, say=self._say, **options
        )
        self._which = resume
        self._trainer: Any = None
        self._loops: LoopState | None = None
        self._steps: Iterator[Any] = iter(())
        self._replaced = Replaced()

    @property
    def report(self) -> anyrank.ResumeReport | None:
        """The report of the run that the last `fit` resumed; None if it started a new run."""
        return self._run.report

    @property
    def state(self) -> anyrank.TrainState | None:
        """The state of the last `fit`; None before the first one."""
        return self._run.state

    @property
    def loader(self) -> anyrank.ElasticLoader | None:
        """The loader of the last `fit`, with receipts of complete epochs; None before the first."""
        return self._run.loader

    def _say(self, line: str) -> None:
        self._trainer.print(line)

    # -- Lightning's hooks ------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raise ValueError if the Trainer cannot be resumed; replace its DataLoader. Collective."""
        if stage != "fit":
            return
        for problem in problems_of(trainer, pl_module):
            raise ValueError(f"anyrank's Elastic callback: {problem}")
        self._trainer = trainer
        # This callback comes first in each hook, so that it saves before others end the run. A new
        # list, because Lightning iterates over the old one.
        trainer.callbacks = [self, *(c for c in trainer.callbacks if c is not self)]
        # Looked up only now, because the module and the DataModule are set up now.
        source = trainer.fit_loop._data_source
        dataloader = source.dataloader
        self._replaced.set(source, "dataloader", lambda: self._elastic_data(dataloader()))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Resume: model, optimizer and schedulers exist, and no loop has started. Collective."""
        self._refuse_ckpt_path()
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {len(trainer.optimizers)} optimizers, but Elastic "
                "needs exactly one. Use one optimizer with several parameter groups, or "
                "anyrank.Checkpoints in your own training loop"
            )
        trainer.fit_loop.setup_data()
        self._run.resume(self._which)
        if self.report and self.report.components.get("lightning") != "exact":
            assert self._loops is not None
            self._loops.begin_at(self.report.step)
        # Closed until the first step is complete, so that Lightning does not take over the signal
        # handlers.
        self._run.open().close()
        self._replaced.take_over(trainer, self._train, self._run.is_exact)

    def _make_state(self) -> anyrank.TrainState:
        """Make the state of a run from all that the Trainer has set up."""
        trainer = self._trainer
        self._loops = LoopState(trainer, self.loader)
        return anyrank.TrainState(
            trainer.strategy.model,
            trainer.optimizers[0],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            data=self.loader,
            seed=self._run.seed,
            first_rank=["lightning"],
            lightning=self._loops,
            **numbered("scheduler", [c.scheduler for c in trainer.lr_scheduler_configs]),
            **self._loops.modules,
        )

    def end_if_asked(self) -> None:
        """Stop the run now if any rank has received SIGTERM; the last complete step is saved.

        Collective: every rank must call it the same number of times. Call it after each batch of a
        long validation. It does nothing before the first step.

        Raises:
            SystemExit: SIGTERM was received.
        """
        if self._run.state is not None and self._run.state.step:
            self._run.end_if_asked()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Let Lightning continue in the middle of an epoch as if it had not been interrupted."""
        self._refuse_ckpt_path()
        # Its own restart would skip a validation, and would count some things twice.
        trainer.fit_loop.epoch_loop.restarting = False

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save a run that stops in the middle of an epoch, before the hooks of the epoch's end."""
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.completed < progress.ready:
            raise ValueError(
                f"on_train_batch_start returned -1 at batch {progress.completed}, so the rest of "
                "the epoch's samples would be lost. Set trainer.should_stop instead, which stops "
                "the training"
            )
        if not trainer.is_last_batch:
            self._complete()
            self._run.save()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step."""
        self._complete()
        self._run.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release everything without a save. Does not wait for other ranks."""
        self._run.abandon(exception)
        self._replaced.restore()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo all changes to the trainer."""
        self._replaced.restore()

    # -- steps ------------------------------------------------------------------------------------

    def _elastic_data(self, dataloader: Any) -> Steps:
        """Return the steps in place of the user's DataLoader."""
        group, strategy = None, self._trainer.strategy
        if hasattr(strategy, "device_mesh"):  # ranks of a tensor-parallel group share their data
            group = strategy.device_mesh["data_parallel"].get_group()
        return Steps(self._run.make_loader(dataloader, group), self._begin_epoch)

    def _begin_epoch(self) -> Iterator[Any]:
        # For a stream it would fetch a step ahead to find the last one; `_train` reports it.
        if (fetcher := self._trainer.fit_loop._data_fetcher) is not None:
            fetcher.prefetch_batches = 0
        return self._iterate()

    def _iterate(self) -> Generator[Any, None, None]:
        """Yield the steps of the rest of an epoch.

        This code runs between two of Lightning's batches, when all its counts are complete.
        """
        self._complete()
        assert self._loops is not None
        assert self.loader is not None
        if self.loader.epoch != self._trainer.current_epoch:
            raise ValueError(
                f"Lightning is in epoch {self._trainer.current_epoch}, but the data is in epoch "
                f"{self.loader.epoch}: the run folder was not written by this callback. Use the "
                "folder of a run of Elastic, or a new folder"
            )
        self._loops.restore_within_epoch()
        self._steps = iter(self.loader)
        for step in self._steps:
            yield step
            self._complete()

    def _complete(self) -> None:
        """Count the trained step, and save if a save is due. Collective."""
        assert self.loader is not None
        epoch = self.loader.epoch
        self._run.count()
        if self.loader.epoch != epoch:
            next(self._steps, None)  # verifies the epoch's receipt

    def _train(self, original: Any, step: Any, *args: Any) -> Any:
        """Run forward and backward of this rank's microbatches.

        Return the output of the last one, with the mean loss of the global batch.
        """
        trainer, strategy = self._trainer, self._trainer.strategy
        module, optimizer = trainer.lightning_module, trainer.optimizers[0]
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        optimization._on_before_zero_grad(optimizer)
        optimization._optimizer_zero_grad(trainer.fit_loop.batch_idx, optimizer)
        output: Any = None
        loss: Any = None
        for batch in step.microbatches(strategy.model):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = strategy.batch_to_device(batch, dataloader_idx=0)
            trainer._results.batch = batch  # self.log infers the batch size from it
            trainer._results.batch_size = None
            output = original(batch, *args)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                raise ValueError(
                    "training_step returned no loss, but must return one for every microbatch, "
                    "because the loss is the mean over the global batch. To ignore a microbatch, "
                    "return loss * 0"
                )
            strategy.backward(step.scale(loss), optimizer)
        if step.ends_epoch:
            assert self._loops is not None
            self._loops.end_epoch()
        self._run.note_step()
        mean = self._run.mean_loss(step).to(loss.dtype).to(loss.device)
        return {**output, "loss": mean} if isinstance(output, Mapping) else mean

    def _refuse_ckpt_path(self) -> None:
        path = self._trainer.ckpt_path
        if path:
            raise ValueError(
                f"remove ckpt_path={str(path)!r} from fit(): Elastic resumes from "
                f"{self._run.folder}. To start a run from Lightning's checkpoint, use "
                "Elastic(resume=path); from only its weights, call anyrank.load(module, path) "
                "before fit()"
            )
