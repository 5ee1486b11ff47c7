"""The position of an `ElasticLoader` over a stream: what its lanes have read, equal on all ranks.

A rank reports its lanes with the agreement on their batches, so all ranks know what each lane has
given before the last microbatch of a step runs. They deal alike, and know the lanes and the shards
of the next step. Where no lane has a row for it, they look for one, in an agreement of its own.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from anyrank.errors import CheckpointError
from anyrank.files.json_codec import reading_record
from anyrank.training.data.batches import FetchedBatch
from anyrank.training.data.receipts import EpochAccount, EpochVerdict, Receipt
from anyrank.training.data.schedule import MicrobatchSlot, StepPlan
from anyrank.training.random_state.streams import kept
from anyrank.training.steps.agreed_batches import Fetcher
from anyrank.training.steps.position import COUNTS, KEPT_RECEIPTS, Position, RankAccounts
from anyrank.training.streams.deal import Deal
from anyrank.training.streams.lanes import OUT, READY, Report, Rows, Shard
from anyrank.training.streams.plan import LanePlan
from anyrank.training.streams.readers import LaneAnswer, LaneRequest, LaneRequests, StreamReader
from anyrank.training.streams.sources import Stream
from anyrank.training.streams.tally import Tally, sum_of
from anyrank.wording import count
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.data")

ROWS_NOTED = 1000  # ranges of rows, at most, that are noted before they are summed up
LOOKS = 40  # lanes that a rank tells of at once: with the largest states under 64 KiB
TITLES = {"version": "format version", "order": "the order", "key": "the dataset key"}


class StreamPosition(Position):
    """Where a run is in a stream.

    Attributes:
        deal: after the last step that counts.
        flows: whether an epoch's steps have rows of the next one when its own are over.
        num_shards: of an epoch.
        tally: of what was read.
        verdicts: of finished epochs, what is known of them.
        own_rows: that this rank has run, and has not summed up.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reader = cast("StreamReader", cast("Any", self.dataset))
        self.stream: Stream = self.reader.dataset
        self.stream.begin(self.schedule.order.seed, self.schedule.microbatch)
        self.verdicts: dict[int, str] = {}
        self.plan: LanePlan | None = None  # the newest one
        self.spare: Any = None  # a batch of this rank, for copies
        self.flows, self.tally = self.schedule.tail == "flow", Tally()
        self.own_rows: list[Rows] = []
        self._begin_queue(len(self.stream))

    def _begin_queue(self, num_shards: int) -> None:
        """Deal anew; of epochs that flow, once in a run."""
        self.num_shards = num_shards
        self.deal = Deal(num_shards, self.num_lanes, self.flows)
        self._open_lanes()

    @property
    def num_lanes(self) -> int:
        return self.schedule.num_microbatches

    def _open_lanes(self) -> None:
        """Forget the lanes that are open: others go on from the deal."""
        self.plan = None
        self.order = replace(self.schedule.order, n=self.num_shards)
        self.lanes = LaneRequests(self.epoch, self.schedule.microbatch, self.num_workers, self.ids)

    def ids(self, places: list[int]) -> list[Shard]:
        """The shards at places in the queue."""
        first = 0 if self.flows else self.epoch
        shards: list[Shard] = []
        for index in places:
            later, number = divmod(index, self.num_shards)
            epoch = first + later
            shards.append((epoch, int(self.order.ids(epoch, number, number + 1))))
        return shards

    def _next_epoch(self, deal: Deal) -> int:
        """The first epoch that is not over."""
        if self.flows:
            return deal.oldest // self.num_shards
        return self.epoch + deal.is_over

    # -- steps ------------------------------------------------------------------------------------

    @property
    def steps_in_epoch(self) -> int:
        raise TypeError(
            "the steps of an epoch are unknown, as rows are counted while they are read: end by "
            "steps(until=) or steps(epochs=), or give the lengths of the shards "
            "(anyrank.row_counts counts them)"
        )

    def begin_pass(self, ranks: Ranks, batches: Iterator[FetchedBatch]) -> None:
        super().begin_pass(ranks, batches)
        self._open_lanes()
        if not self.deal.is_ready:
            with kept():
                self.deal, reports, own_rows = self._look(self.deal, self.step)
            self._count(reports, own_rows)
            if self._next_epoch(self.deal) > self.epoch:
                raise self._no_rows(reports)

    def _no_rows(self, reports: Sequence[Report]) -> CheckpointError:
        """The error of an epoch in which lanes that reported this have found no sample."""
        rows = sum(stop - start for report in reports for _, _, start, stop in report.rows)
        if rows:
            return CheckpointError(
                f"epoch {self.epoch}: the transform has made no sample of {count(rows, 'row')}: "
                "there is nothing to train on; let feed(row) or end() return a list of samples"
            )
        return CheckpointError(
            f"epoch {self.epoch}: none of the {count(self.num_shards, 'shard')} has a row: there "
            "is nothing to train on"
        )

    def end_pass(self) -> None:
        super().end_pass()
        self.plan = self.spare = None

    def _own_lanes(self, deal: Deal) -> list[int]:
        """The lanes that this rank runs in the step after a deal, copies apart."""
        live = deal.live
        plan = StepPlan(0, 0, 0, len(live), 1)
        return [live[slot.k] for slot in self.slots(plan) if not slot.is_copy]

    def _look(self, deal: Deal, number: int) -> tuple[Deal, list[Report], list[Rows]]:
        """Look for a row, and deal, until a lane has one or all are over. All ranks.

        Args:
            deal: in which no lane has one.
            number: of the step that needs one.

        Returns:
            The deal, what all lanes have reported, and the rows that this rank has read.
        """
        deal, reports, rows = deal.copy(), list[Report](), list[Rows]()
        assert self.ranks is not None
        first_epoch = self._next_epoch(deal)
        while not deal.is_ready:
            if self._next_epoch(deal) > first_epoch + 1:
                raise self._no_rows(reports)
            lanes = self._own_lanes(deal)
            self.lanes.begin_step(number, lanes, deal, is_looking=True)
            most = -(-len(deal.live) // self.data_rank()[1])  # of a rank
            new: dict[int, Report] = {}
            for start in range(0, most, LOOKS):

                def look(some: list[int] = lanes[start : start + LOOKS]) -> list[Report]:
                    for lane in some:
                        self.lanes.lanes[lane].looks = 1
                    return [cast("Report", self._next(lane).request.report) for lane in some]

                _, reports_of_all = self.ranks.run_and_reduce(
                    "reading shards", lambda look=look: (None, look()), operator.add
                )
                new |= {report.lane: report for report in reports_of_all}
            rows += [row for lane in lanes for row in new[lane].rows]
            reports += new.values()
            deal.take(new.values())
        return deal, reports, rows

    def next_step(self) -> LanePlan:
        if self.plan is None or self.plan.number != self.step:
            self.plan = self._make_plan(self.step, self.deal)
        return self.plan

    def following(self, step: StepPlan) -> LanePlan | None:
        assert isinstance(step, LanePlan)
        if not step.after:
            raise step.is_unknown("whether a step follows")
        (deal,) = step.after
        if self._next_epoch(deal) > self.epoch:
            return None
        self.plan = self._make_plan(step.number + 1, deal)
        return self.plan

    def _make_plan(self, number: int, deal: Deal) -> LanePlan:
        size, live = self.schedule.microbatch, tuple(deal.live)
        has_copies = len(live) % self.data_rank()[1] > 0 or OUT in deal.status
        plan = LanePlan(self.epoch, number, 0, 0, size, deal, live, has_copies)
        self.lanes.begin_step(number, self._own_lanes(deal), deal)
        return plan

    def requests(self) -> Iterator[LaneRequest]:
        if self.plan is None and self.deal.is_ready:
            self.next_step()
        return self.lanes.requests()

    # -- batches ----------------------------------------------------------------------------------

    def fetcher(self, plan: StepPlan, is_first: bool) -> Fetcher:
        assert isinstance(plan, LanePlan)
        if not is_first:
            return Fetcher(lambda slot: self.fetch_again(plan, slot))

        # With exact=True a first model under FSDP2 has the ranks take turns, as is known only now.
        self.lanes.begin_step(plan.number, self._own_lanes(plan.deal), plan.deal)

        def report(batches: Sequence[FetchedBatch]) -> list[Report]:
            answers: list[LaneAnswer] = [fetched.request for fetched in batches]
            return [answer.report for answer in answers if answer.report is not None]

        def learn(answers: list[Any]) -> None:
            self.learn(plan, answers)

        return Fetcher(lambda slot: self.fetch(plan, slot), report, learn)

    def _next(self, lane: int) -> FetchedBatch:
        """The next answer of a lane that this rank runs."""
        answers, self.lanes.next_lane = self.lanes.lanes[lane].answers, lane
        while not answers:
            fetched = next(self.batches, None)
            if fetched is None:
                raise CheckpointError(
                    f"lane {lane}: the workers returned no batch: start a new iteration of the "
                    "loader"
                )
            self.lanes.sort(fetched)
        return answers.popleft()

    def fetch(self, plan: StepPlan, slot: MicrobatchSlot) -> FetchedBatch:
        assert isinstance(plan, LanePlan)
        lane = plan.lanes[slot.k]
        fetched = None if slot.is_copy else self._next(lane)
        if fetched is not None and not fetched.request.is_empty:
            plan.sizes[slot.k] = fetched.request.report.num_outputs
            if not plan.has_copies:
                self.spare = None
            elif self.spare is None or lane == max(self.lanes.lanes):
                self.spare = copy.deepcopy(fetched.batch)
            return fetched
        if self.spare is None:
            ready = next(k for k, n in enumerate(plan.lanes) if plan.deal.status[n] == READY)
            self.spare = self._read_again(plan, ready).batch
        batch = copy.deepcopy(self.spare)
        plan.sizes.setdefault(slot.k, 0)
        answer = LaneAnswer(None) if fetched is None else fetched.request
        return FetchedBatch(answer, batch)

    def fetch_again(self, plan: StepPlan, slot: MicrobatchSlot) -> FetchedBatch:
        assert isinstance(plan, LanePlan)
        is_empty = not slot.is_copy and not plan.sizes[slot.k]
        if slot.is_copy or is_empty:
            ready = next(k for k, n in enumerate(plan.lanes) if plan.deal.status[n] == READY)
            answer = LaneAnswer(None, is_empty)
            return FetchedBatch(answer, self._read_again(plan, ready).batch)
        return self._read_again(plan, slot.k)

    def _read_again(self, plan: LanePlan, k: int) -> FetchedBatch:
        """Microbatch k of a step, in this process."""
        deal, lane = plan.deal, plan.lanes[k]
        opening, shards = (deal.first[lane], deal.states[lane]), self.ids(deal.shards[lane])
        return self.reader.read_once(
            LaneRequest(
                plan.epoch,
                plan.number,
                lane,
                plan.microbatch,
                is_due=True,
                is_last_deal=deal.is_last,
                shards=tuple(shards),
                opening=opening,
                token=0,
                tokens=frozenset(),
            )
        )

    def learn(self, plan: LanePlan, reports: Sequence[Report]) -> None:
        """Take what some lanes report of a step; with the last of them, deal. All ranks.

        Raises:
            CheckpointError: ranks with the same lane have read other rows.
        """
        for report in reports:
            if plan.reports.setdefault(report.lane, report) != report:
                raise CheckpointError(
                    f"step {plan.number}, lane {report.lane}: ranks that read the same lane have "
                    f"read other rows, up to {report.state} and {plan.reports[report.lane].state}: "
                    "read and transform have to give the same on all ranks"
                )
        if len(plan.reports) < len(plan.lanes) or plan.after:
            return
        after = plan.deal.copy()
        after.take(plan.reports.values())
        if not after.is_ready:
            after, looks, own_rows = self._look(after, plan.number + 1)
            plan.looks.extend(looks)
            plan.own_looks.extend(own_rows)
        plan.after.append(after)

    # -- counting ---------------------------------------------------------------------------------

    def advance(self, step: StepPlan, seen: Sequence[Any]) -> None:
        assert isinstance(step, LanePlan)
        (self.deal,) = step.after
        self._count([*step.reports.values(), *step.looks], [*seen, *step.own_looks])
        self.step += 1
        self.tally.count_step(2 * step.samples < self.schedule.global_batch)
        self.samples += step.samples
        self.consumed += step.samples
        self._leave_finished_epoch()

    def _count(self, reports: Sequence[Report], own_rows: Sequence[Rows]) -> None:
        """Count what all lanes have read, and what this rank has."""
        self.tally.add(reports)
        self.own_rows += own_rows
        if len(self.own_rows) > ROWS_NOTED:
            self._sum_up()
        for epoch, shard, rows, before in self.tally.find_changed(reports):
            self._note(
                f"shard {self.stream.name(shard)} has {rows} rows in epoch {epoch}, and had "
                f"{before} in one before: a resume finds other rows in it"
            )
        for _, shard, start, stop in (rows for report in reports for rows in report.changed):
            self._note(
                f"shard {self.stream.name(shard)}: its rows {start} to {stop - 1} are not those "
                "that the run has read before: rows of it may be lost, or come twice; put back "
                "the old shard, or, if read draws numbers from a generator of its own, seed that"
            )

    def _sum_up(self) -> None:
        """Count the rows that were noted."""
        account = self.accounts[-1]
        account.planned += self.tally.sum_up()
        account.seen += sum_of(self.own_rows)
        self.own_rows = []

    def rank_accounts(self, ranks: Ranks) -> RankAccounts:
        self._sum_up()
        return super().rank_accounts(ranks)

    def _note(self, text: str) -> None:
        """Tell the user, and the report of a run."""
        self.notes.append(text)
        log.warning(text)

    def _leave_finished_epoch(self) -> None:
        while self._next_epoch(self.deal) > self.epoch:
            self._sum_up()
            self.verdicts[self.epoch] = self.tally.end(
                self.epoch, self.num_shards, self.num_lanes, self.flows
            )
            self.accounts[-1].dropped = self.consumed  # its samples, which the verdict tells
            self.epoch += 1
            self.consumed = 0
            self.accounts.append(EpochAccount(self.epoch))
            if not self.flows:
                self._begin_queue(len(self.stream))

    def _verdict(self, account: EpochAccount) -> EpochVerdict:
        text = self.verdicts.pop(account.epoch)
        if not text.startswith("exactly"):
            raise CheckpointError(
                f"data position: epoch {account.epoch} is {text}: a shard or the transform gave "
                "other rows when they were read again; resume from an earlier checkpoint, with the "
                "shards as they were"
            )
        return EpochVerdict(account.epoch, account.dropped, text)

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """About 400 bytes and 100 for each lane, JSON values, equal on all ranks."""
        self._sum_up()
        state = super().state_dict()
        state |= {
            "n": self.num_shards,
            "receipt": self.accounts[-1].planned.to_json(),
            "deal": self.deal.to_json(),
            "digests": self.stream.digests(self.num_shards),
            "tally": self.tally.to_json(),
        }
        return state

    def check_state_dict(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[dict[str, int], Receipt, str | None]:
        own_state = self.state_dict()
        with reading_record("data position"):
            if "deal" not in state_dict:
                raise CheckpointError(
                    "data position: the run has a dataset, or shards with lengths, and here is a "
                    "stream: give the data of the run, or start a new run from its weights"
                )
            for name in ("version", "key", "seed", "order", "global_batch", "microbatch", "tail"):
                if state_dict[name] != own_state[name]:
                    raise CheckpointError(
                        f"data position: the run has {TITLES.get(name, name)} "
                        f"{state_dict[name]!r}, here it is {own_state[name]!r}: give the run's "
                        "value, which works on any number of ranks, or start a new run from its "
                        "weights"
                    )
            saved = {name: int(state_dict[name]) for name in COUNTS}
            receipt = Receipt.from_json(state_dict["receipt"])
            Deal.from_json(state_dict["deal"], self.num_lanes)
            Tally.from_json(state_dict["tally"])
            if len(state_dict["receipts"]) > KEPT_RECEIPTS:
                raise ValueError(f"{len(state_dict['receipts'])} receipts")
            num_shards, digests = int(state_dict["n"]), state_dict["digests"]
            note = self._compare_shards(num_shards, digests, saved["epoch"], receipt.count)
        if self.exact is not None:
            self.exact.check_saved(state_dict.get("exact") or {})
        return saved, receipt, note

    def _compare_shards(
        self, num_shards: int, digests: Sequence[str], epoch: int, num_rows: int
    ) -> str | None:
        """The entry in `notes` for shards that were appended; an error for others."""
        present = len(self.stream)
        if num_shards > present:
            raise CheckpointError(
                f"data position: the run has {num_shards} shards, here are {present}: give all "
                "shards of the run, in their order; others may follow"
            )
        own_digests = self.stream.digests(num_shards)
        for number, (before, now) in enumerate(zip(digests, own_digests, strict=True)):
            if before != now:
                start, stop = (n * num_shards // len(digests) for n in (number, number + 1))
                names = ", ".join(self.stream.name(n) for n in range(start, min(stop, start + 3)))
                raise CheckpointError(
                    f"data position: shards {start} to {stop - 1} are not those of the run, here "
                    f"they are {names}{', ...' if stop > start + 3 else ''}: give the run's "
                    "shards, in their order; others may follow"
                )
        if num_shards == present or not (num_rows or self.flows):
            return None
        if self.flows:
            raise CheckpointError(
                f"data position: the run has {num_shards} shards, here are {present}: with "
                "tail='flow' lanes read the next epoch's already: give the run's shards alone"
            )
        return (
            f"{count(present - num_shards, 'shard')} more than the {num_shards} of the run: they "
            f"come with epoch {epoch + 1}"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.check_state_dict(state_dict)
        self.own_rows = []
        self.deal = Deal.from_json(state_dict["deal"], self.num_lanes)
        self.num_shards, lengths = int(state_dict["n"]), self.tally.lengths
        self.tally = Tally.from_json(state_dict["tally"], lengths)
        self.epoch = int(state_dict["epoch"])
        super().load_state_dict(state_dict)
        if not self.flows and not self.accounts[-1].planned.count:  # shards may have been appended
            self._begin_queue(len(self.stream))
        self._open_lanes()
