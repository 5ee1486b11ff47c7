"""The position of an `ElasticLoader`, with the step that is under way, and what its steps share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import nn

from anyrank.data.fetch import FetchedBatch, MicrobatchDataset, check_length, request_for
from anyrank.data.position import OnBatchChange, Position
from anyrank.data.receipts import Receipt
from anyrank.data.schedule import MicrobatchSlot, Schedule, StepPlan
from anyrank.errors import CheckpointError
from anyrank.steps.agreed_batches import Fetcher, OwnBatches, fetch_first
from anyrank.steps.gradient_sync import GradientSync
from anyrank.steps.step_listeners import fetching_ahead
from anyrank.steps.step_run import StepRun
from anyrank.world.ranks import Ranks

if TYPE_CHECKING:
    from anyrank.around.exact.run import ExactRun


class LoaderPosition(Position):
    """Where a run is in the data of an `ElasticLoader`.

    Args:
        dataset: the loader's, by microbatch.
        num_workers: processes that fetch; 0: this one does.
        exact: sums gradients in an order that does not depend on the ranks; None: as they come.
        others: as those of `Position`.

    Attributes:
        current: the step that was begun and is not counted.
        begun: exchanges of this step's passes, and of those of earlier tries at it.
        num_iterations: how often the loader was iterated, or loaded a state.
        ranks: the data-parallel ranks; None outside of an iteration.
        batches: those still to be fetched in it; the first one starts the fetching.
        ahead: the first batches of the next step, if they were fetched.
        checked: models whose gradient exchange was verified, by id.
        exponent: of the power of two near the first `weight`; None before it.
    """

    owner = "ElasticLoader"

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
        super().__init__(schedule, key, group, on_batch_change)
        self.dataset, self.num_workers, self.exact = dataset, num_workers, exact
        self.current: StepRun | None = None
        self.begun: list[GradientSync] = []
        self.num_iterations = 0
        self.ranks: Ranks | None = None
        self.batches: Iterator[FetchedBatch] = iter(())
        self.ahead: OwnBatches | None = None
        self.exponent: int | None = None
        self.checked: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()

    def arguments(self) -> dict[str, object]:
        return super().arguments() | {
            "exact": self.exact is not None,
            "len(dataset)": len(self.dataset.dataset),
        }

    def begin_pass(self, ranks: Ranks, batches: Iterator[FetchedBatch]) -> None:
        """An iteration of the loader begins."""
        self.ranks, self.batches, self.ahead = ranks, batches, None

    def end_pass(self) -> None:
        """Release workers and ranks: a user may keep a step after its loop."""
        self.ranks, self.batches, self.ahead = None, iter(()), None

    def slots(self, plan: StepPlan) -> list[MicrobatchSlot]:
        """The microbatches of a step that this rank runs."""
        return plan.slots(*self.data_rank(), bool(self.exact and self.exact.takes_turns))

    def requests(self) -> Iterator[Any]:
        """This rank's microbatches for the rest of the epoch."""
        for plan in self.schedule.rest(self.next_step()):
            for slot in self.slots(plan):
                yield request_for(self.schedule, plan, slot.k)

    @property
    def steps_in_epoch(self) -> int:
        """Number of steps of a whole epoch."""
        return self.schedule.steps_in_epoch

    def check_dataset(self) -> None:
        """Refuse a dataset that has got another length; raises as `check_length`."""
        check_length(self.dataset.dataset, self.schedule.order.n)

    def fetcher(self, plan: StepPlan, is_first: bool) -> Fetcher:
        """How the batches of a step are fetched, in its first pass and in others."""
        return Fetcher(partial(self.fetch if is_first else self.fetch_again, plan))

    def fetch(self, plan: StepPlan, slot: MicrobatchSlot) -> FetchedBatch:
        """The next batch, which is that of a slot of a step.

        Raises:
            CheckpointError: it is another one.
        """
        ids = self.schedule.ids(plan, slot.k)
        fetched = next(self.batches, None)
        samples = None if fetched is None else (fetched.request.epoch, list(fetched.request.ids))
        if fetched is None or samples != (plan.epoch, ids):
            got = "no batch" if fetched is None else f"samples {list(fetched.request.ids)[:8]}"
            raise CheckpointError(
                f"step {plan.number}, microbatch {slot.k}: the plan has samples {ids[:8]}, the "
                f"workers returned {got}: start a new iteration of the loader"
            )
        return fetched

    def fetch_again(self, plan: StepPlan, slot: MicrobatchSlot) -> FetchedBatch:
        """The batch of a slot, for a further pass over its step; in this process."""
        return self.dataset[request_for(self.schedule, plan, slot.k)]

    def fetch_ahead(self, step: StepPlan) -> None:
        """Fetch the first batches of the step after this one, if its epoch has one.

        Of workers alone: what this process reads may depend on what the loop does before the step,
        and may draw from what a save between the two holds.
        """
        plan = self.following(step)
        if plan is not None and self.num_workers:
            with fetching_ahead():
                self.ahead = fetch_first(self.fetcher(plan, True), self.slots(plan))

    def following(self, step: StepPlan) -> StepPlan | None:
        """The step after a step; None at the end of its epoch."""
        return self.schedule.following(step)

    def take_ahead(self) -> OwnBatches | None:
        """What was fetched ahead, for the step that begins."""
        ahead, self.ahead = self.ahead, None
        return ahead

    def begin_step(self) -> StepRun:
        """The next step begins."""
        self.current = StepRun(self.next_step())
        return self.current

    def drop_begun(self) -> None:
        """Drop the gradients of earlier tries at the current step."""
        for sync in self.begun:
            sync.drop_gradients()
        self.begun.clear()

    @property
    def is_step_complete(self) -> bool:
        """Whether all microbatches of the current step were run."""
        return self.current is not None and self.current.is_complete

    def check_complete(self) -> None:
        if self.current is not None and not self.current.is_complete:
            raise CheckpointError(
                f"step {self.current.plan.number} is not complete: run `for batch in "
                "step.microbatches(model)` to its end in each step, or leave the loop over the "
                "loader: the next iteration returns the same step again"
            )

    def commit(self) -> None:
        self.check_complete()
        if self.current is not None:
            self.advance(self.current.plan, self.current.seen)
            self.current = None
            self.begun.clear()

    def abandon_step(self) -> None:
        """Forget the current step, whose optimizer has not stepped: it will be repeated."""
        self.current = None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.exact is not None:
            known = {} if self.exponent is None else {"exponent": self.exponent}
            state["exact"] = self.exact.record | known
        return state

    def check_state_dict(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[dict[str, int], Receipt, str | None]:
        checked_state = super().check_state_dict(state_dict)
        if self.exact is not None:
            self.exact.check_saved(state_dict.get("exact") or {})
        return checked_state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = state_dict.get("exact")
        if self.exact is not None:
            record = dict(saved or {})
            self.exponent = record.pop("exponent", None)
            self.notes += self.exact.load(record, self.step)
            self.checked.clear()  # the record is compared with the models' again
        elif saved is not None:
            self.notes.append(
                f"exact=True ends at step {self.step}: from here on, bits depend on the ranks"
            )
        self.current = None
        self.num_iterations += 1
        self.end_pass()
