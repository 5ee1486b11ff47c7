"""`anyrank run --replay`: train steps of an exact run again, and compare their receipts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anyrank.errors import AnyrankError
from anyrank.files.manifest import Manifest, read_manifest
from anyrank.files.receipt import (
    are_equal,
    data_differences,
    in_short,
    number_differences,
    tensor_differences,
)
from anyrank.files.storage import storage_for
from anyrank.inspection.diff import committed_steps, data_in_words, numbers_in_words
from anyrank.resume.replay import ReplayRequest, TrainedStep, read_trained, real_path, write_request
from anyrank.settings import REPLAY
from anyrank.wording import count, joined, rows

SHOWN = 10  # steps or tensors of a list
AGAIN = {
    "first": "a second replay equals the first: the script, its data or a library has changed, or "
    "the machine erred when the run was trained",
    "run": "a second replay equals the run: the machine erred in the first one, an operation is "
    "not deterministic, or what no receipt has differs from an earlier step on",
    "neither": "a second replay differs from both: this machine errs, or an operation is not "
    "deterministic",
}

# Starts the script with these variables, and returns when it has ended well.
Launch = Callable[[Mapping[str, str]], None]


@dataclass(frozen=True)
class ReplayReport:
    """What a replay found. Printable; true if every step has the bits of the run.

    Attributes:
        run: as it was given.
        start: the step that was resumed.
        ranks: how many trained.
        equal: the steps with the same receipt as the run's.
        step: the first step that differs, or None.
        digests: its tensors whose digests differ.
        numbers: the numbers of its optimizers that differ -> of the run, and now.
        data: what differs between the states of the loaders at that step -> of the run, and now.
        again: what a second replay up to that step equals: "first", "run" or "neither".
    """

    run: str
    start: int
    ranks: int
    equal: list[int] = field(default_factory=list[int])
    step: int | None = None
    digests: list[str] = field(default_factory=list[str])
    numbers: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    data: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])
    again: str = ""

    def __bool__(self) -> bool:
        return self.step is None

    def __str__(self) -> str:
        where = f"{self.run}: from step {self.start} on {count(self.ranks, 'rank')}"
        same = f"  same bits {joined(self.equal, SHOWN)}"
        if self.step is None:
            return f"{where}: the same bits as the run\n{same}"
        lines = [f"{where}: step {self.step} differs", *([same] if self.equal else [])]
        groups = [
            ("data", data_in_words(self.data)),
            ("number", numbers_in_words(self.numbers)),
            ("digest", self.digests),
        ]
        lines += rows(groups, 10, SHOWN)
        return "\n".join([*lines, f"  again     {AGAIN[self.again]}"])


def replay(run: str, start: int, stop: int | None, launch: Launch) -> ReplayReport:
    """Train the steps of a run after `start`, up to `stop`, and compare those that it saved.

    Where a step differs, the stretch since the one before is trained once more.

    Raises:
        AnyrankError: the run has no such steps, or no receipts; or the script ended too early.
    """
    saved = _receipts_of(run, start, stop)
    environ = _threads_of(saved[start])
    trained = train(_request_of(run, start, saved), launch, environ)
    ranks = trained[0].ranks
    equal = [had.step for had in trained if are_equal(saved[had.step].receipt, had.receipt)]
    differing = [result for result in trained if result.step not in equal]
    if not differing:
        return ReplayReport(run, start, ranks, equal)
    (first,) = differing  # it has ended the replay
    before = max([start, *equal])
    theirs = saved[first.step]
    (second,) = train(_request_of(run, before, {first.step: theirs}), launch, environ)
    return ReplayReport(
        run,
        start,
        ranks,
        equal,
        first.step,
        tensor_differences(theirs.receipt, first.receipt),
        number_differences(theirs.receipt, first.receipt),
        data_differences(theirs.data_state, first.data),
        _same_as(second, first, theirs),
    )


def _same_as(second: TrainedStep, first: TrainedStep, theirs: Manifest) -> str:
    """What a second replay of a step equals."""
    if are_equal(theirs.receipt, second.receipt):
        return "run"
    return "first" if second.receipt == first.receipt else "neither"


def _receipts_of(run: str, start: int, stop: int | None) -> dict[int, Manifest]:
    """The manifests of a run's steps from `start` to `stop`, in order; all have a receipt.

    Raises:
        AnyrankError: there are none to compare.
    """
    folders = committed_steps(run)
    if not folders:
        raise AnyrankError(f"{run}: is not a run, or has no step yet: check the path")
    there = sorted(folders)
    has = joined(there, SHOWN)
    if start not in folders:
        raise AnyrankError(f"{run}: has no step {start} to begin with; it has {has}")
    chosen = [step for step in there if start <= step and (stop is None or step <= stop)]
    if len(chosen) < 2:
        end = "" if stop is None else f" up to {stop}"
        raise AnyrankError(
            f"{run}: has no step after {start}{end} to compare with; it has {has} (which "
            "ones stay is for keep= and keep_every= of Checkpoints)"
        )
    return {step: _with_receipt(folders[step]) for step in chosen}


def _with_receipt(folder: str) -> Manifest:
    manifest = read_manifest(storage_for(folder), folder)
    if not manifest.receipt:
        raise AnyrankError(
            f"{folder}: has no receipt, as the run was trained without ElasticLoader(exact=True): "
            "its bits cannot be trained again"
        )
    return manifest


def _request_of(run: str, start: int, saved: Mapping[int, Manifest]) -> ReplayRequest:
    """The request to compare all steps after the start."""
    later = ((step, manifest) for step, manifest in saved.items() if step > start)
    receipts = {step: in_short(manifest.receipt) for step, manifest in later}
    return ReplayRequest(real_path(run), start, receipts)


def train(request: ReplayRequest, launch: Launch, environ: Mapping[str, str]) -> list[TrainedStep]:
    """Train the steps of a request; all of them, or those up to the first that differs.

    Raises:
        AnyrankError: the script ended before.
    """
    with tempfile.TemporaryDirectory(prefix="anyrank-replay-") as folder:
        write_request(request, folder)
        launch({REPLAY: folder, **environ})
        trained = read_trained(folder)
    last = max((result.step for result in trained), default=request.start)
    left = [step for step in request.receipts if step > last]
    if left and all(are_equal(request.receipts[had.step], had.receipt) for had in trained):
        raise AnyrankError(
            f"{request.run}: the script ended before step {left[0]}, which the run has: give it "
            "the arguments that it was trained with, and resume in it"
        )
    return trained


def _threads_of(manifest: Manifest) -> dict[str, str]:
    """The variable for as many intra-op threads as the run had: its bits depend on them."""
    record = manifest.data_state.get("exact")
    threads = record.get("threads") if isinstance(record, dict) else None
    return {"OMP_NUM_THREADS": str(threads)} if isinstance(threads, int) else {}
