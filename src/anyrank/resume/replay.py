"""A replay: steps of an exact run are trained again for their receipts, and nothing is saved.

`anyrank run --replay` writes a `ReplayRequest` into a folder of its own, and gives the script that
folder's path in ANYRANK_REPLAY. The script's `Checkpoints` then reads the run, and never writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from anyrank.errors import CheckpointError
from anyrank.files.receipt import are_equal, receipt_of_step
from anyrank.resume.options import ResumeArguments, RunOptions
from anyrank.resume.run_writer import Due, RunWriter
from anyrank.saving.run_store import RunFolder
from anyrank.saving.save import SaveRecord, tensor_digests
from anyrank.settings import REPLAY
from anyrank.state.report import ResumeReport
from anyrank.state.train_state import TrainState
from anyrank.world.arguments import same_arguments
from anyrank.world.ranks import Ranks

REQUEST, TRAINED = "request.json", "trained.jsonl"


@dataclass(frozen=True)
class ReplayRequest:
    """What to replay.

    Attributes:
        run: the run's folder, as `real_path` returns it.
        start: the step to resume.
        receipts: step -> its receipt in short, for each step to compare; the last ends the replay.
    """

    run: str
    start: int
    receipts: dict[int, dict[str, Any]]


@dataclass(frozen=True)
class TrainedStep:
    """A step that was trained again.

    Attributes:
        step: its number.
        ranks: how many trained it.
        receipt: of it.
        data: the state of the loader after it.
    """

    step: int
    ranks: int
    receipt: dict[str, Any]
    data: dict[str, Any]


def write_request(request: ReplayRequest, folder: str) -> None:
    """Write a request into the folder of a replay."""
    with open(os.path.join(folder, REQUEST), "w", encoding="utf-8") as file:
        json.dump(asdict(request), file)


def _read_request(folder: str) -> ReplayRequest:
    """The request in the folder of a replay."""
    with open(os.path.join(folder, REQUEST), encoding="utf-8") as file:
        table = json.load(file)
    return ReplayRequest(
        table["run"], table["start"], {int(k): v for k, v in table["receipts"].items()}
    )


def read_trained(folder: str) -> list[TrainedStep]:
    """The steps that a replay has left in its folder."""
    path = os.path.join(folder, TRAINED)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [TrainedStep(**json.loads(line)) for line in file]


def real_path(path: str) -> str:
    """A run's path with its links resolved, or its URL: equal for the same run."""
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def writer_of(
    folder: RunFolder,
    state: TrainState,
    options: RunOptions,
    on_commit: Callable[[SaveRecord], object] | None,
) -> RunWriter:
    """What saves a run; in a replay, what compares it.

    Raises:
        CheckpointError: a replay of another run.
    """
    results = os.environ.get(REPLAY)
    if results is None:
        return RunWriter(folder, state, options, on_commit)
    request = _read_request(results)
    if real_path(folder.path) != request.run:
        raise CheckpointError(
            f"{folder.path}: the script opens this run in a replay of {request.run}, and a replay "
            "writes to no run: give --replay the folder that the script opens, and the script the "
            "arguments that it was trained with"
        )
    return _ReplayWriter(folder, state, options, results, request)


class _ReplayWriter(RunWriter):
    """In place of saves, the receipts of the steps that a request names."""

    def __init__(
        self,
        folder: RunFolder,
        state: TrainState,
        options: RunOptions,
        results: str,
        request: ReplayRequest,
    ) -> None:
        # Without the memory of the run, which may be alive: a resume removes snapshots in it.
        super().__init__(folder, state, replace(options, background=False, peers=False), None)
        self._path = os.path.join(results, TRAINED)
        self._request = request
        self._left = dict(request.receipts)
        self._is_resumed = False

    def arguments(self, given: ResumeArguments) -> ResumeArguments:
        """All of the requested step, whatever the script asks for."""
        self._is_resumed = True
        return replace(given, which=self._request.start, skip=(), rename=None)

    def resume(self, arguments: ResumeArguments, ranks: Ranks) -> ResumeReport | None:
        """Restore the requested step. All ranks: each machine has a request of its own."""
        same_arguments(ranks, "replay", asdict(self._request), CheckpointError)
        return super().resume(arguments, ranks)

    def due(self) -> Due:
        """Whether the step that ends now is compared; nothing is kept in memory."""
        return Due(save=self._state.step + 1 in self._left, snapshot=False)

    def save(self, ranks: Ranks, writers: Ranks | None, unless_saved: bool) -> None:
        """Leave the receipt of the state's step, if the request names it. All ranks.

        Raises:
            CheckpointError: the script has not resumed, its loader is not exact any more, or the
                state cannot be saved.
            SystemExit: the receipt is not the requested one, or it was the last one.
        """
        state = self._state
        ranks.together("preparing a receipt", self._check_boundary)
        expected = self._left.pop(state.step, None)
        if expected is None:
            return
        if not self._is_resumed:
            raise CheckpointError(
                f"{self._request.run}: the script came to step {state.step} without a resume, so "
                f"it has not trained from step {self._request.start} on: call resume() in it"
            )
        snapshot = self._collect(ranks)
        snapshot.replicas.compare(ranks)
        parts = ranks.together("digesting the step", lambda: tensor_digests(snapshot, ranks))
        if snapshot.receipt is None:
            raise CheckpointError(
                f"{self._request.run}: was trained with exact=True, and the script trains without "
                "it now: give ElasticLoader(exact=True)"
            )
        data = snapshot.receipt.data
        numbers = snapshot.manifest.numbers if "numbers" in expected else None
        receipt = receipt_of_step(parts, data, numbers)
        trained = TrainedStep(state.step, ranks.size, receipt, dict(data))
        # Each machine's command has made a folder of its own, and reads it.
        is_first = ranks.gather(self._path).index(self._path) == ranks.index
        ranks.together("leaving the receipt", lambda: is_first and self._append(trained))
        if not are_equal(expected, receipt) or not self._left:
            raise SystemExit(0)

    def _append(self, trained: TrainedStep) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trained)) + "\n")
