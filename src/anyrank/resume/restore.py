"""One resume: find the newest whole step, match every part, fill it; random streams are last."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from anyrank import faults
from anyrank.data.position import ElasticData
from anyrank.errors import CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.listing import Fill, Listing
from anyrank.files.reader import Reader
from anyrank.loading.exchange import read_own
from anyrank.model.allocate import buffer_for, default_device
from anyrank.model.buffers import rebuild
from anyrank.model.initialise import Initialiser
from anyrank.model.tensors import find_tensors
from anyrank.random_state.saved_streams import (
    StreamOutcome,
    from_json,
    restore,
)
from anyrank.resume.options import ResumeArguments
from anyrank.resume.records import check_counts
from anyrank.resume.select_step import Selected, StepSearch, unreadable, verified_in_words
from anyrank.saving.run_store import RunFolder
from anyrank.saving.save import rank_coords
from anyrank.state.part_types import Matched, Stored
from anyrank.state.report import Outcome, ResumeReport, SavedOn
from anyrank.state.train_state import TrainState
from anyrank.world.device import read_threads
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")


def resume_newest(
    state: TrainState,
    search: StepSearch,
    ranks: Ranks,
    arguments: ResumeArguments,
    *,
    began: bool = False,
) -> Resuming | None:
    """Restore the newest step that is whole; None where the run has none. All ranks.

    Args:
        state, search, ranks, arguments: of the resume.
        began: whether `skip` was for the beginning of the run: nothing is skipped now, but its
            names have to be right all the same.

    Raises:
        CheckpointError: the step does not match the state, or reading it failed.
    """
    while (selected := search.next()) is not None:
        resuming = Resuming(state, selected, ranks, arguments, began=began)
        try:
            resuming.match()
            resuming.fill()
        except CorruptCheckpoint as error:
            search.reject(selected, error)
        else:
            return resuming
    return None


class Resuming:
    """Matches a state with a step, and fills it. All ranks call its methods, in order."""

    def __init__(
        self,
        state: TrainState,
        found: Selected,
        ranks: Ranks,
        arguments: ResumeArguments,
        *,
        began: bool = False,
    ) -> None:
        self.state, self.inner = state, state.parts
        self.found, self.ranks = found, ranks
        self.named, self.fresh = tuple(arguments.skip), tuple(arguments.fresh)
        self.skip = () if began else self.named
        self.matched: dict[str, Matched] = {}
        self.has_meta_buffers = False
        self.outcomes: dict[str, StreamOutcome] = {}
        self.bytes_read = 0
        self.start = time.perf_counter()
        manifest = found.manifest
        self.same_ranks = manifest.saved_on["ranks"] == ranks.size

    def match(self) -> None:
        """Compare everything with the step. Nothing is changed.

        Raises:
            CheckpointError: all problems, in one list.
        """
        manifest, listing = self.found.manifest, self.found.listing
        records = {k: record for k, record in manifest.parts.items() if k not in self.skip}
        before = {name for resumed in manifest.lineage for name in resumed.get("skipped", ())}
        problems = self._unknown({*manifest.parts, *before})
        gone = [name for name in records if name not in self.inner.parts]
        new = [n for n in self.inner.parts if n not in manifest.parts and n not in self.skip]
        if gone:
            problems.append(f"the checkpoint has {', '.join(gone)}, the state does not")
        if new:
            problems.append(f"the state has {', '.join(new)}, the checkpoint does not")
        if gone or new:
            problems.append("give the same parts, or leave some as they are with skip=[...]")

        def here() -> bool:
            if problems:
                raise CheckpointError(self._mismatch(problems))
            stored = Stored(listing, manifest.saved_on["ranks"], self.same_ranks, self.fresh)
            self.matched = self.inner.match(records, stored, self.ranks.index)
            wrong = [problem for part in self.matched.values() for problem in part.problems]
            if wrong:
                raise CheckpointError(self._mismatch(wrong))
            if isinstance(self.state.data, ElasticData) and "data" in records:
                check_counts(manifest, self.found.name)
            return any(part.has_meta_buffers for part in self.matched.values())

        self.has_meta_buffers = any(self.ranks.together("matching the checkpoint", here))

    def _unknown(self, held: Collection[str]) -> list[str]:
        """The problem of names in skip= that mean nothing here, if there are any.

        Names of parts that only an earlier checkpoint of the run had stay right: the same call
        comes again at every restart.
        """
        unknown = [n for n in self.named if n not in held and n not in self.inner.parts]
        known = ", ".join(sorted({*held, *self.inner.parts}))
        wrong = ", ".join(map(repr, unknown))
        return [f"skip= names {wrong}: no part is called so; there are {known}"] if wrong else []

    def _mismatch(self, problems: Sequence[str]) -> str:
        path = self.found.name
        now = "as it was" if self.inner.unusable is None else "half restored from a damaged step"
        return "\n".join([f"{path} does not fit the state, which is {now}:", *problems])

    def fill(self) -> None:
        """Read, and put everything in place. After a failure the state has to be resumed again.

        Raises:
            CheckpointError: the state is half restored, and says so.
            CorruptCheckpoint: so it is, as bytes are not those that were saved; an older step
                restores it whole.
        """
        self.inner.unusable = _half_restored("it was interrupted")  # until it is whole
        try:
            self._read()
            self.ranks.together("restoring the state", self._commit)
            if self.has_meta_buffers:
                self._rebuild()
            self.outcomes = self._restore_streams()
        except Exception as error:
            self.inner.unusable = _half_restored(
                (str(error) or type(error).__name__).splitlines()[0]
            )
            text = f"{error}\n  the state is half restored: resume again before it is used"
            kind = CorruptCheckpoint if isinstance(error, CorruptCheckpoint) else CheckpointError
            raise kind(text, causes=getattr(error, "causes", None)) from error
        self.inner.unusable = None

    def _read(self) -> None:
        fills = [fill for part in self.matched.values() for fill in part.fills]
        buffer = buffer_for(fill.local.device for fill in fills)
        listings = {id(fill.listing): fill.listing for fill in fills}
        for listing in listings.values() or [self.found.listing]:
            mine = [fill for fill in fills if fill.listing is listing]
            files = {chunk.file for fill in mine for chunk in fill.stored.chunks}
            with self._reader(self.found.bring(listing, files), buffer) as reader:
                self._read_from(reader, mine, files)

    def _read_from(self, reader: Reader, fills: Sequence[Fill], files: set[int]) -> None:
        """Fill this rank's memory from one listing: each rank reads what it holds."""

        def read() -> None:
            faults.point("resume.read")
            try:
                read_own(fills, reader, self.ranks)
            except LoadError as error:
                raise unreadable(self.found.name, error) from error

        self.ranks.together("opening the checkpoint", lambda: reader.open(files))
        self.ranks.together("reading the checkpoint", read)
        self.bytes_read += reader.bytes_read

    def _reader(self, listing: Listing, buffer: int) -> Reader:
        threads = read_threads(self.ranks.ranks_on_node)
        return Reader(
            listing,
            buffer_bytes=buffer,
            threads=threads,
            check=self.ranks.check,
            verify=self.found.verify,
        )

    def _commit(self) -> None:
        faults.point("resume.commit")
        for part in self.matched.values():
            part.commit()
        manifest = self.found.manifest
        self.state.step, self.state.samples = manifest.step, manifest.samples
        self.state.run = manifest.run
        here: dict[str, Any] = {"step": manifest.step, "ranks": manifest.saved_on["ranks"]}
        here |= {"skipped": [*self.skip]} if self.skip else {}
        self.state.lineage = [*manifest.lineage, here]

    def _rebuild(self) -> None:
        for part in self.inner.parts.values():
            if isinstance(part, nn.Module):
                targets = find_tensors(part)
                rebuild(
                    targets,
                    self.ranks,
                    Initialiser(part, self.inner.seed),
                    default_device(targets),
                )

    def _restore_streams(self) -> dict[str, StreamOutcome]:
        """Put the random streams back: the last act, so that nothing moves them afterwards."""
        saved = from_json(self.found.manifest.streams)
        coords, generators = rank_coords(self.state, self.ranks), self.inner.generators

        def here() -> dict[str, StreamOutcome]:
            return restore(
                saved,
                coords,
                seed=self.inner.seed,
                samples=self.state.samples,
                generators=generators,
                torch_version=self.found.manifest.versions.get("torch", ""),
            )

        return self.ranks.together("restoring the random streams", here)[0]

    def _notes(self, streams: Mapping[str, StreamOutcome]) -> list[str]:
        notes = [
            f"random stream {name}: {outcome.how}, {outcome.reason}"
            for name, outcome in streams.items()
            if outcome.how not in ("exact", "unused")
        ]
        notes += [note for part in self.matched.values() for note in part.notes]
        notes += _differed_in_words(self.found.manifest.differed)
        data = self.state.data
        if isinstance(data, ElasticData):
            notes += [
                f"epoch {receipt.epoch}: {receipt.samples} samples {receipt.verdict}"
                for receipt in data.receipts
            ]
            notes += data.notes
        return notes

    def report(self, folder: RunFolder, verify: bool) -> ResumeReport:
        """What was done. All ranks."""
        streams = self.outcomes
        found, manifest = self.found, self.found.manifest
        seconds = time.perf_counter() - self.start
        measured = self.ranks.gather((self.bytes_read, seconds))
        components = {name: part.outcome for name, part in self.matched.items()}
        for name in self.skip:
            components[name] = Outcome("skipped", "asked for with skip=")
        components["streams"] = _stream_outcome(streams)
        return ResumeReport(
            step=manifest.step,
            epoch=manifest.epoch,
            samples=manifest.samples,
            path=folder.shown(found.name),
            saved_on=SavedOn(manifest.saved_on["ranks"], manifest.saved_on["layout"]),
            ranks=self.ranks.size,
            lost_steps=max(0, found.newest_step - manifest.step),
            lost_samples=max(0, found.newest_samples - manifest.samples),
            set_aside=found.set_aside,
            components=components,
            notes=[*found.notes, *self._notes(streams)],
            verified=verified_in_words(verify),
            bytes_read=[rank_row[0] for rank_row in measured],
            seconds=max(rank_row[1] for rank_row in measured),
        )


def _half_restored(why: str) -> str:
    """What is wrong with a state whose resume did not end."""
    return f"the state is half restored, as a resume failed in the middle ({why})"


def _differed_in_words(names: Sequence[str]) -> list[str]:
    """A note on tensors that were not equal on the ranks, if there are any."""
    if not names:
        return []
    return [
        f"{len(names)} tensors differed between the ranks that saved them; the first rank's are "
        f"kept: {', '.join(names[:10])}"
    ]


def _stream_outcome(streams: Mapping[str, StreamOutcome]) -> Outcome:
    for kind in ("derived", "skipped"):
        names = [name for name, stream in streams.items() if stream.how == kind]
        if names:
            return Outcome(kind, f"{', '.join(names)}: {streams[names[0]].reason}")
    return Outcome("exact")


def log_report(report: ResumeReport, differed: Sequence[str]) -> None:
    """Log a resume; what differs from an exact one is a warning."""
    log.info("%s", report)
    if report.set_aside:
        log.warning(
            "%d steps and %d samples are lost: damaged, set aside as %s",
            report.lost_steps,
            report.lost_samples,
            ", ".join(report.set_aside),
        )
    for name, outcome in report.components.items():
        if outcome not in ("exact", "resharded"):
            log.warning("%s is %s: %s", name, outcome, outcome.reason)
    for note in _differed_in_words(differed):
        log.warning("%s", note)
