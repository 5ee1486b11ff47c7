"""An agreed plan, carried out: allocate, read, exchange, initialise, and put in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from anyrank.errors import AnyrankError, LoadError
from anyrank.files.content_hash import content_hash
from anyrank.files.listing import Fill
from anyrank.files.reader import Reader
from anyrank.filling.exchange import move
from anyrank.filling.plan_load import AgreedPlan
from anyrank.filling.progress import Progress, progress_for
from anyrank.filling.report import LoadReport
from anyrank.model.buffers import rebuilt_values
from anyrank.model.fits import SourceMemory, check_memory
from anyrank.model.memory_meter import Meter
from anyrank.model.own_code import OwnCodeRun
from anyrank.model.replace import Replacement
from anyrank.model.share import ModelShare
from anyrank.model.tensors import ModelTensor
from anyrank.tensors.sharded_tensor import as_sharded
from anyrank.tensors.spec import dtype_name
from anyrank.world.device import read_threads
from anyrank.world.ranks import Ranks


class Measured(NamedTuple):
    """What a load took on one rank."""

    bytes_read: int
    bytes_sent: int
    host_peak_bytes: int
    device_peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class LoadResult:
    """What a load did, beyond what its plan says. Equal on all ranks.

    Attributes:
        rules: tensors that were initialised -> the rule.
        rebuilt: non-persistent buffers -> the rule or rank that filled them.
        renewed: tensors whose objects could not be kept.
        own_code: what became of the modules' own code.
        measured: of every rank.
    """

    rules: dict[str, str]
    rebuilt: dict[str, str]
    renewed: list[str]
    own_code: OwnCodeRun
    measured: list[Measured]

    def report(self, plan: AgreedPlan, verified: str, nonfinite: dict[str, int]) -> LoadReport:
        """The report of the load.

        Args:
            plan: what was carried out.
            verified: what `verify=True` compared, in words.
            nonfinite: tensor -> number of NaN and infinite values.
        """
        match, tensors = plan.match, plan.match.tensors
        read, sent, host, device, seconds = zip(*self.measured, strict=True)
        return LoadReport(
            missing=match.missing,
            unexpected=match.unexpected,
            initialised=self.rules,
            rebuilt=self.rebuilt,
            kept=[n for i in match.keep if (n := tensors[i].name) not in self.rules],
            tied=match.tied,
            cast={
                tensors[i].name: f"{kind} -> {dtype_name(tensors[i].dtype)}"
                for i, stored in match.stored.items()
                if (kind := match.listing.kind_of(stored)) != dtype_name(tensors[i].dtype)
            },
            renewed=self.renewed,
            own_code=self.own_code.ran,
            own_code_not_run=self.own_code.not_run,
            frozen=match.frozen,
            format=match.listing.format,
            strategy=plan.decision.name,
            reason=plan.decision.reason,
            nonfinite=nonfinite,
            verified=verified,
            skipped=[*match.listing.skipped, *(f"{key}: of no use" for key in match.ignored)],
            duplicates=match.stored_twice,
            tensors=len({*match.stored, *match.compared}),
            bytes_read=list(read),
            bytes_sent=list(sent),
            peak_host_bytes=list(host),
            peak_device_bytes=list(device),
            seconds=max(seconds),
        )


def execute_load(
    model: nn.Module,
    plan: AgreedPlan,
    ranks: Ranks,
    meter: Meter,
    progress: bool | Callable[[int, int], None] | None,
) -> LoadResult:
    """Carry out a plan: read, initialise, and put in place. All ranks.

    Until the last file is read, tensors on meta stay as they are; real ones are written in place.

    Raises:
        LoadError: of any rank, on all ranks.
    """
    executor = _Executor(model, plan, ranks, meter)
    executor.read(progress)
    return executor.put_in_place()


class _Executor:
    """One load on one rank: what has been allocated and filled, and is not in place yet."""

    def __init__(self, model: nn.Module, plan: AgreedPlan, ranks: Ranks, meter: Meter) -> None:
        self.model = model
        self.plan = plan
        self.match = plan.match
        self.ranks = ranks
        self.meter = meter
        self.share = ModelShare(model, plan.match, plan.seed, meter)
        self.to_compare: dict[int, torch.Tensor] = {}  # what the source holds of frozen parts
        self.bytes_read = self.bytes_sent = 0

    def _targets(self, indices: Iterable[int]) -> list[ModelTensor]:
        return [self.match.tensors[index] for index in indices]

    # -- read ---------------------------------------------------------------------------------

    def read(self, progress: bool | Callable[[int, int], None] | None) -> None:
        """Fill this rank's share. All ranks.

        On all ranks files are opened, and found unchanged, and memory is there before any tensor is
        written to, or passed on.
        """
        share = sum(self._stored_bytes(index) for index in self.match.stored)
        first = self.ranks.index == 0
        with progress_for(progress, first, share) as bar, self._reader(bar) as reader:
            self.ranks.together("opening the files", lambda: self._prepare(reader))
            try:
                self.ranks.together("reading the weights", lambda: self._fill(reader))
            except AnyrankError as error:
                if not self.plan.in_place:
                    raise
                text = (
                    f"{error}\n  tensors that were real are partly overwritten: load again "
                    "before use"
                )
                raise type(error)(text, causes=error.causes) from error
            self.bytes_read = reader.bytes_read

    def _prepare(self, reader: Reader) -> None:
        readers = self.plan.decision.readers or self.ranks.ranks
        if self.ranks.rank in readers:
            stored = (*self.match.stored.values(), *self.match.compared.values())
            reader.open({chunk.file for tensor in stored for chunk in tensor.chunks})
        sources: dict[int, SourceMemory] = {}
        for number, info in enumerate(self.match.listing.files):
            if info.tensor is not None:
                held = as_sharded(info.path, info.tensor)
                sources[number] = SourceMemory(held, held.local(), info.tensor.stride())
        if sources:
            match = self.match
            check_memory(match.tensors, match.stored, self.share.real(), sources)
        self.share.allocate()
        for index in self.match.compared:
            self.to_compare[index] = self.share.memory_for(index)

    def _fill(self, reader: Reader) -> None:
        self.bytes_sent = move(
            self._wanted(),
            reader,
            self.ranks,
            self.plan.decision,
            self.plan.coordinates,
            self.plan.buffer_bytes,
        )
        # Reads go past torch: a graph that has saved these tensors must not be run backwards.
        filled = (self.match.tensors[index] for index in self.match.stored)
        increment_version([target.tensor for target in filled if not target.is_meta])
        self.share.initialise()
        self._compare_frozen()
        self.meter.sample()

    def _stored_bytes(self, index: int) -> int:
        """Bytes of this rank's share, in the source's dtype."""
        return self.match.tensors[index].local_numel * self.match.stored[index].dtype.itemsize

    def _reader(self, bar: Progress) -> Reader:
        def count(nbytes: int) -> None:
            bar.add(nbytes)
            self.meter.sample()

        return Reader(
            self.match.listing,
            buffer_bytes=self.plan.buffer_bytes,
            threads=read_threads(self.ranks.ranks_on_node),
            check=self.ranks.check,
            progress=count,
        )

    def _wanted(self) -> list[Fill]:
        match = self.match
        filled = [(i, stored, self.share.local(i)) for i, stored in match.stored.items()]
        filled += [(i, stored, self.to_compare[i]) for i, stored in match.compared.items()]
        return [Fill(match.tensors[i], s, local, match.listing, i) for i, s, local in filled]

    # -- put in place -------------------------------------------------------------------------

    def put_in_place(self) -> LoadResult:
        """Give the model what was read: everything, or nothing. All ranks."""
        rebuilt: dict[str, str] = {}
        replacements: list[Replacement] = []
        if self.plan.rebuild:
            rebuilt, replacements = rebuilt_values(
                self.match.tensors, self.ranks, self.share.initialiser, self.share.device
            )

        def commit() -> tuple[OwnCodeRun, tuple[Measured, list[str]]]:
            renewed = self.share.commit(replacements)
            self.share.move_buffers()
            ran = own_code.hand_over(self.share.filled())
            peaks, seconds = self.meter.peaks(), self.meter.seconds()
            return ran, (Measured(self.bytes_read, self.bytes_sent, *peaks, seconds), renewed)

        own_code = self.match.own_code
        if own_code.tensor_keys:
            first = (self.plan.decision.readers or self.ranks.ranks)[0]
            own_code.extras |= self.ranks.from_one(
                "reading extra state", lambda: own_code.read_extras(self.match.listing), first
            )
        self._make_adapters_alike()  # of what is kept, so that nothing follows the last agreement
        ran, answers = self.ranks.own_and_all("putting the weights in place", commit)
        renewed = sorted({name for _, names in answers for name in names})
        measured = [each for each, _ in answers]
        return LoadResult(self.share.rules, rebuilt, renewed, ran, measured)

    def _make_adapters_alike(self) -> None:
        """New adapters that each rank drew for itself take the first rank's values."""
        if not self.match.keeps_adapters:
            return
        kept = self._targets(self.match.keep)
        adapters = {t.name: t for t in kept if t.adapter and t.layout is None}

        def hashes() -> dict[str, str]:
            return {name: content_hash(target.local()) for name, target in adapters.items()}

        every = self.ranks.together("comparing adapters", hashes)
        differ = sorted(n for n in every[0] if any(e.get(n) != every[0][n] for e in every))
        if not differ:
            return
        first = self.ranks.ranks[0]
        values = self.ranks.from_one(
            "sending adapters", lambda: {n: adapters[n].local().cpu() for n in differ}
        )

        def take() -> None:
            for name, value in values.items():
                adapters[name].local().copy_(value)
                self.share.rules[name] = f"rank {first}, as the ranks had drawn different values"

        self.ranks.own("taking the first rank's adapters", take)

    def _compare_frozen(self) -> None:
        """What a source holds of a frozen part must be what the part is.

        Raises:
            LoadError: it is not; the part is left as it is.
        """
        for index, given in self.to_compare.items():
            target = self.match.tensors[index]
            if content_hash(given) != content_hash(self.share.local(index)):
                raise LoadError(
                    f"{target.name}: is frozen, and the source holds other values: freeze the part "
                    "with the weights that belong to this source, or remove them from the source"
                )
        self.to_compare.clear()
