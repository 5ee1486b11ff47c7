"""The position of a run in its data, counted in samples of completed steps, and its verification.

The position does not depend on the ranks: a state saved on N ranks is loaded on M. Each rank also
keeps a receipt of the samples that it has run, which `check_receipt` compares with the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from anyrank.checks import check_choice, check_type
from anyrank.data.order import IDENTITY_NAME, ORDER_NAME
from anyrank.data.receipts import EpochAccount, EpochVerdict, Receipt, receipt_of
from anyrank.data.schedule import Schedule, StepPlan
from anyrank.errors import CheckpointError
from anyrank.files.json_codec import reading_record
from anyrank.world.arguments import compare_arguments
from anyrank.world.group import ALONE, check_group, find_members
from anyrank.world.ranks import Ranks

OnBatchChange = Literal["error", "rescale"]
STATE_VERSION = 1
KEPT_RECEIPTS = 10  # in a state, to keep it small
COUNTS = ("epoch", "step", "consumed", "samples", "dropped")
MUST_AGREE = ("version", "n", "key", "seed", "order", "microbatch", "tail")
TITLES = {
    "version": "format version",
    "n": "a dataset of length",
    "key": "the dataset key",
    "order": "the order",
}
WAYS = {
    "version": "use the anyrank version that wrote it, or a newer one",
    "n": "give the dataset of the run, or start a new run from its weights",
    "order": f"give the shuffle, weights and shards of the run; {ORDER_NAME} is shuffle=True, "
    f"{IDENTITY_NAME} is False",
}


@dataclass(frozen=True)
class RankAccounts:
    """What a rank has of the epochs since the last check, for comparison.

    Attributes:
        index: of the rank among the data-parallel ones.
        step: completed steps.
        plans: of each epoch, its number, and the receipts of its earlier and planned samples.
        seen: of each, the receipt of the samples that this rank has run.
    """

    index: int
    step: int
    plans: list[tuple[int, Receipt, Receipt]]
    seen: list[Receipt]


class Position:
    """Where a run is in its data.

    Args:
        schedule: the run's plan.
        key: name or version of the dataset.
        group: the user's process group of the data-parallel ranks.
        on_batch_change: what a state with another global batch means; None: it is refused.

    Attributes:
        owner: name of the class that has it, for messages.
        accounts: of the current epoch, the last, and of those before that are not verified yet.
        epoch, step, consumed, samples, dropped, notes, receipts: as in `ElasticLoader`.
    """

    owner: str

    def __init__(
        self,
        schedule: Schedule,
        key: str | None,
        group: Any,
        on_batch_change: OnBatchChange | None,
    ) -> None:
        if on_batch_change is not None:
            check_choice("on_batch_change", on_batch_change, get_args(OnBatchChange))
        if key is not None:
            check_type("key", key, str, "the name of the dataset, a str")
        check_group(group)
        self.schedule, self.key, self.group = schedule, key, group
        self.on_batch_change: OnBatchChange | None = on_batch_change
        self.epoch = self.step = self.consumed = self.samples = self.dropped = 0
        self.notes: list[str] = []
        self.receipts: list[EpochVerdict] = []
        self.accounts = [EpochAccount(0)]
        self.data_rank()

    def data_rank(self) -> tuple[int, int]:
        """This rank's index among the data-parallel ranks, and their number.

        Raises:
            ValueError: more ranks than microbatches, or a group without this rank.
        """
        index, size, group = 0, 1, self.group
        if group is not ALONE and dist.is_available() and dist.is_initialized():
            index, size = dist.get_rank(group), dist.get_world_size(group)
        if index < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group: give each rank its own "
                "data-parallel group"
            )
        self.schedule.check_size(size)
        return index, size

    def arguments(self) -> dict[str, object]:
        """What ranks must have given alike, by argument."""
        return self.schedule.arguments() | {"key": self.key}

    def check_same(self, ranks: Ranks) -> None:
        """Compare the owner's arguments, and the position, over the ranks. All ranks.

        Raises:
            CheckpointError: one of them differs; on all ranks, with each value.
            ValueError: `ranks` lacks some data-parallel ranks.
        """

        def check() -> None:
            members, _ = find_members(self.group)
            if missing := sorted({*members} - {*ranks.ranks}):
                raise ValueError(
                    f"the ranks {ranks.ranks} are not all of the {len(members)} data-parallel "
                    f"ranks of the {self.owner}: call with {ranks.name_ranks(missing)} too"
                )

        position = f"epoch {self.epoch}, step {self.step}, {self.consumed} samples of the epoch"
        arguments = self.arguments() | {"position": position}
        compare_arguments(ranks, self.owner, arguments, CheckpointError, check)

    def check_complete(self) -> None:
        """Check that `commit` may count a step. No collectives.

        Raises:
            CheckpointError: there is no step, or it is not complete.
        """
        raise NotImplementedError

    def commit(self) -> None:
        """Count the current step as completed; raises as `check_complete`. No collectives."""
        raise NotImplementedError

    def next_step(self) -> StepPlan:
        """The next step, in this epoch or the following one."""
        step = self.schedule.next_step(self.epoch, self.step, self.consumed)
        assert step is not None  # advance and load_state_dict leave a finished epoch
        return step

    def advance(self, step: StepPlan, seen: Sequence[Any]) -> None:
        """Count a completed step, of which this rank has run the samples `seen`, copies apart."""
        account = self.accounts[-1]
        planned = self.schedule.order.ids(step.epoch, step.start, step.stop)
        account.planned += receipt_of(step.epoch, planned)
        account.seen += receipt_of(step.epoch, torch.tensor(seen, dtype=torch.int64, device="cpu"))
        self.step += 1
        self.samples += step.samples
        self.consumed = step.stop
        self._leave_finished_epoch()

    def _leave_finished_epoch(self) -> None:
        """Continue with the next epoch if this one has no further step."""
        if self.schedule.next_step(self.epoch, self.step, self.consumed) is None:
            left = self.schedule.order.n - self.consumed
            self.accounts[-1].dropped = left
            self.dropped += left
            self.epoch += 1
            self.consumed = 0
            self.accounts.append(EpochAccount(self.epoch))

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """About 400 bytes of JSON values, equal on all ranks. No collectives."""
        order = self.schedule.order
        return {
            "version": STATE_VERSION,
            "seed": order.seed,
            **{name: getattr(self, name) for name in COUNTS},
            "global_batch": self.schedule.global_batch,
            "microbatch": self.schedule.microbatch,
            "n": order.n,
            "key": self.key,
            "order": order.name,
            "tail": self.schedule.tail,
            "receipt": self.accounts[-1].planned.to_json(),
            "receipts": [list(receipt) for receipt in self.receipts[-KEPT_RECEIPTS:]],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was saved; raises as `check_state_dict`, and changes nothing."""
        saved, receipt, note = self.check_state_dict(state_dict)
        for name in COUNTS:
            setattr(self, name, saved[name])
        self.notes = [note] if note else []
        self.receipts = [EpochVerdict(*row) for row in state_dict["receipts"]]
        self.accounts = [EpochAccount(self.epoch, earlier=receipt, planned=receipt)]
        self._leave_finished_epoch()

    def check_state_dict(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[dict[str, int], Receipt, str | None]:
        """Check a state. Returns its counts, receipt and entry for `notes`.

        Raises:
            CheckpointError, CorruptCheckpoint: as `ElasticLoader.load_state_dict`.
        """
        own_state = self.state_dict()
        with reading_record("data position"):
            for name in MUST_AGREE:
                if state_dict[name] != own_state[name]:
                    way_out = WAYS.get(name, f"give {name}={state_dict[name]!r}")
                    raise CheckpointError(
                        f"data position: the run has {TITLES.get(name, name)} "
                        f"{state_dict[name]!r}, here it is {own_state[name]!r}: {way_out}"
                    )
            saved = {name: int(state_dict[name]) for name in COUNTS}
            receipt = Receipt.from_json(state_dict["receipt"])
            if receipt.count != saved["consumed"] or len(state_dict["receipts"]) > KEPT_RECEIPTS:
                raise ValueError(f"{saved['consumed']} samples were consumed")
            return saved, receipt, self._batch_note(state_dict["global_batch"], saved["step"])

    def _batch_note(self, saved: int, step: int) -> str | None:
        """The entry in `notes` for a different global batch; an error where it is not allowed."""
        own_batch = self.schedule.global_batch
        if saved == own_batch:
            return None
        if self.on_batch_change != "rescale":
            hint = ", or on_batch_change='rescale' and a learning rate for it"
            raise CheckpointError(
                f"data position: the run has global_batch {saved}, here it is {own_batch}: give "
                f"{saved}, which works on any number of ranks"
                f"{hint if self.on_batch_change else ''}"
            )
        return (
            f"global_batch {saved} became {own_batch} at step {step}: steps are counted on, and a "
            "learning rate that is scheduled by steps sees a different number of samples per step"
        )

    # -- verification -----------------------------------------------------------------------------

    def check_receipt(self, ranks: Ranks) -> None:
        """Compare the samples that all ranks have run and committed with the plan. All ranks.

        Each epoch that ended since the last check is added to `receipts`.

        Args:
            ranks: all data-parallel ranks; may include ranks with the same data (tensor parallel).

        Raises:
            CheckpointError: on all ranks: a sample was repeated or lost, or ranks are at different
                steps.
        """
        rows = ranks.gather(self.rank_accounts(), "comparing the samples")
        steps = [row.step for row in rows]
        by_index = {row.index: row.seen for row in rows}
        if any(row.plans != rows[0].plans or row.seen != by_index[row.index] for row in rows):
            raise CheckpointError(
                f"data position: ranks differ in the samples they ran, by rank at steps {steps}: "
                "every rank must run all steps, and commit() each of them"
            )
        for number, account in enumerate(self.accounts):
            total = sum((seen[number] for seen in by_index.values()), account.earlier)
            if total != (plan := account.planned):
                raise CheckpointError(
                    f"data position: epoch {account.epoch} is not exactly once: the ranks ran "
                    f"{total.count} samples (receipt {total.sum:016x}), the plan has {plan.count} "
                    f"({plan.sum:016x}): resume from an earlier checkpoint, and report this as a "
                    "defect"
                )
        self.receipts += map(self._verdict, self.accounts[:-1])
        del self.accounts[:-1]

    def rank_accounts(self) -> RankAccounts:
        """What this rank has to say for `check_receipt`."""
        index, _ = self.data_rank()
        plans = [(account.epoch, account.earlier, account.planned) for account in self.accounts]
        return RankAccounts(index, self.step, plans, [account.seen for account in self.accounts])

    def _verdict(self, account: EpochAccount) -> EpochVerdict:
        """What is known of a finished epoch, all of whose samples were run as planned."""
        order = self.schedule.order
        assert account.planned.count + account.dropped == order.n  # by `check_state_dict` as well
        extra = f", {account.dropped} dropped" if account.dropped else ""
        verdict = "exactly as drawn" if order.repeats else "exactly once"
        return EpochVerdict(account.epoch, account.planned.count, f"{verdict}{extra}")
