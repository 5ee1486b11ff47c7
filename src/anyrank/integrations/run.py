"""The run under a framework's loop: its options, and when it is opened, counted, saved, closed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, TypedDict

import torch
import torch.distributed as dist

import anyrank
from anyrank.integrations.dataloaders import OnBatchChange, elastic_loader


class RunOptions(TypedDict, total=False):
    """How a run under a framework is cut into steps and saved: the options of a `FrameworkRun`.

    Attributes:
        microbatch: samples of one forward pass; default: the DataLoader's batch_size.
        seed: seed of the order of the data and of all random numbers; default: 0.
        exact: the same bits on any number of ranks, as with `ElasticLoader(exact=True)`.
        on_batch_change: what a run that was saved with another global_batch means, as for
            `ElasticLoader`: "error", or "rescale"; default: "error".
        every: when to save, as for `anyrank.Checkpoints`: a number of steps (500), a time
            ("10min"), or None for the end alone.
        keep: how many of the newest steps stay, at least 2; default: 3.
        keep_every: steps that are multiples of it are kept for good.
        background: hold up the training only while the state is copied.
        verify: what a resume compares, as in `anyrank.Checkpoints`; default: every byte.
        on_commit: called on the first rank with each `anyrank.SaveRecord`.
        settings: whose settings of schedules and optimizers count if the script's differ from the
            saved run's: "saved" or "script", as for `Checkpoints.resume`; default: "saved".
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
    """The run of a framework's loop, whose parts are created late. Calls come from all ranks.

    Args:
        folder: path or URL of the run.
        make_state: called at the first use of the run; again after `close`.
        global_batch: samples of an optimizer step, on all ranks together.
        say: prints a line on the first rank, through the framework's own console.
        options: `RunOptions`.

    Attributes:
        folder: path or URL of the run.
        loader: the `ElasticLoader` over the training data; None before it is made.
        state: the `TrainState`; None before the run is opened.
        checkpoints: the `Checkpoints`; None before the run is opened.
        report: the `ResumeReport` of the last resume; None if there was nothing.
        has_stepped: whether the optimizer has stepped, in a step that is not counted yet.
        microbatch, seed, is_exact: taken from the options.

    Raises:
        TypeError: an option that is not of `RunOptions`, or of another type.
        ValueError: an option outside of what is allowed.
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
            raise TypeError(f"{unknown[0]!r} is no option of a run: it takes {known}")
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
        self._is_begun = False  # resumed, or begun in an empty folder
        self._of_loader = {name: options.pop(name) for name in OF_LOADER if name in options}
        self._of_loader["global_batch"] = global_batch
        self._settings = options.pop("settings", "saved")
        self._of_checkpoints = options
        # Raises for wrong options now; the framework's process group may come later.
        self._checkpoints_of(anyrank.TrainState(), process_group=anyrank.ALONE)

    def _checkpoints_of(self, state: anyrank.TrainState, **more: Any) -> anyrank.Checkpoints:
        return anyrank.Checkpoints(self.folder, state, **self._of_checkpoints, **more)

    def make_loader(self, dataloader: Any, process_group: Any = None) -> anyrank.ElasticLoader:
        """The loader of steps over a DataLoader's data; raises like `elastic_loader`."""
        self.loader = elastic_loader(dataloader, process_group=process_group, **self._of_loader)
        return self.loader

    def open(self) -> anyrank.Checkpoints:
        """The checkpoints, with a state that is made now if the run is not open."""
        if self.checkpoints is None or not self._is_open:
            self.state = self._make_state()
            self.checkpoints = self._checkpoints_of(self.state)
            self._is_open = True
        return self.checkpoints

    def resume(self, which: Any, **options: Any) -> None:
        """Resume and print a line; arguments and errors are those of `Checkpoints.resume`."""
        self.report = None
        self.report = self.open().resume(which, settings=self._settings, **options)
        # A framework's loop prints no report, and people must see where their run continues.
        if self.report is not None and not (dist.is_initialized() and dist.get_rank()):
            self._say(f"anyrank: {self.report.in_a_line()}")
        self._is_begun = True

    def begin(self, resume_by: str) -> None:
        """Begin a new run, unless one was resumed.

        Args:
            resume_by: what the user does to resume.

        Raises:
            ValueError: the folder holds a run that was not resumed.
        """
        if not self._is_begun and self.open().latest() is not None:
            raise ValueError(f"{self.folder} holds a run: {resume_by}, or give another folder")
        self._is_begun = True

    def note_step(self, *_: Any) -> None:
        """Note that the optimizer has stepped; also used as its hook."""
        self.has_stepped = True

    def mean_loss(self, step: Any) -> torch.Tensor:
        """The mean loss of a complete step, equal on all ranks. All ranks.

        Without exact=True it is averaged on the device, so that the host does not wait for it.
        """
        if self.is_exact or not dist.is_initialized():
            return torch.tensor(step.loss(), dtype=torch.float64)
        loss = step.rank_loss()
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    def count(self, *, hold: bool = False) -> None:
        """Count the step whose optimizer has stepped, once, and save when due.

        With `hold`, save at the next call: the code after an epoch's last step, such as a
        schedule's step, belongs to that step.
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
        """Return whether the last step is counted, and the work due after it still waits."""
        return self._put_off is not None

    def save(self) -> str | None:
        """Save after an optimizer step, unless it is saved; return the newest committed path."""
        self.count()
        checkpoints = self.open()
        checkpoints.save(unless_saved=True)
        return checkpoints.latest()

    def end_if_asked(self) -> None:
        """End the run now if any rank has received SIGTERM, with the last whole step saved.

        Call it in a callback of each batch of an evaluation. All ranks must call it equally often.

        Raises:
            SystemExit: SIGTERM was received.
        """
        self.open().end_if_asked()

    def close(self) -> None:
        """Save the last trained step, if there is one, and release the folder.

        State and checkpoints stay, because users ask them after the end.
        """
        if self._is_open and self.checkpoints is not None and self.state is not None:
            self.count()
            if self.state.step:
                self.save()
            self.checkpoints.close()
        self._is_open = self.has_stepped = self._is_begun = False

    def abandon(self, error: BaseException) -> None:
        """Release the folder after an error, and save nothing. Waits for no rank."""
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
    """Parts of a state by name: optimizer, optimizer_1, ..."""
    return {f"{name}_{number}" if number else name: thing for number, thing in enumerate(things)}
