"""The run under a framework's loop: its options, and when it opens, counts, saves and closes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, TypedDict

import torch
import torch.distributed as dist

import anyrank
from anyrank.integrations.dataloaders import OnBatchChange, elastic_loader


class RunOptions(TypedDict, total=False):
    """Options of a run under a framework (`FrameworkRun`): its steps and its saves.

    Attributes:
        microbatch: samples of one forward pass; default: the DataLoader's batch_size.
        seed: seed of the order of the data and of all random numbers; default: 0.
        exact: the same bits on any number of ranks, as with `ElasticLoader(exact=True)`.
        on_batch_change: what to do if the run was saved with a different global_batch, as for
            `ElasticLoader`: "error" or "rescale"; default: "error".
        every: when to save, as for `anyrank.Checkpoints`: a number of steps (500), a time
            ("10min"), or None to save only at the end.
        keep: number of newest steps to retain, at least 2; default: 3.
        keep_every: an int; steps that are multiples of it are never removed.
        background: pause training only while the state is copied.
        verify: what a resume compares, as in `anyrank.Checkpoints`; default: every byte.
        on_commit: called on the first rank with each `SaveRecord`.
        settings: which hyperparameters of schedulers and optimizers win if the script and the saved
            run differ: "saved" or "script", as for `Checkpoints.resume`; default: "saved".
        transform, keys: as for `anyrank.ElasticLoader`.
        window: for a training stream, as for `ElasticLoader.from_iterable`.
    """

    microbatch: int | None
    seed: int
    exact: bool
    on_batch_change: OnBatchChange
    every: int | str | None
    keep: int
    keep_every: int | Callable[[int], bool] | None
    background: bool
    verify: bool
    on_commit: Callable[[Any], object] | None
    settings: Literal["saved", "script"]
    transform: Any
    window: int | None
    keys: Any


OF_LOADER = ("microbatch", "seed", "exact", "on_batch_change", "transform", "window", "keys")


class FrameworkRun:
    """The run of a framework's loop, whose parts are created late. Its methods are collective.

    Args:
        folder: path or URL of the run.
        make_state: called at the first use of the run, and again after `close`.
        global_batch: samples of an optimizer step, on all ranks together.
        say: prints a line on the first rank, with the framework's own console.
        options: `RunOptions`.

    Attributes:
        folder: path or URL of the run.
        loader: the `ElasticLoader` over the training data; None until it is made.
        state: the `TrainState`; None until the run is opened.
        checkpoints: the `Checkpoints`; None until the run is opened.
        report: the `ResumeReport` of the last resume; None if there was nothing to resume.
        has_stepped: whether the optimizer has stepped in a step that is not counted yet.
        microbatch, seed, is_exact: taken from the options.

    Raises:
        TypeError: an option that is not in `RunOptions`, or has the wrong type.
        ValueError: an option with a value that is not allowed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        make_state: Callable[[], anyrank.TrainState],
        *,
        global_batch: int,
        say: Callable[[str], object],
        **options: Any,
    ) -> None:
        unknown = sorted(options.keys() - RunOptions.__annotations__.keys())
        if unknown:
            known = ", ".join(RunOptions.__annotations__)
            raise TypeError(f"unknown option {unknown[0]!r}; the options of a run are {known}")
        self.folder = os.fspath(folder)
        self.loader: anyrank.ElasticLoader | None = None
        self.state: anyrank.TrainState | None = None
        self.checkpoints: anyrank.Checkpoints | None = None
        self.report: anyrank.ResumeReport | None = None
        self.has_stepped = False
        self.microbatch: int | None = options.get("microbatch")
        self.seed: int = options.get("seed", 0)
        self.is_exact: bool = options.get("exact", False)
        self._make_state = make_state
        self._say = say
        self._put_off: Callable[[], None] | None = None  # work that is due after the counted step
        self._is_open = False
        self._is_begun = False  # resumed, or started in an empty folder
        self._of_loader = {name: options.pop(name) for name in OF_LOADER if name in options}
        self._of_loader["global_batch"] = global_batch
        self._settings = options.pop("settings", "saved")
        self._of_checkpoints = options
        # Raises for wrong options now; the framework's process group may come later.
        self._checkpoints_of(anyrank.TrainState(), process_group=anyrank.ALONE)

    def _checkpoints_of(self, state: anyrank.TrainState, **more: Any) -> anyrank.Checkpoints:
        return anyrank.Checkpoints(self.folder, state, **self._of_checkpoints, **more)

    def make_loader(self, dataloader: Any, process_group: Any = None) -> anyrank.ElasticLoader:
        """Return the loader of steps over a DataLoader's data; errors as for `elastic_loader`."""
        self.loader = elastic_loader(dataloader, process_group=process_group, **self._of_loader)
        return self.loader

    def open(self) -> anyrank.Checkpoints:
        """Return the checkpoints; make the state first if the run is not open."""
        if self.checkpoints is None or not self._is_open:
            self.state = self._make_state()
            self.checkpoints = self._checkpoints_of(self.state)
            self._is_open = True
        return self.checkpoints

    def resume(self, which: Any, **options: Any) -> None:
        """Resume and print a line; arguments and errors are those of `Checkpoints.resume`."""
        self.report = None
        self.report = self.open().resume(which, settings=self._settings, **options)
        # A framework's loop prints no report, but users must see where their run continues.
        if self.report is not None and not (dist.is_initialized() and dist.get_rank()):
            self._say(f"anyrank: {self.report.in_a_line()}")
        self._is_begun = True

    def begin(self, resume_by: str) -> None:
        """Start a new run, unless one was resumed.

        Args:
            resume_by: what the user must do to resume, for the error.

        Raises:
            ValueError: the folder contains a run that was not resumed.
        """
        if not self._is_begun and self.open().latest() is not None:
            raise ValueError(
                f"{self.folder} already contains a run. {resume_by}, or use a different folder"
            )
        self._is_begun = True

    def note_step(self, *_: Any) -> None:
        """Note that the optimizer has stepped; also used as its hook."""
        self.has_stepped = True

    def mean_loss(self, step: Any) -> torch.Tensor:
        """Return the mean loss of a complete step, the same on every rank. Collective.

        Without exact=True it is averaged on the device, so that the host does not wait for it.
        """
        if self.is_exact or not dist.is_initialized():
            return torch.tensor(step.loss(), dtype=torch.float64)
        loss = step.rank_loss()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    def count(self, *, hold: bool = False) -> None:
        """Count the step whose optimizer has stepped, once, and save if a save is due.

        With `hold`, save at the next call: code after an epoch's last step, such as a scheduler's
        step, belongs to that step.
        """
        end_step, self._put_off = self._put_off, None
        if end_step is not None:
            end_step()
        if self.has_stepped:
            self.has_stepped = False
            end_step = self.open().count_step()
            if hold:
                self._put_off = end_step
            else:
                end_step()

    @property
    def is_held(self) -> bool:
        """Whether the last step is counted, but the work after it is still due."""
        return self._put_off is not None

    def save(self) -> str | None:
        """Save after an optimizer step, unless it is saved; return the newest committed path."""
        self.count()
        checkpoints = self.open()
        checkpoints.save(unless_saved=True)
        return checkpoints.latest()

    def end_if_asked(self) -> None:
        """Stop the run now if any rank has received SIGTERM; the last complete step is saved.

        Collective: every rank must call it the same number of times. Call it in a callback after
        each batch of an evaluation.

        Raises:
            SystemExit: SIGTERM was received.
        """
        self.open().end_if_asked()

    def close(self) -> None:
        """Save the last trained step, if any, and release the folder.

        State and checkpoints are kept, because users read them after the end.
        """
        if self._is_open and self.checkpoints is not None and self.state is not None:
            self.count()
            if self.state.step:
                self.save()
            self.checkpoints.close()
        self._is_open = self.has_stepped = self._is_begun = False

    def abandon(self, error: BaseException) -> None:
        """Release the folder after an error, without a save. Does not wait for other ranks."""
        self._put_off = None
        if self._is_open and self.checkpoints is not None:
            self.checkpoints.__exit__(type(error), error, error.__traceback__)
        self._is_open = self.has_stepped = self._is_begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.abandon(error)


def numbered(name: str, things: Sequence[Any]) -> dict[str, Any]:
    """Return the parts of a state by name: optimizer, optimizer_1, ..."""
    return {f"{name}_{number}" if number else name: thing for number, thing in enumerate(things)}
