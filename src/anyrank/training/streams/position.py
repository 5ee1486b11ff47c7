"""The position of an `ElasticLoader` in streams: what its lanes have read, the same on every rank.

A rank reports its blocks with the agreement on their batches; the rank with a lane's last block of
the step also reports the lane's position. So before the last microbatch of a step runs, all ranks
know the content of the step, which lanes come to their end, and whether a step follows. Reading
these values has no effect: each plan is made once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from anyrank.errors import CheckpointError
from anyrank.files.json_codec import reading_record
from anyrank.training.data.batches import FetchedBatch
from anyrank.training.data.receipts import EpochAccount, EpochVerdict, Receipt
from anyrank.training.data.same_settings import WAYS
from anyrank.training.data.schedule import MicrobatchSlot, StepPlan
from anyrank.training.random_state.generators import kept
from anyrank.training.steps.agreed_batches import FIRST, Fetcher, OwnBatches
from anyrank.training.steps.position import COUNTS, KEPT_RECEIPTS, Position
from anyrank.training.steps.step_run import StepRun
from anyrank.training.streams.block_plan import BlockPlan, StepRead
from anyrank.training.streams.deal import Deal, Opening
from anyrank.training.streams.map_style import MapStyleStream
from anyrank.training.streams.sources import Streams
from anyrank.training.streams.verdicts import check_units, describe
from anyrank.training.streams.workers import (
    NO_KEY,
    BlockAnswer,
    BlockReader,
    BlockRequest,
    BlockRequests,
    Key,
    block_id,
)
from anyrank.wording import count
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.data")

CHANGES_NOTED = 20  # in an epoch


class StreamPosition(Position):
    """The position of a run in its streams.

    Attributes:
        deal: deal after the last step that counts.
        changed: rows of the epoch that had changed when they were read again, as sentences.
        verdicts: verdicts on the epochs that this process has finished.
    """

    must_agree = ("version", "key", "seed", "microbatch", "tail")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reader = cast("BlockReader", cast("Any", self.dataset))
        self.streams: Streams = self.reader.dataset
        seed, num = self.schedule.order.seed, self.schedule.num_microbatches
        self.constants = self.streams.constants(seed, num)
        self.is_endless = self.constants.endless
        self.notes += self.streams.notes
        for note in self.notes:
            log.warning(note)
        self.verdicts: dict[int, EpochVerdict] = {}
        self.changed: list[str] = []
        self._run = 0
        self._deal_epoch()

    def _deal_epoch(self) -> None:
        """Deal the shards of the epoch that starts."""
        self.deal = Deal(self.constants, self.epoch, [*map(len, self.streams.sources)])
        self._open()

    def _open(self) -> None:
        """Discard what was read ahead of the last counted step."""
        self._run += 1
        self._next: BlockPlan | None = None
        self._requests = BlockRequests(self._run, self.num_workers)

    # -- steps ------------------------------------------------------------------------------------

    @property
    def steps_in_epoch(self) -> int:
        raise TypeError(
            "the number of steps per epoch is unknown, because rows are counted as they are read. "
            "Set a limit with steps(until=) or steps(epochs=), or pass the lengths of the shards "
            "(see anyrank.row_counts)."
        )

    def begin_pass(self, ranks: Ranks, batches: Iterator[FetchedBatch]) -> None:
        super().begin_pass(ranks, batches)
        self._open()

    def next_step(self) -> BlockPlan:
        if self._next is None:
            self._next = self._make_plan(self.deal, self.step)
        return self._next

    def begin_step(self) -> StepRun | None:
        plan, ranks = self.next_step(), self.ranks  # once it is known to have a row
        while plan.deal.is_unsure(plan.lanes) and not plan.read.num_samples:
            assert ranks is not None
            for num_slots in (FIRST, plan.num_microbatches):
                with kept():
                    slots = self.slots(plan)[:num_slots]
                    self.ahead = OwnBatches(self.fetcher(plan, True), slots)
                self.ahead.settle(ranks)
                if plan.read.num_samples:
                    break
            else:
                self.ahead = None
                after, changes = plan.read.after, plan.read.changes
                assert after is not None
                if after.is_over:
                    self.deal = after
                    self._note_changes(plan)
                    self._leave_finished_epoch()
                    return None
                plan = self._next = self._make_plan(after, plan.number, changes)
        return super().begin_step()

    def fetch_ahead(self, step: StepPlan) -> None:
        plan = self.following(step)
        if plan is not None and not plan.deal.is_unsure(plan.lanes):
            super().fetch_ahead(step)

    def following(self, step: StepPlan) -> BlockPlan | None:
        assert isinstance(step, BlockPlan)
        if step.read.after is None:
            raise step.too_early_error("whether a step follows")
        return step.read.next_plan

    def _make_plan(self, deal: Deal, number: int, changes: Iterable[Any] = ()) -> BlockPlan:
        blocks, keys = deal.blocks, list[Key]()
        for lane in deal.lanes_of(number, blocks):
            keys.append((*deal.lane_pass(lane), blocks[lane]))
            blocks[lane] += 1
        size, read = self.schedule.microbatch, StepRead(changes=[*changes])
        return BlockPlan(deal.epoch, number, 0, 0, size, deal=deal, keys=tuple(keys), read=read)

    def requests(self) -> Iterator[BlockRequest]:
        return self._requests.requests()

    # -- batches ----------------------------------------------------------------------------------

    def fetcher(self, plan: StepPlan, is_first: bool) -> Fetcher:
        assert isinstance(plan, BlockPlan)
        if not is_first:
            return Fetcher(lambda slot: self.fetch_again(plan, slot))
        slots = self.slots(plan)
        own_microbatches = [slot.k for slot in slots if not slot.is_copy]
        self._requests.begin_step(plan.deal, plan.number, own_microbatches)
        last_keys = plan.last_keys

        def fetch(slot: MicrobatchSlot) -> FetchedBatch:
            fetched = self.fetch(plan, slot)
            # The next one is fetched before the loop's body gets this one, and may change it.
            has_next = slot is not slots[-1] and not fetched.request.is_empty
            plan.read.newest = fetched.batch if has_next else None
            return fetched

        def report(batches: Sequence[FetchedBatch]) -> list[BlockAnswer]:
            answers: list[BlockAnswer] = [fetched.request for fetched in batches]
            return [
                answer if answer.key == last_keys[answer.key[0]] else replace(answer, state=None)
                for answer in answers
                if answer.key != NO_KEY
            ]

        return Fetcher(fetch, report, partial(self.learn, plan))

    def fetch(self, plan: StepPlan, slot: MicrobatchSlot) -> FetchedBatch:
        assert isinstance(plan, BlockPlan)
        if slot.is_copy:
            return FetchedBatch(BlockAnswer(), self._copy_for(plan))
        fetched = self._requests.fetch(self.batches, plan.keys[slot.k])
        answer: BlockAnswer = fetched.request
        plan.read.answers[answer.key] = answer
        if answer.is_empty and self.is_endless:
            raise self._no_samples(plan.deal.opening(answer.key[0]), answer)
        return FetchedBatch(answer, self._copy_for(plan)) if answer.is_empty else fetched

    def _no_samples(self, opening: Opening, answer: BlockAnswer) -> CheckpointError:
        """Make the error for a shard of an endless stream that makes no more samples."""
        source, reader = opening.source, self.streams.sources[opening.source]
        shard = reader.shard_at(opening.pass_id, opening.first_place, opening.num_shards)
        name = self.streams.name_of(source, shard)
        if answer.state is None or not answer.state.rows:
            return CheckpointError(
                f"shard {name} has no rows, and with endless=True it would be read forever. Remove "
                "the shard."
            )
        transform = type(reader.transform).__name__
        return CheckpointError(
            f"shard {name} was read completely, but {transform} made no sample from it; with "
            "endless=True it would be read forever. Remove the shard, merge it with another one, "
            f"or make {transform} return samples for its rows."
        )

    def fetch_again(self, plan: StepPlan, slot: MicrobatchSlot) -> FetchedBatch:
        assert isinstance(plan, BlockPlan)
        if slot.is_copy or not plan.size(slot.k):
            return FetchedBatch(BlockAnswer(), self._copy_for(plan))
        lane, _, block = plan.keys[slot.k]
        return self.reader.read_once(plan.deal.opening(lane), block)

    def _copy_for(self, plan: BlockPlan) -> Any:
        """Return the batch of another microbatch, for one without a sample; None on a single rank,
        which skips such a microbatch.

        Raises:
            CheckpointError: no lane has a row.
        """
        assert self.ranks is not None
        if self.ranks.size == 1:
            return None
        read = plan.read
        if read.batch_for_copies is None:
            read.batch_for_copies = _copy_of(read.newest)
        if read.batch_for_copies is not None:
            return copy.deepcopy(read.batch_for_copies)
        deal, rows = plan.deal, 0
        for lane in dict.fromkeys([*plan.lanes, *range(len(deal.states))]):
            opening = deal.opening(lane)
            with kept():  # also for a step that is fetched ahead, while the loop is outside a pass
                fetched = self.reader.read_once(opening, opening.state.blocks)
            if not fetched.request.is_empty:
                read.batch_for_copies = _copy_of(fetched.batch)
                return fetched.batch
            rows += fetched.request.state.rows
        raise self._no_rows(rows, count(sum(deal.sizes), "shard"))

    def _no_rows(self, rows: int, shards: str) -> CheckpointError:
        """Make the error for shards in which no sample was found."""
        if rows:
            transform = type(self.streams.sources[0].transform).__name__
            return CheckpointError(
                f"epoch {self.epoch}: {transform} made no samples from {count(rows, 'row')}, so "
                "there is nothing to train on. Return a list of samples from feed(row) or end(), "
                "and provide more rows per lane for Buckets with drop_last=True."
            )
        return CheckpointError(
            f"epoch {self.epoch}: none of the {shards} has a row, so there is nothing to train on. "
            "If read() returns a part for each rank or worker (webdataset's split_by_node), remove "
            "that: the loader divides the shards."
        )

    def learn(self, plan: BlockPlan, answers: Sequence[BlockAnswer]) -> None:
        """Record the ranks' blocks; after the last of them the step is known."""
        read = plan.read
        for answer in answers:
            read.answers[answer.key] = answer
            read.changes.extend((answer.key[0], *change) for change in answer.changes)
        if read.after is not None or len(read.answers) < plan.num_microbatches:
            return
        ends = [read.answers[key] for key in plan.last_keys.values()]
        after = plan.deal.after(
            {end.key[0]: (end.state, end.blocks_left) for end in ends if end.state is not None}
        )
        totals = after.totals if after.has_ended != plan.deal.has_ended else ()
        for source, total in enumerate(totals):
            if after.has_ended[source] and not total.blocks:
                name = self.streams.names[source]
                shards = count(after.sizes[source], "shard") + (f" of {name}" if name else "")
                raise self._no_rows(total.rows, shards)
        read.next_plan = None if after.is_over else self._make_plan(after, plan.number + 1)
        read.after = after

    # -- counting ---------------------------------------------------------------------------------

    def advance(self, step: StepPlan, seen: Sequence[Any]) -> None:
        assert isinstance(step, BlockPlan)
        read = step.read
        assert read.after is not None  # all its microbatches have run
        if read.after.is_over:
            check_units(read.after)
        self.deal, self._next = read.after, read.next_plan
        planned = [block_id(key) for key in step.keys if read.answers[key].num_samples]
        self.accounts[-1].add(torch.tensor(planned, dtype=torch.int64, device="cpu"), seen)
        self._note_changes(step)
        self.step += 1
        self.samples += step.samples
        self.consumed += step.samples
        self._leave_finished_epoch()

    def _note_changes(self, plan: BlockPlan) -> None:
        """Add the changes of a step to the log, the report of a run, and the epoch's receipt."""
        for lane, shard, start, stop in plan.read.changes:
            if len(self.changed) == CHANGES_NOTED:
                return
            name = self.streams.name_of(plan.deal.source_of(lane), shard)
            self.changed.append(f"shard {name}, rows {start} to {stop - 1}")
            text = (
                f"shard {name}: rows {start} to {stop - 1} differ from those read earlier in this "
                "run, so rows may be lost or repeated. Restore the original shard; if read() uses "
                "its own random generator, seed it."
            )
            self.notes.append(text)
            log.warning(text)

    def _leave_finished_epoch(self) -> None:
        if not self.deal.is_over:
            return
        text = describe(self.streams, self.deal, self.changed)
        self.verdicts[self.epoch] = EpochVerdict(self.epoch, self.consumed, text)
        self.changed = []
        self.epoch += 1
        self.consumed = 0
        self.accounts.append(EpochAccount(self.epoch))
        self._deal_epoch()

    def _verdict(self, account: EpochAccount) -> EpochVerdict:
        return self.verdicts[account.epoch]

    # -- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return about 400 bytes, and 100 for each lane, of JSON values, the same on every rank."""
        sources = zip(self.streams.names, self.streams.sources, self.deal.sizes, strict=True)
        return super().state_dict() | {
            "n": sum(self.deal.sizes),
            "deal": self.deal.to_json(),
            "digests": {name: source.digests(size) for name, source, size in sources},
            "mix": self.streams.mix and {**self.streams.mix},
            "changed": [*self.changed],
        }

    def check_state_dict(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[dict[str, int], Receipt, str | None]:
        with reading_record("data position"):
            self._check_settings(state_dict)
            saved = {name: int(state_dict[name]) for name in COUNTS}
            receipt = Receipt.from_json(state_dict["receipt"])
            deal = Deal.from_json(state_dict["deal"], self.constants, saved["epoch"])
            if len(state_dict["receipts"]) > KEPT_RECEIPTS:
                raise ValueError(f"{len(state_dict['receipts'])} receipts")
            notes = self._compare_shards(deal, state_dict["digests"], bool(receipt.count))
            if state_dict["mix"] != self.streams.mix:
                notes.append(
                    f"from step {saved['step']} on the mix is {self.streams.mix}; before, it was "
                    f"{state_dict['mix']}"
                )
        if self.exact is not None:
            self.exact.check_saved(state_dict.get("exact") or {})
        return saved, receipt, "; ".join(notes)

    def _compare_shards(
        self, deal: Deal, digests: Mapping[str, Sequence[str]], is_under_way: bool
    ) -> list[str]:
        """Return notes on appended shards; raise an error for other differences."""
        notes: list[str] = []
        for source, num_shards in enumerate(deal.sizes):
            stream, name = self.streams.sources[source], self.streams.names[source]
            of_source = f" of {name!r}" if self.streams.mix else ""
            present = len(stream)
            if isinstance(stream, MapStyleStream) and (
                num_shards != present or digests[name] != stream.digests(num_shards)
            ):
                raise CheckpointError(
                    f"ElasticLoader: the dataset of the saved run did not have length "
                    f"{stream.num_rows}, as that of this loader. {WAYS['n']}"
                )
            if num_shards > present:
                raise CheckpointError(
                    f"ElasticLoader: the saved run has {count(num_shards, 'shard')}{of_source}, "
                    f"but {present} were passed. Pass all of them in the same order; new shards "
                    "may be appended."
                )
            own_digests = stream.digests(num_shards)
            for number, (before, now) in enumerate(zip(digests[name], own_digests, strict=True)):
                if before != now:
                    start, stop = (n * num_shards // len(own_digests) for n in (number, number + 1))
                    names = ", ".join(stream.name(n) for n in range(start, min(stop, start + 3)))
                    raise CheckpointError(
                        f"ElasticLoader: shards {start} to {stop - 1}{of_source} differ from those "
                        f"of the saved run: {names}{', ...' if stop > start + 3 else ''} were "
                        "passed. Pass the saved run's shards in the same order; new shards may be "
                        "appended."
                    )
            if num_shards == present:
                continue
            if self.constants.endless:
                raise CheckpointError(
                    f"ElasticLoader: the saved run has {count(num_shards, 'shard')}{of_source}, "
                    f"but {present} were passed. With endless=True no shards can be added, because "
                    "no new epoch starts. Pass the saved run's shards."
                )
            if is_under_way:
                notes.append(
                    f"{count(present - num_shards, 'shard')} more{of_source} than the "
                    f"{num_shards} of the saved run: used from epoch {deal.epoch + 1} on"
                )
        return notes

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        saved, _, _ = self.check_state_dict(state_dict)
        self.epoch = saved["epoch"]
        self.deal = Deal.from_json(state_dict["deal"], self.constants, self.epoch)
        self.changed = [str(text) for text in state_dict["changed"]]
        super().load_state_dict(state_dict)
        self.notes += self.streams.notes
        if not (self.accounts[-1].planned.count or self.constants.endless):
            self._deal_epoch()  # shards may have been appended
        self._open()


def _copy_of(batch: Any) -> Any:
    """Return a copy of a batch; None if it cannot be copied, so that it must be read again.

    Generators and tensors with a graph cannot be.
    """
    try:
        return copy.deepcopy(batch)
    except Exception:
        return None
