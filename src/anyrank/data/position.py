"""Where a run is in its data, counted in samples of completed steps, and the proof that it is so.

The position knows no ranks: what is saved on N ranks goes on on M. What a rank has taken is kept
beside it, as a receipt, and compared with the plan when all ranks are together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist

from anyrank.data.order import IDENTITY_NAME, ORDER_NAME
from anyrank.data.receipts import Receipt, receipt_of
from anyrank.data.schedule import Schedule, StepPlan
from anyrank.errors import CheckpointError, CorruptCheckpoint
from anyrank.world.group import ALONE
from anyrank.world.ranks import Ranks

OnBatchChange = Literal["error", "rescale"]
STATE_VERSION = 1
KEPT_RECEIPTS = 10  # in a state, so that it stays small
COUNTS = ("epoch", "step", "consumed", "samples", "global_batch", "dropped", "padded")


class EpochReceipt(NamedTuple):
    """A finished epoch: its number, the samples that were taken, and what was proved of them."""

    epoch: int
    samples: int
    verdict: str


@dataclass
class EpochRecord:
    """The accounts of one epoch.

    Attributes:
        epoch: its number.
        earlier: samples committed before this process started or resumed, on all ranks.
        planned: samples of all committed steps, as the order has them.
        seen: samples that this rank has taken and committed since.
        dropped: samples at the epoch's end that no step took.
        padded: repeats that filled its last step; in no receipt.
    """

    epoch: int
    earlier: Receipt = field(default_factory=Receipt)
    planned: Receipt = field(default_factory=Receipt)
    seen: Receipt = field(default_factory=Receipt)
    dropped: int = 0
    padded: int = 0


class Position:
    """The accounting that `ElasticLoader` and `ElasticSampler` share.

    Attributes:
        epoch: the epoch of the next step, from 0.
        step: completed steps of the run.
        consumed: samples of completed steps in this epoch.
        samples: samples of completed steps in the run, without repeats that pad.
        dropped: samples left over at the ends of epochs by tail="drop".
        padded: samples repeated at the ends of epochs by tail="pad".
        notes: what differs from the run that was loaded, in sentences.
        receipts: finished epochs of the run, in order; a state keeps the newest ten.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        key: str | None,
        group: Any,
        on_batch_change: OnBatchChange | None,
    ) -> None:
        if on_batch_change not in (None, *get_args(OnBatchChange)):
            raise ValueError(f"on_batch_change is {on_batch_change!r}: give 'error' or 'rescale'")
        if type(key) not in (str, type(None)):
            raise TypeError(f"key is {key!r}: give the name of the dataset, a str")
        self.schedule = schedule
        self.key = key
        self.process_group = group
        self.on_batch_change: OnBatchChange | None = on_batch_change
        self.epoch = self.step = self.consumed = self.samples = self.dropped = self.padded = 0
        self.notes: list[str] = []
        self.receipts: list[EpochReceipt] = []
        self.ledgers = [
            EpochRecord(0)
        ]  # the last one is open, those before it wait for their check
        self.place()

    @property
    def seen(self) -> Receipt:
        """Samples of this epoch that this rank has taken and committed since it started."""
        return self.ledgers[-1].seen

    def place(self) -> tuple[int, int]:
        """This rank's index among the data-parallel ranks, and how many these are.

        Raises:
            ValueError: more ranks than microbatches, or a group without this rank.
        """
        index, size = 0, 1
        if self.process_group is not ALONE and dist.is_available() and dist.is_initialized():
            index, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if index < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group: give each rank the group of "
                "those that share the data with it"
            )
        self.schedule.check_size(size)
        return index, size

    @property
    def in_step(self) -> bool:
        """Whether microbatches have been taken that are not committed. No time to save."""
        return False

    def check_complete(self) -> None:
        """Whether the step that was taken may be counted; the subclasses know which.

        Raises:
            CheckpointError: there is none, or it is not complete.
        """

    def commit(self) -> None:
        """Count the step that was taken.

        Raises:
            CheckpointError: as `check_complete`.
        """
        raise NotImplementedError

    def next_step(self) -> StepPlan:
        """The step that comes next. There is always one: epochs follow one another."""
        step = self.schedule.next_step(self.epoch, self.step, self.consumed)
        assert step is not None  # advance and load_state_dict leave a finished epoch
        return step

    def advance(self, step: StepPlan, seen: Receipt) -> None:
        """Count a completed step, of which this rank has taken what `seen` says."""
        stop = min(step.stop, step.n)
        epoch_record = self.ledgers[-1]
        ids = self.schedule.order.ids(step.epoch, step.start, stop)
        epoch_record.planned += receipt_of(step.epoch, ids)
        epoch_record.seen += seen
        epoch_record.padded += step.padded
        self.step += 1
        self.samples += stop - self.consumed
        self.padded += step.padded
        self.consumed = stop
        self.leave_finished_epoch()

    def leave_finished_epoch(self) -> None:
        """Go on to the next epoch where this one has no further step."""
        if self.schedule.next_step(self.epoch, self.step, self.consumed) is None:
            left = self.schedule.order.n - self.consumed
            self.ledgers[-1].dropped = left
            self.dropped += left
            self.epoch += 1
            self.consumed = 0
            self.ledgers.append(EpochRecord(self.epoch))

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Some 400 bytes of JSON values, equal on all ranks. No collectives, nothing moves."""
        order = self.schedule.order
        return {
            "version": STATE_VERSION,
            "seed": order.seed,
            **{name: getattr(self, name) for name in COUNTS if name != "global_batch"},
            "global_batch": self.schedule.global_batch,
            "microbatch": self.schedule.microbatch,
            "n": order.n,
            "key": self.key,
            "order": order.name,
            "tail": self.schedule.tail,
            "receipt": self.ledgers[-1].planned.to_json(),
            "receipts": [list(one) for one in self.receipts[-KEPT_RECEIPTS:]],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was saved, on any number of ranks. No collectives.

        Raises:
            CheckpointError: another dataset, seed, order, microbatch or tail; another global_batch
                without on_batch_change="rescale". Nothing has changed then.
            CorruptCheckpoint: not a state that `state_dict` returns.
        """
        saved, receipt, note = self.check_state_dict(state_dict)
        for name in COUNTS:
            if name != "global_batch":
                setattr(self, name, saved[name])
        self.notes = [note] if note else []
        self.receipts = [EpochReceipt(*one) for one in state_dict.get("receipts", ())]
        self.ledgers = [EpochRecord(self.epoch, earlier=receipt, planned=receipt)]
        self.leave_finished_epoch()

    def check_state_dict(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[dict[str, int], Receipt, str | None]:
        """Whether `load_state_dict` would take a state: its counts, receipt and what to note.

        Raises:
            CheckpointError: as `load_state_dict`.
        """
        state = dict(state_dict)
        receipt = read_receipt(state)
        mine = self.state_dict()
        for name, what, hint in MUST_AGREE:
            kinds = (str, type(None)) if name == "key" else (type(mine[name]),)
            if name not in state or type(state[name]) not in kinds:
                raise corrupt(f"{name} is {state.get(name)!r}")
            if state[name] != mine[name]:
                raise CheckpointError(
                    f"data position: the run has {what} {state[name]!r}, here it is "
                    f"{mine[name]!r}: {hint.format(saved=state[name])}"
                )
        saved = {name: read_count(state, name) for name in COUNTS}
        if not saved["consumed"] <= mine["n"] or receipt.count != saved["consumed"]:
            raise corrupt(f"consumed is {saved['consumed']} of {mine['n']} samples")
        rows = state.get("receipts", [])
        if type(rows) is not list or any(type(row) is not list or len(row) != 3 for row in rows):
            raise corrupt(f"receipts is {rows!r}")
        return saved, receipt, self.batch_note(saved["global_batch"], saved["step"])

    def batch_note(self, saved: int, step: int) -> str | None:
        """What to say of another global batch; an error where it is not allowed."""
        mine = self.schedule.global_batch
        if saved == mine:
            return None
        if self.on_batch_change != "rescale":
            hint = ", or on_batch_change='rescale' and a learning rate that fits"
            raise CheckpointError(
                f"data position: the run has global_batch {saved}, here it is {mine}: give "
                f"{saved}, which works on any number of ranks"
                f"{hint if self.on_batch_change else ''}"
            )
        return (
            f"global_batch {saved} became {mine} at step {step}: steps are counted on, and a "
            "learning rate that is scheduled by steps sees other samples per step"
        )

    # -- proof ------------------------------------------------------------------------------------

    def check_receipt(self, ranks: Ranks) -> None:
        """Compare what all ranks have taken and committed with the plan. All ranks.

        Each epoch that ended since the last check is also compared with the dataset's own receipt,
        which costs O(n) hashes divided by the number of ranks, and is added to `receipts`.

        Args:
            ranks: all data-parallel ranks; ranks with the same data (tensor parallel) may be there.

        Raises:
            CheckpointError: on all ranks: a sample was repeated or lost, or ranks are not at the
                same step.
            ValueError: `ranks` lacks some data-parallel ranks.
        """
        index, size = self.place()
        plans = [(one.epoch, one.earlier, one.planned) for one in self.ledgers]
        seen = [one.seen for one in self.ledgers]
        rows = ranks.gather((index, self.step, plans, seen))
        if {row[0] for row in rows} != set(range(size)):
            raise ValueError(
                f"the ranks {ranks.ranks} are not all that share the data, of which there are "
                f"{size}: call with all of them"
            )
        steps = [row[1] for row in rows]
        by_index = {row[0]: row[3] for row in rows}
        if any(row[2] != rows[0][2] or row[3] != by_index[row[0]] for row in rows):
            raise CheckpointError(
                f"data position: ranks differ in what they took, by rank at steps {steps}: every "
                "rank has to run all steps, and commit() each of them"
            )
        for number, epoch_record in enumerate(self.ledgers):
            taken = sum((one[number] for one in by_index.values()), epoch_record.earlier)
            compare(epoch_record, taken, epoch_record.planned, "the plan")
        for epoch_record in self.ledgers[:-1]:
            self.finish(epoch_record, ranks)
        del self.ledgers[:-1]

    def finish(self, epoch_record: EpochRecord, ranks: Ranks) -> None:
        """Compare an ended epoch with the dataset. All ranks."""
        order = self.schedule.order
        low, high = (part * order.n // ranks.size for part in (ranks.index, ranks.index + 1))
        parts = ranks.gather(order.receipt(epoch_record.epoch, low, high))
        left = order.ids(epoch_record.epoch, order.n - epoch_record.dropped, order.n)
        whole = sum(parts, Receipt()) - receipt_of(epoch_record.epoch, left)
        compare(epoch_record, epoch_record.planned, whole, "the dataset")
        extra = f", {epoch_record.dropped} dropped" if epoch_record.dropped else ""
        extra += (
            f", {epoch_record.padded} repeated to fill the last step" if epoch_record.padded else ""
        )
        verdict = "exactly as drawn" if order.repeats else "exactly once"
        self.receipts.append(
            EpochReceipt(epoch_record.epoch, epoch_record.planned.count, f"{verdict}{extra}")
        )


MUST_AGREE = (
    ("version", "format version", "use the anyrank version that wrote it, or a newer one"),
    (
        "n",
        "a dataset of length",
        "give the dataset of the run, or start a new run from its weights",
    ),
    ("key", "the dataset key", "give the dataset of the run and key={saved!r}"),
    ("seed", "seed", "give seed={saved!r}"),
    (
        "order",
        "the order",
        f"give the shuffle, weights and shards of the run; {ORDER_NAME} is shuffle=True, "
        f"{IDENTITY_NAME} is False",
    ),
    (
        "microbatch",
        "microbatch",
        "give microbatch={saved!r}: random numbers belong to microbatches",
    ),
    ("tail", "tail", "give tail={saved!r}"),
)


def compare(epoch_record: EpochRecord, found: Receipt, expected: Receipt, of_what: str) -> None:
    """Raise CheckpointError where two receipts of an epoch differ."""
    if found != expected:
        raise CheckpointError(
            f"data position: epoch {epoch_record.epoch} is not exactly once: the ranks took "
            f"{found.count} samples (receipt {found.sum:016x} {found.xor:016x}), {of_what} has "
            f"{expected.count} ({expected.sum:016x} {expected.xor:016x}): resume from a checkpoint "
            "of before this epoch, and report this as a defect"
        )


def corrupt(what: str) -> CorruptCheckpoint:
    """The error for a state that was not saved by `state_dict`."""
    return CorruptCheckpoint(
        f"data position: {what}, which no run saves: resume from another checkpoint"
    )


def read_count(state: dict[str, Any], name: str) -> int:
    """A number of at least 0 from a state that may hold anything."""
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise corrupt(f"{name} is {value!r}")
    return value


def read_receipt(state: dict[str, Any]) -> Receipt:
    """The receipt from a state that may hold anything."""
    try:
        return Receipt.from_json(state.get("receipt"))
    except (TypeError, ValueError) as error:
        raise corrupt(f"receipt is {state.get('receipt')!r}") from error
