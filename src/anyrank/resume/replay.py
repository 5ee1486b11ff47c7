"""A replay: steps of an exact run are trained again for their receipts, and nothing is saved.

`anyrank run --replay` writes an `Order` into a folder of its own, and gives the script that
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

ORDER, TRAINED = "order.json", "trained.jsonl"


@dataclass(frozen=True)
class Order:
    """What to replay.

    Attributes:
        run: the run's folder, as `absolute` spells it.
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


def write_order(order: Order, folder: str) -> None:
    """Write an order into the folder of a replay."""
    with open(os.path.join(folder, ORDER), "w", encoding="utf-8") as file:
        json.dump(asdict(order), file)


def read_order(folder: str) -> Order:
    """The order in the folder of a replay."""
    with open(os.path.join(folder, ORDER), encoding="utf-8") as file:
        table = json.load(file)
    return Order(table["run"], table["start"], {int(k): v for k, v in table["receipts"].items()})


def read_trained(folder: str) -> list[TrainedStep]:
    """The steps that a replay has left in its folder."""
    path = os.path.join(folder, TRAINED)
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [TrainedStep(**json.loads(line)) for line in file]


def absolute(path: str) -> str:
    """One spelling of a run's path or URL."""
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
    order = read_order(results)
    if absolute(folder.path) != order.run:
        raise CheckpointError(
            f"{folder.path}: the script opens this run in a replay of {order.run}, and a replay "
            "writes to no run: give --replay the folder that the script opens, and the script the "
            "arguments that it was trained with"
        )
    return ReplayWriter(folder, state, options, results, order)


class ReplayWriter(RunWriter):
    """In place of saves, the receipts of the steps that an order names."""

    def __init__(
        self, folder: RunFolder, state: TrainState, options: RunOptions, results: str, order: Order
    ) -> None:
        # Without the memory of the run, which may be alive: a resume removes snapshots in it.
        super().__init__(folder, state, replace(options, background=False, peers=False), None)
        self._path = os.path.join(results, TRAINED)
        self._order = order
        self._left = dict(order.receipts)
        self._is_resumed = False

    def arguments(self, given: ResumeArguments) -> ResumeArguments:
        """All of the order's step, whatever the script asks for."""
        self._is_resumed = True
        return replace(given, which=self._order.start, skip=(), rename=None)

    def resume(self, arguments: ResumeArguments, ranks: Ranks) -> ResumeReport | None:
        """Restore the order's step. All ranks: each machine has written an order of its own."""
        same_arguments(ranks, "replay", asdict(self._order), CheckpointError)
        return super().resume(arguments, ranks)

    def due(self) -> Due:
        """Whether the step that ends now is compared; nothing is kept in memory."""
        return Due(save=self._state.step + 1 in self._left, snapshot=False)

    def save(self, ranks: Ranks, writers: Ranks | None) -> None:
        """Leave the receipt of the state's step, if the order names it. All ranks.

        Raises:
            CheckpointError: the script has not resumed, its loader is not exact any more, or the
                state cannot be saved.
            SystemExit: the receipt is not that of the order, or it was the last one.
        """
        state = self._state
        ranks.together("preparing a receipt", self._check_boundary)
        expected = self._left.pop(state.step, None)
        if expected is None:
            return
        if not self._is_resumed:
            raise CheckpointError(
                f"{self._order.run}: the script came to step {state.step} without a resume, so it "
                f"has not trained from step {self._order.start} on: call resume() in it"
            )
        snapshot = self._collect(ranks)
        snapshot.replicas.compare(ranks)
        parts = ranks.together("digesting the step", lambda: tensor_digests(snapshot, ranks))
        if snapshot.receipt is None:
            raise CheckpointError(
                f"{self._order.run}: was trained with exact=True, and the script trains without it "
                "now: give ElasticLoader(exact=True)"
            )
        receipt, data = receipt_of_step(parts, snapshot.receipt.data), snapshot.receipt.data
        trained = TrainedStep(state.step, ranks.size, receipt, dict(data))
        # Each machine's command has made a folder of its own, and reads it.
        is_first = ranks.gather(self._path).index(self._path) == ranks.index
        ranks.together("leaving the receipt", lambda: is_first and self._append(trained))
        if not are_equal(expected, receipt) or not self._left:
            raise SystemExit(0)

    def _append(self, trained: TrainedStep) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trained)) + "\n")
