"""One load on one rank, between the plan and the report: memory, bytes, first values, the swap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from anyrank.errors import AnyrankError, LoadError
from anyrank.files.content_hash import content_hash
from anyrank.files.reader import Reader
from anyrank.frozen.freeze import remember
from anyrank.loading.allocate import allocate, default_device, device_for
from anyrank.loading.buffers import rebuilt_values
from anyrank.loading.dora import is_magnitude, recompute_magnitudes
from anyrank.loading.exchange import Wanted, move
from anyrank.loading.initialise import Initialiser
from anyrank.loading.match_model import Prepared
from anyrank.loading.memory_meter import Meter
from anyrank.loading.model_tensors import Target
from anyrank.loading.progress import Progress, progress_for
from anyrank.loading.replace import Replacement, replace
from anyrank.loading.report import LoadReport
from anyrank.world.device import read_threads
from anyrank.world.ranks import Ranks

Measured = tuple[int, int, int, int, float]  # bytes read, sent; host and device peak; seconds


class LoadExecutor:
    """Carries out a prepared load. Its public methods are called by all ranks, in order."""

    def __init__(
        self,
        model: nn.Module,
        prepared: Prepared,
        ranks: Ranks,
        memory: Mapping[str, Any] | None,
        meter: Meter,
        progress: bool | Callable[[int, int], None] | None,
    ) -> None:
        self.prepared = prepared
        self.ranks = ranks
        self.memory = memory
        self.meter = meter
        self.device = default_device(prepared.targets)
        meter.watch({self.device, *(target.tensor.device for target in prepared.targets)})
        self.progress = progress
        self.fresh: dict[int, torch.Tensor] = {}  # for meta targets, until it is put in place
        self.initialiser = Initialiser(model, prepared.seed)
        self.pinned: dict[int, torch.Tensor] = {}  # to be compared with a frozen part, then dropped
        self.rules: dict[str, str] = {}
        self.rebuilt: dict[str, str] = {}
        self.bytes_read = self.bytes_sent = 0
        self.measured: list[Measured] = []
        self.renewed: list[str] = []

    def fill(self) -> None:
        """Read, receive and initialise. Real tensors are written in place, meta ones get new
        memory.

        Files are opened, and found unchanged, on all ranks before real tensors are written to.
        """
        share = sum(self._wire_bytes(index) for index in self.prepared.stored)
        first = self.ranks.index == 0
        with progress_for(self.progress, first, share) as bar, self._reader(bar) as reader:
            if self.prepared.in_place:
                self.ranks.together("opening the files", lambda: self._open(reader))
            try:
                self.ranks.together("reading the weights", lambda: self._fill_here(reader))
            except AnyrankError as error:
                if not self.prepared.in_place:
                    raise
                text = (
                    f"{error}\n  tensors that were real are partly overwritten: load again "
                    "before use"
                )
                raise type(error)(text, causes=error.causes) from error
            self.bytes_read = reader.bytes_read

    def _open(self, reader: Reader) -> None:
        readers = self.prepared.decision.readers or self.ranks.ranks
        if self.ranks.rank in readers:
            stored = (*self.prepared.stored.values(), *self.prepared.compared.values())
            reader.open({chunk.file for tensor in stored for chunk in tensor.chunks})

    def _fill_here(self, reader: Reader) -> None:
        prepared = self.prepared
        self._open(reader)
        for index in (*prepared.stored, *prepared.initialise):
            target = prepared.targets[index]
            if target.is_meta:
                self.fresh[index] = allocate(target, device_for(target, self.device))
        for index in prepared.compared:
            target = prepared.targets[index]
            self.pinned[index] = allocate(target, device_for(target, self.device))
        self.bytes_sent = move(
            self._wanted(),
            reader,
            self.ranks,
            prepared.decision,
            prepared.coordinates,
            prepared.buffer_bytes,
        )
        for index in prepared.initialise:
            self._initialise(index)
        self.meter.sample()

    def _wire_bytes(self, index: int) -> int:
        target = self.prepared.targets[index]
        return target.local_numel * self.prepared.stored[index].dtype.itemsize

    def _reader(self, bar: Progress) -> Reader:
        def count(nbytes: int) -> None:
            bar.add(nbytes)
            self.meter.sample()

        return Reader(
            self.prepared.listing,
            self.memory,
            buffer_bytes=self.prepared.buffer_bytes,
            threads=read_threads(self.ranks.ranks_on_node),
            check=self.ranks.check,
            progress=count,
        )

    def _wanted(self) -> list[Wanted]:
        prepared = self.prepared
        filled = [(i, stored, self._local(i)) for i, stored in prepared.stored.items()]
        filled += [(i, one, self.pinned[i]) for i, one in prepared.compared.items()]
        return [Wanted(i, prepared.targets[i], stored, local) for i, stored, local in filled]

    def _local(self, index: int) -> torch.Tensor:
        fresh = self.fresh.get(index)
        return self.prepared.targets[index].local() if fresh is None else fresh

    def _initialise(self, index: int) -> None:
        target = self.prepared.targets[index]
        if is_magnitude(target):  # computed from the base weights, once they are in place
            return
        rule = self.initialiser.fill(target, self._local(index))
        if rule is None:
            raise LoadError(
                f"{target.name}: is not in the source, and no rule of the model gives it a first "
                "value (looked for _init_weights, reset_parameters, init_weights)"
            )
        self.rules[target.name] = rule

    def finish(self) -> None:
        """See to non-persistent buffers, then put new memory in place: everything, or nothing."""
        replacements: list[Replacement] = []
        if self.prepared.rebuild:
            self.rebuilt, replacements = rebuilt_values(
                self.prepared.targets, self.ranks, self.initialiser, self.device
            )

        def build() -> None:
            self._compare_pinned()
            for index, local in self.fresh.items():
                replacements.append(Replacement(self.prepared.targets[index], local))

        def commit() -> tuple[Measured, list[str]]:
            renewed = replace(replacements)
            self._tie_again()
            for part in {id(p): p for t in self._filled() if (p := t.frozen) is not None}.values():
                remember(part)
            measured = (*self.meter.peaks(), self.meter.seconds())
            return (self.bytes_read, self.bytes_sent, *measured), renewed

        self.ranks.together("comparing frozen parts", build)
        answers = self.ranks.together("putting the weights in place", commit)
        self.measured = [measured for measured, _ in answers]
        self.renewed = sorted({name for _, renewed in answers for name in renewed})
        self.ranks.together(
            "running the modules' own code", lambda: self.prepared.own_code.run(self._filled())
        )
        self._recompute_magnitudes()
        self._make_adapters_alike()
        self._move_buffers()

    def _recompute_magnitudes(self) -> None:
        """Those of new adapters of DoRA; all ranks have the same ones."""
        targets = self.prepared.targets
        for indices, trained_too in ((self.prepared.initialise, True), (self.prepared.keep, False)):
            mine = [targets[index] for index in indices if is_magnitude(targets[index])]
            if mine:
                self.rules.update(recompute_magnitudes(mine, trained_too))

    def _make_adapters_alike(self) -> None:
        """New adapters that each rank drew for itself take the first rank's values."""
        if not self.prepared.adapters_kept:
            return
        kept = [self.prepared.targets[i] for i in self.prepared.keep]
        adapters = {t.name: t for t in kept if t.adapter and t.layout is None}
        hashes = {name: content_hash(target.local()) for name, target in adapters.items()}
        every = self.ranks.gather(hashes)
        differ = sorted(n for n in every[0] if any(e.get(n) != every[0][n] for e in every))
        if differ:
            first = self.ranks.ranks[0]
            values = self.ranks.from_one(
                "sending adapters", first, lambda: {n: adapters[n].local().cpu() for n in differ}
            )
            for name, value in values.items():
                adapters[name].local().copy_(value)
                self.rules[name] = f"rank {first}, as the ranks had drawn different values"

    def _tie_again(self) -> None:
        targets = self.prepared.targets
        for index, source in self.prepared.retie.items():
            for place in targets[index].places:
                setattr(place.module, place.attribute, targets[source].tensor)
                targets[source].places.append(place)

    def _filled(self) -> list[Target]:
        return [self.prepared.targets[index] for index in self.prepared.stored]

    def _compare_pinned(self) -> None:
        """What a source holds of a frozen part must be what the part is.

        Raises:
            LoadError: it is not; the part is left as it is.
        """
        for index, given in self.pinned.items():
            target = self.prepared.targets[index]
            if content_hash(given) != content_hash(self._local(index)):
                raise LoadError(
                    f"{target.name}: is frozen, and the source holds other values: freeze the part "
                    "with the weights that belong to this source, or remove them from the source"
                )
        self.pinned.clear()

    def _move_buffers(self) -> None:
        """Real CPU buffers of a plain model that came from meta follow its parameters to the
        device.
        """
        moved = any(self.prepared.targets[i].layout is None for i in self.fresh)
        if not moved or self.device.type == "cpu":
            return
        for target in self.prepared.targets:
            if target.kind != "parameter" and target.tensor.device.type == "cpu":
                for place in target.places:
                    setattr(place.module, place.attribute, target.tensor.to(self.device))

    def report(self, verified: str, nonfinite: dict[str, int]) -> LoadReport:
        """The report, from every rank's measurements."""
        prepared, match = self.prepared, self.prepared.match
        read, sent, host, device, seconds = zip(*self.measured, strict=True)
        targets = prepared.targets
        return LoadReport(
            missing=[targets[i].name for i in match.missing],
            unexpected=[*match.unexpected],
            initialised=self.rules,
            rebuilt=self.rebuilt,
            kept=[targets[i].name for i in prepared.keep],
            tied={
                t.name: [place.name for place in t.places[1:]] for t in targets if len(t.places) > 1
            },
            cast={
                targets[i].name: f"{_short(stored.dtype)} -> {_short(targets[i].dtype)}"
                for i, stored in prepared.stored.items()
                if stored.dtype != targets[i].dtype
            },
            renewed=self.renewed,
            own_code=prepared.own_code.ran,
            own_code_not_run=prepared.own_code.not_run,
            frozen=prepared.frozen,
            format=prepared.listing.format,
            strategy=prepared.decision.name,
            reason=prepared.decision.reason,
            nonfinite=nonfinite,
            verified=verified,
            skipped=[
                *prepared.listing.skipped,
                *(f"{key}: of no use" for key in prepared.ignored),
            ],
            doubled=match.doubled,
            tensors=len({*prepared.stored, *prepared.compared}),
            bytes_read=list(read),
            bytes_sent=list(sent),
            peak_host_bytes=list(host),
            peak_device_bytes=list(device),
            seconds=max(seconds),
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
