"""The position of a run in the data of an `ElasticLoader`: counts, the current step, the receipt.

The position is counted in samples of completed steps and does not depend on the ranks: a state
saved on N ranks is loaded on M. Each rank also keeps a receipt of the samples that it has run,
which `check_receipt` compares with the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import nn

from anyrank.checks import check_choice, check_type
from anyrank.errors import CheckpointError
from anyrank.files.json_codec import reading_record
from anyrank.training.data.batches import FetchedBatch
from anyrank.training.data.fetch import (
    MicrobatchDataset,
    MicrobatchRequest,
    check_length,
    request_for,
)
from anyrank.training.data.receipts import EpochAccount, EpochVerdict, Receipt
from anyrank.training.data.same_settings import compare_settings
from anyrank.training.data.schedule import MicrobatchSlot, Schedule, StepPlan
from anyrank.training.gradients.sync import GradientSync
from anyrank.training.steps.agreed_batches import Fetcher, OwnBatches, fetch_first
from anyrank.training.steps.step_listeners import fetching_ahead
from anyrank.training.steps.step_run import StepRun
from anyrank.world.alike import Compared, digest_of
from anyrank.world.arguments import compare_arguments
from anyrank.world.group import ALONE, check_group, find_members
from anyrank.world.ranks import Ranks

if TYPE_CHECKING:
    from anyrank.training.exact.run import ExactRun

OnBatchChange = Literal["error", "rescale"]
STATE_VERSION = 1
WHAT = "comparing the samples"
KEPT_RECEIPTS = 10  # in a state, to keep it small
COUNTS = ("epoch", "step", "consumed", "samples", "dropped")


@dataclass(frozen=True)
class RankAccounts:
    """One rank's, or all ranks', epochs since the last check, to compare.

    Attributes:
        plans: digest of each epoch's number, and of its earlier and planned samples.
        seen: for each epoch, the receipt of the samples that were run.
        is_one_each: whether no two ranks run the same samples; those of a tensor-parallel group do.
    """

    plans: Compared
    seen: list[Receipt]
    is_one_each: bool

    def join(self, others: RankAccounts) -> RankAccounts:
        """Merge the accounts of ranks."""
        # Of different lengths only if the plans differ.
        seen = [receipt + other for receipt, other in zip(self.seen, others.seen, strict=False)]
        is_one_each = self.is_one_each and others.is_one_each
        return RankAccounts(self.plans.join(others.plans), seen, is_one_each)


class Position:
    """The position of a run in the data of an `ElasticLoader`, and its current step.

    Args:
        schedule: the run's plan.
        key: name or version of the dataset.
        group: the user's process group of the data-parallel ranks.
        on_batch_change: treatment of a state with another global batch; None: an error.
        dataset: the loader's dataset, by microbatch.
        num_workers: number of processes that fetch; 0: this process does.
        exact: sums gradients in an order that does not depend on the ranks; None: in any order.

    Attributes:
        accounts: accounts of the current epoch, the last one, and earlier ones that are not
            verified yet.
        epoch, step, consumed, samples, dropped, notes, receipts: as in `ElasticLoader`.
        current: the step that has started and is not counted yet.
        begun: exchanges of this step's passes, and of passes in earlier attempts at it.
        num_iterations: number of times the loader was iterated, or loaded a state.
        ranks: the data-parallel ranks; None outside an iteration.
        batches: batches still to be fetched in it; the first one starts the fetching.
        ahead: the first batches of the next step, if they were fetched.
        checked: models whose gradient exchange was verified, by id.
        exponent: exponent of the power of two near the first `weight`; None before it.
    """

    is_endless = False  # whether there are no epochs
    must_agree = ("version", "n", "key", "seed", "microbatch", "tail")  # entries of a state

    def __init__(
        self,
        schedule: Schedule,
        key: str | None,
        group: Any,
        on_batch_change: OnBatchChange | None,
        dataset: MicrobatchDataset,
        num_workers: int,
        exact: ExactRun | None,
    ) -> None:
        if on_batch_change is not None:
            check_choice("on_batch_change", on_batch_change, get_args(OnBatchChange))
        if key is not None:
            check_type("key", key, str, "the name of the dataset, a str")
        check_group(group)
        self.schedule, self.key, self.group = schedule, key, group
        self.on_batch_change: OnBatchChange | None = on_batch_change
        self.dataset, self.num_workers, self.exact = dataset, num_workers, exact
        self.epoch = self.step = self.consumed = self.samples = self.dropped = 0
        self.notes: list[str] = []
        self.receipts: list[EpochVerdict] = []
        self.accounts = [EpochAccount(0)]
        self.current: StepRun | None = None
        self.begun: list[GradientSync] = []
        self.num_iterations = 0
        self.ranks: Ranks | None = None
        self.batches: Iterator[FetchedBatch] = iter(())
        self.ahead: OwnBatches | None = None
        self.exponent: int | None = None
        self.checked: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
        self.data_rank()

    def data_rank(self) -> tuple[int, int]:
        """Return this rank's index among the data-parallel ranks, and their number.

        Raises:
            ValueError: more ranks than microbatches, or a group without this rank.
        """
        index, size, group = 0, 1, self.group
        if group is not ALONE and dist.is_available() and dist.is_initialized():
            index, size = dist.get_rank(group), dist.get_world_size(group)
        if index < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group=. Pass each rank its own "
                "data-parallel group."
            )
        self.schedule.check_size(size)
        return index, size

    def arguments(self) -> dict[str, object]:
        """Return the settings that must be the same on every rank, by argument."""
        return self.schedule.arguments() | {
            "key": self.key,
            "exact": self.exact is not None,
            "len(dataset)": len(self.dataset.dataset),
        }

    def check_same(self, ranks: Ranks) -> None:
        """Compare the loader's arguments, and the position, over the ranks. Collective.

        Raises:
            CheckpointError: one of them differs; on every rank, with each value.
            ValueError: some data-parallel ranks are not in `ranks`.
        """

        def check() -> None:
            members, _ = find_members(self.group)
            if missing := sorted({*members} - {*ranks.ranks}):
                raise ValueError(
                    f"only {ranks.name_ranks(ranks.ranks)} called; {ranks.name_ranks(missing)} "
                    f"must call too, because the ElasticLoader has {len(members)} data-parallel "
                    "ranks"
                )

        position = f"epoch {self.epoch}, step {self.step}, {self.consumed} samples of the epoch"
        arguments = self.arguments() | {"position": position}
        compare_arguments(ranks, "ElasticLoader", arguments, CheckpointError, check)

    # -- the current step --------------------------------------------------------------------------

    def begin_pass(self, ranks: Ranks, batches: Iterator[FetchedBatch]) -> None:
        """Start an iteration of the loader."""
        self.ranks, self.batches, self.ahead = ranks, batches, None

    def end_pass(self) -> None:
        """Release workers and ranks, because a user may keep a step after its loop."""
        self.ranks, self.batches, self.ahead = None, iter(()), None

    def slots(self, plan: StepPlan) -> tuple[MicrobatchSlot, ...]:
        """Return the microbatches of a step that this rank runs."""
        return plan.slots(*self.data_rank(), bool(self.exact and self.exact.takes_turns))

    def requests(self) -> Iterator[Any]:
        """Yield this rank's microbatches for the rest of the epoch."""
        for plan in self.schedule.rest(self.next_step()):
            for slot in self.slots(plan):
                yield request_for(self.schedule, plan, slot.k)

    @property
    def steps_in_epoch(self) -> int:
        """Number of steps of a whole epoch."""
        return self.schedule.steps_in_epoch

    def check_dataset(self) -> None:
        """Check that the dataset's length has not changed; raise like `check_length`."""
        check_length(self.dataset.dataset, self.schedule.order.n)

    def fetcher(self, plan: StepPlan, is_first: bool) -> Fetcher:
        """Return the functions that fetch a step's batches, in its first pass or in another."""
        return Fetcher(partial(self.fetch if is_first else self.fetch_again, plan))

    def fetch(self, plan: StepPlan, slot: MicrobatchSlot) -> FetchedBatch:
        """Return the next batch, which must be that of a slot of a step.

        Raises:
            CheckpointError: it belongs to another slot.
        """
        start, stop = plan.bounds(slot.k)
        fetched = next(self.batches, None)
        found = None
        if fetched is not None:
            request: MicrobatchRequest = fetched.request
            found = request.epoch, request.start, len(request.ids)
        if fetched is None or found != (plan.epoch, start, stop - start):
            ids = self.schedule.ids(plan, slot.k)
            got = "missing" if fetched is None else f"of samples {list(fetched.request.ids)[:8]}"
            raise CheckpointError(
                f"step {plan.number}, microbatch {slot.k}: the plan has samples {ids[:8]}, but the "
                f"next batch is {got}. Start a new iteration; if something else iterates over the "
                "loader at the same time, give it a second loader."
            )
        return fetched

    def fetch_again(self, plan: StepPlan, slot: MicrobatchSlot) -> FetchedBatch:
        """Return the batch of a slot, for a further pass over its step; in this process."""
        return self.dataset[request_for(self.schedule, plan, slot.k)]

    def fetch_ahead(self, step: StepPlan) -> None:
        """Fetch the first batches of the step after this one, if its epoch has one.

        Only with workers: data that this process reads may depend on what the loop does before the
        step, and may draw from random generators that a save between the two holds.
        """
        plan = self.following(step)
        if plan is not None and self.num_workers:
            with fetching_ahead():
                self.ahead = fetch_first(self.fetcher(plan, True), self.slots(plan))

    def following(self, step: StepPlan) -> StepPlan | None:
        """Return the step after a step; None at the end of its epoch."""
        return self.schedule.following(step)

    def take_ahead(self) -> OwnBatches | None:
        """Return the batches that were fetched ahead, for the step that starts."""
        ahead, self.ahead = self.ahead, None
        return ahead

    def begin_step(self) -> StepRun | None:
        """Start the next step; return None if the epoch has turned out to be over."""
        self.current = StepRun(self.next_step())
        return self.current

    def drop_begun(self) -> None:
        """Drop the gradients of earlier attempts at the current step."""
        for sync in self.begun:
            sync.drop_gradients()
        self.begun.clear()

    @property
    def is_step_complete(self) -> bool:
        """Return True if all microbatches of the current step have run."""
        return self.current is not None and self.current.is_complete

    def check_complete(self) -> None:
        """Check that `commit` may count a step. Does not communicate.

        Raises:
            CheckpointError: the started step is not complete.
        """
        if self.current is not None and not self.current.is_complete:
            raise CheckpointError(
                f"step {self.current.plan.number} is not complete. Iterate over "
                "step.microbatches(model) to the end in every step. To skip the rest, leave the "
                "loop over the loader; the next iteration starts with the same step."
            )

    def commit(self) -> None:
        """Count the current step; raise like `check_complete`. Does not communicate."""
        self.check_complete()
        if self.current is not None:
            self.advance(self.current.plan, self.current.seen)
            self.current = None
            self.begun.clear()

    def abandon_step(self) -> None:
        """Forget the current step, whose optimizer has not stepped: it will be repeated."""
        if self.current is not None:
            self.current.leave()
        self.current = None

    # -- counting ---------------------------------------------------------------------------------

    def next_step(self) -> StepPlan:
        """Return the next step, in this epoch or the following one."""
        step = self.schedule.next_step(self.epoch, self.step, self.consumed)
        assert step is not None  # advance and load_state_dict leave a finished epoch
        return step

    def advance(self, step: StepPlan, seen: Sequence[Any]) -> None:
        """Count a completed step, and the samples `seen` on this rank, without copies."""
        self.accounts[-1].add(self.schedule.order.ids(step.epoch, step.start, step.stop), seen)
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
        """Return about 400 bytes of JSON values, the same on every rank. Does not communicate.

        It counts steps as the plan has them, also those of an epoch that has just ended: its ranks
        have not compared it yet, and a resume could not.
        """
        order = self.schedule.order
        receipts = [*self.receipts, *map(self._verdict, self.accounts[:-1])]
        state = {
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
            "receipts": [list(receipt) for receipt in receipts[-KEPT_RECEIPTS:]],
        }
        if self.exact is not None:
            known = {} if self.exponent is None else {"exponent": self.exponent}
            state["exact"] = self.exact.record | known
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a saved position; raise like `check_state_dict`, and change nothing then."""
        saved, receipt, note = self.check_state_dict(state_dict)
        for name in COUNTS:
            setattr(self, name, saved[name])
        self.notes = [note] if note else []
        self.receipts = [EpochVerdict(*row) for row in state_dict["receipts"]]
        self.accounts = [EpochAccount(self.epoch, receipt)]
        self._leave_finished_epoch()
        self._load_exact(state_dict.get("exact"))
        self.abandon_step()
        self.num_iterations += 1
        self.end_pass()

    def continue_counts(self, step: int, samples: int) -> None:
        """Continue a run's counts of steps and samples with data that restarts. Before a loop."""
        self.step, self.samples = max(self.step, step), max(self.samples, samples)

    def _load_exact(self, saved: Any) -> None:
        """Continue the record of exact=True, or note where it ends."""
        if self.exact is not None:
            record = dict(saved or {})
            self.exponent = record.pop("exponent", None)
            self.notes += self.exact.load(record, self.step)
            self.checked.clear()  # the record is compared with the models' again
        elif saved is not None:
            self.notes.append(
                f"exact=True ends at step {self.step}; from here on, results depend on the ranks"
            )

    def check_state_dict(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[dict[str, int], Receipt, str | None]:
        """Check a state. Return its counts, receipt and entry for `notes`.

        Raises:
            CheckpointError, CorruptCheckpoint: as for `ElasticLoader.load_state_dict`.
        """
        with reading_record("data position"):
            note = self._check_settings(state_dict)
            saved = {name: int(state_dict[name]) for name in COUNTS}
            receipt = Receipt.from_json(state_dict["receipt"])
            if receipt.count != saved["consumed"] or len(state_dict["receipts"]) > KEPT_RECEIPTS:
                raise ValueError(f"{saved['consumed']} samples were consumed")
        if self.exact is not None:
            self.exact.check_saved(state_dict.get("exact") or {})
        return saved, receipt, note

    def _check_settings(self, state_dict: Mapping[str, Any]) -> str | None:
        """Compare the settings of a state; return the note on a different global batch, if any."""
        compare_settings(state_dict, self.state_dict(), self.must_agree)
        return self._batch_note(state_dict["global_batch"], int(state_dict["step"]))

    def _batch_note(self, saved: int, step: int) -> str | None:
        """Return the note on a different global batch; raise an error if it is not allowed."""
        own_batch = self.schedule.global_batch
        if saved == own_batch:
            return None
        if self.on_batch_change != "rescale":
            hint = ", or pass on_batch_change='rescale' and a learning rate for it"
            raise CheckpointError(
                f"ElasticLoader: the saved run has global_batch {saved}, but this loader has "
                f"{own_batch}. Set global_batch={saved}, which works on any number of ranks"
                f"{hint if self.on_batch_change else ''}."
            )
        return (
            f"global_batch {saved} became {own_batch} at step {step}. The step count continues, so "
            "a per-step learning-rate schedule now covers a different number of samples"
        )

    # -- verification -----------------------------------------------------------------------------

    def check_receipt(self, ranks: Ranks) -> None:
        """Compare the committed samples of all ranks with the plan. Collective.

        Each epoch that ended since the last check is added to `receipts`.

        Args:
            ranks: all data-parallel ranks; may include ranks with the same data (tensor parallel).

        Raises:
            CheckpointError: on every rank: a sample was repeated or lost, or ranks are at different
                steps.
        """
        accounts = self.rank_accounts(ranks)
        known = ranks.reduce(WHAT, accounts, RankAccounts.join)
        seen, are_alike = known.seen, bool(known.plans.digest)
        if are_alike and not known.is_one_each:
            # Ranks with the same data count once: one receipt by data-parallel index.
            by_index = {self.data_rank()[0]: accounts.seen}
            by_index = ranks.reduce(WHAT, by_index, _join_seen)
            are_alike = all(by_index.values())
            # Of different lengths only if the plans differ.
            seen = [sum(row, Receipt()) for row in zip(*by_index.values(), strict=False)]
        if not are_alike:
            steps = ranks.gather(WHAT, self.step)  # once, for an error
            raise CheckpointError(
                f"ElasticLoader: ranks have run different samples; they are at steps {steps}. "
                "Every rank must run and commit() every step."
            )
        for account, run in zip(self.accounts, seen, strict=True):
            total = account.earlier + run
            if total != (plan := account.planned):
                raise CheckpointError(
                    f"ElasticLoader: in epoch {account.epoch} samples were lost or repeated: the "
                    f"ranks ran {total.count} samples (receipt {total.sum:016x}), but {plan.count} "
                    f"({plan.sum:016x}) were planned. Resume an earlier checkpoint, and please "
                    "report a bug."
                )
        self.receipts += map(self._verdict, self.accounts[:-1])
        del self.accounts[:-1]

    def rank_accounts(self, ranks: Ranks) -> RankAccounts:
        """Return this rank's part of `check_receipt`."""
        plans = [(account.epoch, account.earlier, account.planned) for account in self.accounts]
        return RankAccounts(
            plans=Compared(digest_of(plans), ranks.rank),
            seen=[account.seen for account in self.accounts],
            is_one_each=self.data_rank() == (ranks.index, ranks.size),
        )

    def _verdict(self, account: EpochAccount) -> EpochVerdict:
        """Return the verdict on a finished epoch whose samples all ran as planned."""
        order = self.schedule.order
        assert account.planned.count + account.dropped == order.n  # see `check_state_dict`
        extra = f", {account.dropped} dropped" if account.dropped else ""
        verdict = "exactly as drawn" if order.repeats else "exactly once"
        return EpochVerdict(account.epoch, account.planned.count, f"{verdict}{extra}")


def _join_seen(
    some: dict[int, list[Receipt]], others: dict[int, list[Receipt]]
) -> dict[int, list[Receipt]]:
    """Return the receipts by data-parallel index; [] where ranks with the same one differ."""
    joined = some | others
    for index in some.keys() & others.keys():
        if some[index] != others[index]:
            joined[index] = []
    return joined
