"""`anyrank.load`: weights from any source into any model, on any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from anyrank.errors import AnyrankError, LoadError
from anyrank.files.formats import Source
from anyrank.files.reader import Job, Reader
from anyrank.loading.allocate import allocate, default_device, device_for, put_in_place
from anyrank.loading.buffers import rebuild
from anyrank.loading.exchange import Exchange, plan_transfers
from anyrank.loading.fit import Options, Prepared
from anyrank.loading.freeze import remember
from anyrank.loading.initialise import Initialiser
from anyrank.loading.measure import Meter
from anyrank.loading.prepare import prepare
from anyrank.loading.progress import Progress, progress_for
from anyrank.loading.report import LoadReport
from anyrank.loading.targets import Target
from anyrank.loading.verify import (
    check_files,
    compare_replicas,
    content_hash,
    count_nonfinite,
)
from anyrank.settings import BUFFER_BYTES, CUDA_BUFFER_BYTES
from anyrank.tensors.names import Rename
from anyrank.tensors.plan import plan_reads
from anyrank.world.device import read_threads
from anyrank.world.ranks import Ranks, open_ranks

log = logging.getLogger("anyrank.load")

Measured = tuple[int, int, int, int, float]  # bytes read, sent; host and device peak; seconds


def load(
    model: nn.Module,
    source: Source | None,
    *,
    missing: Literal["error", "init", "keep"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    cast: Literal["float", "any"] = "float",
    rename: Rename = None,
    strategy: Literal["auto", "own", "stripe", "scatter"] = "auto",
    buffer_bytes: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    progress: bool | Callable[[int, int], None] | None = None,
    verify: bool = False,
) -> LoadReport:
    """Load weights into a model, before or after it was wrapped, sharded, compiled or put on meta.

    Every rank of the group calls it with the same model and source. Each rank ends with its own
    share and reads, where it can, nothing else. Parameter objects stay the same ones. Names,
    shapes and dtypes are compared on all ranks before the first byte of payload moves; a model on
    meta stays as it was when a load fails, also in the middle of reading.

    Args:
        model: plain, DDP, FSDP2 (`fully_shard`), tensor parallel, PEFT, compiled, frozen in part;
            real or on meta, or half of both.
        source: a path or URL (Hugging Face folder, `.safetensors`, `.pt .pth .bin .ckpt`, DCP
            folder, anyrank run), a list of files, or a dict of tensors. None on ranks that have
            none, which then receive their share from those that do.
        missing: for tensors that the source does not hold: "error", "init" for the model's own
            first values (the same on any number of ranks), or "keep" for those it has.
        unexpected: for keys that the model has no place for: "error" or "ignore".
        cast: "float" casts between floating dtypes and widens integers; "any" casts whatever torch
            can.
        rename: from the source's keys to the model's names: a dict of keys or prefixes, a list of
            (regex, replacement), or a callable.
        strategy: "own": each rank reads its own bytes; "stripe": replicas read disjoint parts and
            exchange them; "scatter": one rank reads and sends each its rows; "auto" decides.
        buffer_bytes: staging memory of one rank, in bytes. Default: ANYRANK_BUFFER_BYTES.
        process_group: the ranks that take part. Default: all, or this process alone.
        progress: True, False, or called with (bytes done, bytes in all) on the first rank.
            Default: a bar on the first rank when a terminal is there.
        verify: compare the files with the checksums that came with them before anything is loaded,
            and replicas with one another afterwards; count NaN and infinities.

    Returns:
        The report, equal on all ranks. `missing, unexpected = load(...)` works as well.

    Raises:
        LoadError: the source does not fit, cannot be read, or is corrupt; on all ranks.
        UnsafeFile: a pickle that would run code, or a header that lies; on all ranks.
        RankError: a rank died, or failed in an unforeseen way; on all ranks.
    """
    meter = Meter()
    with open_ranks(process_group) as ranks:
        options = Options(missing, unexpected, cast, rename, strategy)
        prepared = prepare(model, source, ranks, options)
        memory = source if isinstance(source, Mapping) else None
        job = _Load(model, prepared, ranks, memory, meter, buffer_bytes, progress)
        said = ["replicas"] if verify else []
        if verify:
            said += _check_source(prepared, ranks)
        job.fill()
        job.finish()
        nonfinite: dict[str, int] = {}
        if verify:
            loaded = [t for t in prepared.targets if t.kind != "derived"]
            compare_replicas(loaded, ranks)
            nonfinite = count_nonfinite(loaded, ranks)
        report = job.report(", ".join(said), nonfinite)
    _tell(report, ranks)
    return report


def _check_source(prepared: Prepared, ranks: Ranks) -> list[str]:
    readers = prepared.decision.readers or ranks.ranks

    def check() -> list[str]:
        if ranks.rank not in readers:
            return []
        return check_files(prepared.listing, readers.index(ranks.rank), len(readers), ranks.check)

    said = next((words for words in ranks.together("checking the files", check) if words), [])
    return said or ["the source has no checksums, so a flipped bit in it cannot be noticed"]


class _Load:
    """One load on one rank, between the plan and the report."""

    def __init__(
        self,
        model: nn.Module,
        prepared: Prepared,
        ranks: Ranks,
        memory: Mapping[str, Any] | None,
        meter: Meter,
        buffer_bytes: int | None,
        progress: bool | Callable[[int, int], None] | None,
    ) -> None:
        self.prepared = prepared
        self.ranks = ranks
        self.memory = memory
        self.meter = meter
        self.device = default_device(prepared.targets)
        self.buffer_bytes = buffer_bytes or self._default_buffer()
        self.progress = progress
        self.fresh: dict[
            int, torch.Tensor
        ] = {}  # memory for meta targets, until it is put in place
        self.initialiser = Initialiser(model, prepared.seed)
        self.pinned: dict[int, torch.Tensor] = {}  # to be compared with a frozen part, then dropped
        self.rules: dict[str, str] = {}
        self.rebuilt: dict[str, str] = {}
        self.bytes_read = self.bytes_sent = 0
        self.measured: list[Measured] = []

    def _default_buffer(self) -> int:
        devices = {device_for(t, self.device).type for t in self.prepared.targets}
        return (BUFFER_BYTES if devices <= {"cpu", "meta"} else CUDA_BUFFER_BYTES).get()

    def fill(self) -> None:
        """Read, receive and initialise. Real tensors are written in place, meta ones get new
        memory.

        Files are opened, and found unchanged, on all ranks before anything is written.
        """
        share = sum(self._wire_bytes(index) for index in self.prepared.stored)
        first = self.ranks.index == 0
        with progress_for(self.progress, first, share) as bar, self._reader(bar) as reader:
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
            stored = self.prepared.stored.values()
            reader.open({chunk.file for tensor in stored for chunk in tensor.chunks})

    def _fill_here(self, reader: Reader) -> None:
        prepared = self.prepared
        for index in (*prepared.stored, *prepared.initialise):
            target = prepared.targets[index]
            if target.is_meta:
                self.fresh[index] = allocate(target, device_for(target, self.device))
            elif _is_pinned(target):
                self.pinned[index] = allocate(target, device_for(target, self.device))
        if prepared.decision.name == "own":
            self._read_own(reader)
        else:
            self._exchange(reader)
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
            buffer_bytes=self.buffer_bytes,
            threads=read_threads(self.ranks.ranks_on_node),
            check=self.ranks.check,
            progress=count,
        )

    def _local(self, index: int) -> torch.Tensor:
        for apart in (self.fresh, self.pinned):
            if index in apart:
                return apart[index]
        return self.prepared.targets[index].local()

    def _read_own(self, reader: Reader) -> None:
        jobs: list[Job] = []
        for index, stored in self.prepared.stored.items():
            local = self._local(index)
            for read in plan_reads(stored, self.prepared.targets[index].pieces):
                jobs.append(Job(read, local[read.local_slices()]))
        first = self.ranks.index * len(self.prepared.listing.files) // self.ranks.size
        reader.run(jobs, first)

    def _exchange(self, reader: Reader) -> None:
        prepared = self.prepared
        wanted = [(i, prepared.targets[i], stored) for i, stored in prepared.stored.items()]
        window = self.buffer_bytes // 2  # the other half is the reader's and the transport's
        transfers = plan_transfers(wanted, prepared.coordinates, prepared.decision.readers, window)
        exchange = Exchange(self.ranks, reader, self._local)
        exchange.run(transfers, window)
        self.bytes_sent = exchange.bytes_sent

    def _initialise(self, index: int) -> None:
        target = self.prepared.targets[index]
        rule = self.initialiser.fill(target, self._local(index))
        if rule is None:
            raise LoadError(
                f"{target.name}: is not in the source, and no rule of the model gives it a first "
                "value "
                "(looked for _init_weights, reset_parameters, init_weights)"
            )
        self.rules[target.name] = rule

    def finish(self) -> None:
        """Put new memory in place, then see to non-persistent buffers."""

        def commit() -> Measured:
            self._compare_pinned()
            for index, local in self.fresh.items():
                put_in_place(self.prepared.targets[index], local)
            self._tie_again()
            for part in {id(p): p for t in self._filled() if (p := t.frozen) is not None}.values():
                remember(part)
            return self.bytes_read, self.bytes_sent, *self.meter.peaks(), self.meter.seconds()

        self.measured = self.ranks.together("putting the weights in place", commit)
        if self.prepared.rebuild:
            targets = self.prepared.targets
            self.rebuilt = rebuild(targets, self.ranks, self.initialiser, self.device)
        self._make_adapters_alike()
        self._move_buffers()

    def _make_adapters_alike(self) -> None:
        """New adapters that each rank drew for itself take the first rank's values."""
        kept = [self.prepared.targets[i] for i in self.prepared.keep]
        adapters = {t.name: t for t in kept if t.adapter and t.layout is None}
        if not self.prepared.adapters_kept:
            return
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
            if content_hash(given) != content_hash(target.local()):
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
                t.name: [place.names[min(1, len(place.names) - 1)] for place in t.places[1:]]
                for t in targets
                if len(t.places) > 1
            },
            cast={
                targets[i].name: f"{_short(stored.dtype)} -> {_short(targets[i].dtype)}"
                for i, stored in prepared.stored.items()
                if stored.dtype != targets[i].dtype
            },
            frozen=prepared.frozen,
            format=prepared.listing.format,
            strategy=prepared.decision.name,
            reason=prepared.decision.reason,
            nonfinite=nonfinite,
            verified=verified,
            skipped=[*prepared.listing.skipped, *(f"{k}: of no use" for k in prepared.ignored)],
            tensors=len(prepared.stored),
            bytes_read=list(read),
            bytes_sent=list(sent),
            peak_host_bytes=list(host),
            peak_device_bytes=list(device),
            seconds=max(seconds),
        )


def _is_pinned(target: Target) -> bool:
    """Whether a tensor belongs to a frozen part that is whole and real: it is compared, not
    written.
    """
    info: Any = getattr(target.frozen, "anyrank_frozen", None)
    return info is not None and info.tensors is not None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tell(report: LoadReport, ranks: Ranks) -> None:
    """Log on the first rank; what differs from a plain, whole load is a warning (promise 8)."""
    if ranks.index:
        return
    log.info("%s", report)
    for title, items in (
        ("given first values, being absent from the source", list(report.initialised)),
        ("kept as they were, being absent from the source", report.kept),
        ("ignored, having no place in the model", report.unexpected),
        ("not finite", list(report.nonfinite)),
    ):
        if items:
            log.warning("%d tensors %s: %s", len(items), title, ", ".join(items[:10]))
    if "no checksums" in report.verified:
        log.warning("%s", report.verified)
