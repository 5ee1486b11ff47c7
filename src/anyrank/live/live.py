"""A live source: each rank sends what it holds, and receives what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from anyrank.errors import LoadError
from anyrank.live.agreement import AgreedSync, SyncCall
from anyrank.live.device_channel import ChannelMover
from anyrank.live.live_flows import in_rounds
from anyrank.live.merge import Adapters, LiveMemory
from anyrank.live.report import SyncReport
from anyrank.live.verify import check_before, check_equal
from anyrank.loading.fill import Moved, Side, fill
from anyrank.loading.sharing.flows import Flow
from anyrank.loading.sharing.messages import MESSAGE_BYTES, WHAT
from anyrank.loading.sharing.move import Mover
from anyrank.loading.sharing.places import LocalMemory
from anyrank.loading.verify import compare_replicas
from anyrank.models.first_values.initialize import Initializer
from anyrank.models.fits import unwritable
from anyrank.models.memory_meter import Meter
from anyrank.models.overlaps import SourceMemory, check_overlaps
from anyrank.models.share import ModelShare
from anyrank.settings import BUFFER_BYTES
from anyrank.tensors.box import row_major
from anyrank.wording import count
from anyrank.world.ranks import Ranks

OVERWRITTEN = (
    "Tensors of dst that were not on the meta device are partly overwritten; sync again before you "
    "use dst"
)


def execute_sync(call: SyncCall, agreed: AgreedSync, ranks: Ranks, meter: Meter) -> SyncReport:
    """Copy the values of `src` into `dst`, with the plan on which the ranks agreed. Collective.

    Raises:
        AnyrankError: an error of any rank, on every rank.
    """
    plan, dst = agreed.plan, agreed.dst
    initializer = Initializer(dst.tree.model, agreed.seed)
    share = ModelShare(plan.match.with_tensors(dst.tensors), meter, initializer)
    side = LiveSide(agreed, ranks, meter, call.options.verify, call.atomic)
    side.gather_factors()
    result = fill(share, side, ranks, rebuild=plan.rebuild)
    if isinstance(call.dst, dict):  # its tensors on meta may be new objects
        call.dst.update(dst.tree.model.__dict__["_parameters"])
    return replace(
        plan.facts,
        **result.fields(),
        bytes_received=[moved.received for moved in result.moved],
        bytes_copied=[moved.copied for moved in result.moved],
        channel=result.moved[0].channel,
        channel_bytes=[moved.buffers for moved in result.moved],
        group_bytes=[moved.group for moved in result.moved],
        is_planned=agreed.is_planned,
        verified=side.verified,
    )


class LiveSide(Side):
    """A live model, of which each rank holds a share.

    Attributes:
        verified: a text that says what `verify=True` compared.
    """

    moving = WHAT
    is_one_model = False  # ranks may have different parts of dst, or none

    def __init__(
        self, agreed: AgreedSync, ranks: Ranks, meter: Meter, verify: bool, atomic: bool
    ) -> None:
        self.agreed, self.plan = agreed, agreed.plan
        self.ranks = ranks
        self.meter = meter
        self.verify = verify
        self.atomic = atomic
        self.verified = ""
        self.factors: dict[int, torch.Tensor] = {}
        self.for_factors: Mover | None = None
        self.places: LocalMemory
        self.mover: ChannelMover

    def gather_factors(self) -> None:
        """Receive the whole factors of the adapters that this rank needs. Collective."""
        if not self.plan.factors:
            return

        def allocate() -> Mover:
            sources = self._memory
            self.factors = {
                flow.index: torch.empty(
                    flow.strips[0].box.sizes,
                    dtype=flow.target_dtype,
                    device=sources[flow.index].device,
                )
                for flow in self.plan.factors
                if any(transfer.receiver == self.ranks.rank for transfer in flow.transfers)
            }
            rounds, window = self._rounds(self.plan.factors)
            places = LocalMemory(sources, self.factors)
            return Mover(rounds, places, self.ranks, window, self.meter.sample)

        self.for_factors = self.ranks.run("allocating memory", allocate)
        self.ranks.run("gathering the adapters", self.for_factors.run)

    def prepare(self, share: ModelShare) -> None:
        """Allocate memory, and check that the memory of `dst` can be filled.

        Raises:
            LoadError: memory of a tensor cannot be filled; the error names the tensor.
        """
        match, plan = share.match, self.plan
        real = share.real()
        memory = self._memory
        where = [(m.data_ptr(), m.stride(), m.device) for m in (*real.values(), *memory.values())]
        for index in real:  # a kept plan has not checked this memory
            if problem := unwritable(match.tensors[index]):
                raise LoadError(problem)
        if where != plan.route.checked:  # memory with the same layout has already been checked
            # Merged values may not go into the memory of src: its adapters would count twice.
            by_element = not self.atomic or plan.added
            check_overlaps(match.tensors, match.stored, real, self._sources() if by_element else {})
        share.allocate(match.stored if self.atomic else ())
        targets = {index: share.local(index) for index, _ in match.wanted}
        plan.route.begin(where, [(m.stride(), m.device) for m in targets.values()])
        self.places = LiveMemory(memory, targets, Adapters(self.factors, plan.added))
        rounds, window = self._rounds(plan.flows)
        self.mover = ChannelMover(
            rounds,
            self.places,
            self.ranks,
            window,
            self.meter.sample,
            plan.route,
            plan.accelerators,
        )

    def compare(self) -> None:
        """Compare frozen parts, tensors that `dst` ties, and with `verify` replicas in `src`.

        Collective.
        """
        check_before(self.plan.flows, self.places, self.ranks)
        if self.verify:
            tensors, plan = self.agreed.src.tensors, self.plan
            own_replicas = (
                (tensors[plan.locals[number]], members)
                for number, members in plan.shared
                if self.ranks.rank in members
            )
            compare_replicas(own_replicas, self.ranks)
            moved = sum(not flow.is_compared for flow in plan.flows)
            replicated = count(len(plan.shared), "replicated tensor")
            self.verified = f"{count(moved, 'tensor')} at both ends, {replicated} in src"

    def move(self) -> None:
        """Send and receive.

        Raises:
            Interrupted: another rank failed.
        """
        self.mover.run()

    def check(self) -> None:
        """Compare both ends if `verify` is set. Collective."""
        if self.verify:
            moved = [flow for flow in self.plan.flows if not flow.is_compared]
            check_equal(moved, self.places, self.ranks)

    def moved(self) -> Moved:
        """Return the bytes moved so far."""
        movers = [mover for mover in (self.mover, self.for_factors) if mover is not None]
        sent, received = (
            sum(mover.sent for mover in movers),
            sum(mover.received for mover in movers),
        )
        return Moved(
            sent=sent,
            received=received,
            copied=self.mover.copied,
            buffers=self.mover.buffer_bytes,
            group=self.mover.group_bytes,
            channel=self.mover.channel,
        )

    def damage_note(self) -> str:
        """Return the sentence that an error adds about the state of `dst`."""
        return "dst keeps its values" if self.atomic else OVERWRITTEN

    def _rounds(self, flows: Sequence[Flow]) -> tuple[list[list[Flow]], int]:
        """Return a mover's rounds and its window's bytes, without flows that are only compared."""
        moved = [flow for flow in flows if not flow.is_compared]
        transfers = (transfer for flow in moved for transfer in flow.transfers)
        is_alone = all(transfer.sender == transfer.receiver for transfer in transfers)
        # Room for a few of the longest messages.
        window = 0 if is_alone else max(4 * MESSAGE_BYTES, BUFFER_BYTES.get())
        return [*in_rounds(moved, self.plan.receivers)], window

    @cached_property
    def _memory(self) -> dict[int, torch.Tensor]:
        """Map source tensors, by number, to this rank's memory of `src`."""
        tensors = self.agreed.src.tensors
        return {number: tensors[index].local() for number, index in self.plan.locals.items()}

    def _sources(self) -> dict[int, SourceMemory]:
        """Map numbers to this rank's tensors of `src`; a plan counts their elements row-major.

        Merged values are not stored in memory, so they have no strides.
        """
        tensors, plan = self.agreed.src.tensors, self.plan
        sources: dict[int, SourceMemory] = {}
        for number, memory in self._memory.items():
            tensor = tensors[plan.locals[number]]
            strides = () if number in plan.added else row_major(tensor.shape)
            sources[number] = SourceMemory(tensor, memory, strides)
        return sources
