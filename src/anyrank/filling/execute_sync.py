"""A sync, from the two ends to the report: agree, allocate, move, compare, and put in place."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from anyrank.errors import AnyrankError, LoadError
from anyrank.filling.flows import Flow
from anyrank.filling.merge import Adapters
from anyrank.filling.move import WHAT, LocalEnds, Mover
from anyrank.filling.planning import Agreement, SyncCall
from anyrank.filling.report import SyncReport
from anyrank.filling.verify import check_before, check_equal
from anyrank.model.buffers import rebuilt_values
from anyrank.model.fits import SourceMemory, check_memory, unwritable
from anyrank.model.match import ModelMatch
from anyrank.model.memory_meter import Meter
from anyrank.model.replace import Replacement
from anyrank.model.share import ModelShare
from anyrank.model.verify import compare_replicas
from anyrank.tensors.box import row_major
from anyrank.tensors.sharded_tensor import lazy_view
from anyrank.world.ranks import Ranks

OVERWRITTEN = "tensors of dst that were real are partly overwritten: sync again before use"


def execute_sync(call: SyncCall, agreed: Agreement, ranks: Ranks, meter: Meter) -> SyncReport:
    """Give `dst` the values of `src`. All ranks, with the plan that they agreed on.

    Raises:
        AnyrankError: of any rank, on all ranks.
    """
    report = _Sync(agreed, ranks, meter, call.options.verify, call.atomic).run()
    if isinstance(call.dst, dict):  # its tensors on meta may be new objects
        call.dst.update(agreed.dst.module.__dict__["_parameters"])
    return report


@dataclass
class _Sync:
    """One sync on one rank, as planned."""

    agreed: Agreement
    ranks: Ranks
    meter: Meter
    verify: bool
    atomic: bool

    def run(self) -> SyncReport:
        """Carry it out. All ranks.

        Raises:
            AnyrankError: of any rank, on all ranks.
        """
        agreed, plan = self.agreed, self.agreed.plan
        match: ModelMatch = plan.match.of(agreed.dst.tensors)
        share = ModelShare(agreed.dst.module, match, agreed.seed, self.meter)

        factors, gathered = self._factors()

        def prepare() -> tuple[LocalEnds, Mover]:
            real = share.real()
            for index in real:  # a kept plan knows no memory
                if problem := unwritable(match.tensors[index]):
                    raise LoadError(problem)
            # Merged values may not go into the memory of src: its adapters would count twice.
            by_element = not self.atomic or plan.added
            check_memory(match.tensors, match.stored, real, self._sources if by_element else {})
            share.allocate(match.stored if self.atomic else ())
            filled = (*match.stored, *match.compared)
            targets = {index: share.local(index) for index in filled}
            places = LocalEnds(self._memory, targets, Adapters(factors, plan.added))
            return places, self._mover(plan.flows, places)

        places, mover = self.ranks.own("allocating memory", prepare)
        check_before(plan.flows, places, self.ranks)
        verified = self._move(mover, places, share)
        rebuilt: dict[str, str] = {}
        replacements: list[Replacement] = []
        if plan.rebuild:
            rebuilt, replacements = rebuilt_values(
                agreed.dst.tensors, self.ranks, share.initialiser, share.device, agreed.src.tensors
            )

        def commit() -> tuple[tuple[int, ...], float, dict[str, str], list[str]]:
            renewed = share.commit(replacements)
            share.move_buffers()
            sent, received = mover.sent + gathered[0], mover.received + gathered[1]
            moved = (sent, received, mover.copied, *self.meter.peaks())
            return moved, self.meter.seconds(), share.rules, renewed

        with _word_of_dst(OVERWRITTEN):
            answers = self.ranks.together("putting the weights in place", commit)
        sent, received, copied, host, device = zip(*(each for each, *_ in answers), strict=True)
        return replace(
            plan.facts,
            initialised={n: rule for _, _, rules, _ in answers for n, rule in rules.items()},
            rebuilt=rebuilt,
            renewed=sorted({name for *_, names in answers for name in names}),
            bytes_sent=list(sent),
            bytes_received=list(received),
            bytes_copied=list(copied),
            peak_host_bytes=list(host),
            peak_device_bytes=list(device),
            is_planned=agreed.is_planned,
            verified=verified,
            seconds=max(seconds for _, seconds, *_ in answers),
        )

    def _move(self, mover: Mover, places: LocalEnds, share: ModelShare) -> str:
        """Move the bytes, and compare both ends; what was compared, in words. All ranks."""
        replicas = 0
        if self.verify:
            sent = [t for t in self.agreed.src.tensors if t.kind == "parameter"]
            replicas = compare_replicas(sent, self.ranks)
        with _word_of_dst("dst keeps its values" if self.atomic else OVERWRITTEN):
            self.ranks.together(WHAT, lambda: (mover.run(), share.initialise()))
            if not self.verify:
                return ""
            moved = [flow for flow in self.agreed.plan.flows if not flow.is_compared]
            check_equal(moved, places, self.ranks)
        return f"{len(moved)} tensors at both ends, {replicas} among the ranks of src"

    def _factors(self) -> tuple[dict[int, torch.Tensor], tuple[int, int]]:
        """The factors of adapters that this rank needs, whole, and bytes sent and received for
        them. All ranks.
        """
        plan = self.agreed.plan
        if not plan.factors:
            return {}, (0, 0)

        def allocate() -> Mover:
            sources = self._memory
            factors = {
                flow.index: torch.empty(
                    flow.strips[0].box.sizes, dtype=flow.held, device=sources[flow.index].device
                )
                for flow in plan.factors
                if any(transfer.receiver == self.ranks.rank for transfer in flow.transfers)
            }
            return self._mover(plan.factors, LocalEnds(sources, factors))

        mover = self.ranks.own("allocating memory", allocate)
        self.ranks.together("gathering the adapters", mover.run)
        return dict(mover.places.targets), (mover.sent, mover.received)

    def _mover(self, flows: Sequence[Flow], places: LocalEnds) -> Mover:
        return Mover(flows, self.agreed.plan.receivers, places, self.ranks, self.meter.sample)

    @property
    def _memory(self) -> dict[int, torch.Tensor]:
        """This rank's memory of `src`, by number of the source tensor."""
        return {number: source.memory for number, source in self._sources.items()}

    @cached_property
    def _sources(self) -> dict[int, SourceMemory]:
        """This rank's tensors of `src` by number; a plan counts the elements of each row-major.

        One that is merged on the way is in no tensor as it is, and so has no strides.

        Raises:
            LoadError: one whose bytes are not its values.
        """
        tensors, plan = self.agreed.src.tensors, self.agreed.plan
        sources: dict[int, SourceMemory] = {}
        for number, index in plan.locals.items():
            held = tensors[index]
            memory = held.local()
            if problem := lazy_view(held, memory):
                raise LoadError(problem)
            strides = () if number in plan.added else row_major(held.shape)
            sources[number] = SourceMemory(held, memory, strides)
        return sources


@contextmanager
def _word_of_dst(left: str) -> Generator[None]:
    """Errors say what dst is after them."""
    try:
        yield
    except AnyrankError as error:
        raise type(error)(f"{error}\n  {left}", causes=error.causes) from error
