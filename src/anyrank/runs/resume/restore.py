"""One resume: match every part of a state with its source, fill the parts, then the generators."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from torch import nn

from anyrank import faults
from anyrank.errors import CheckpointError, CorruptCheckpoint, LoadError
from anyrank.files.listing import Listing, TensorFill
from anyrank.files.reader import Reader
from anyrank.loading.read import read_own
from anyrank.models.allocation import buffer_for, default_device
from anyrank.models.first_values.buffers import rebuilt_values
from anyrank.models.first_values.initialize import Initializer
from anyrank.models.replace import replace
from anyrank.models.tensors import find_tensors
from anyrank.runs.resume.options import ResumeArguments
from anyrank.runs.resume.search import unreadable_error
from anyrank.runs.resume.settings.applying import apply_settings
from anyrank.runs.resume.settings.comparison import SettingsDiff, compare, find_problems, notes_on
from anyrank.runs.resume.source import ResumeSource, misfit_text
from anyrank.runs.saving.collect import rank_coords
from anyrank.runs.state.part_types import PartMatch
from anyrank.runs.state.resume_report import Outcome, ResumeReport
from anyrank.runs.state.train_state import TrainState
from anyrank.training.data.receipts import epochs_in_words
from anyrank.training.random_state.saved import GeneratorOutcome, derive_all, restore
from anyrank.training.steps.loader import ElasticLoader
from anyrank.wording import count
from anyrank.world.device import read_threads
from anyrank.world.ranks import Ranks

log = logging.getLogger("anyrank.resume")

RANDOM = "random"  # names the random generators, in reports and in skip=


def restore_state(
    state: TrainState, source: ResumeSource, arguments: ResumeArguments, ranks: Ranks
) -> ResumeReport:
    """Restore a state from its source. Collective.

    Raises:
        CheckpointError: the source does not match, and nothing has changed; or reading failed
            midway.
        CorruptCheckpoint: the source is corrupt.
    """
    restorer = _Restorer(state, source, arguments, ranks)
    restorer.match()
    restorer.fill()
    return restorer.report()


class _Restorer:
    """Matches a state with its source, and fills it. `match`, `fill`, `report` are collective."""

    def __init__(
        self, state: TrainState, source: ResumeSource, arguments: ResumeArguments, ranks: Ranks
    ) -> None:
        self.state, self.inner = state, state.parts
        self.source, self.arguments, self.ranks = source, arguments, ranks
        self.matched: dict[str, PartMatch] = {}
        self.filled: dict[str, PartMatch] = {}  # the matches of parts that the source has
        self.settings_diff: SettingsDiff | None = None
        self.rate_notes: list[str] = []
        self.located: list[tuple[Listing, list[TensorFill]]] = []
        self.has_meta_buffers = False
        self.outcomes: dict[str, GeneratorOutcome] = {}
        self.bytes_read = 0
        self.start = time.perf_counter()

    def match(self) -> None:
        """Compare everything with the source; change nothing.

        Raises:
            CheckpointError: the source does not match; the error lists all problems.
        """

        def match_parts() -> bool:
            self.matched = self.source.match(self.state, self.arguments, self.ranks)
            problems = self._unknown_names()
            problems += [problem for part in self.matched.values() for problem in part.problems]
            problems = problems or self._compare_settings()
            if problems:
                raise CheckpointError(misfit_text(self.source.path, self.inner.unusable, problems))
            return any(part.has_meta_buffers for part in self.matched.values())

        what = "matching the checkpoint"
        _, self.has_meta_buffers = self.ranks.run_and_reduce(
            what, lambda: (None, match_parts()), operator.or_
        )
        self._locate()

    def _locate(self) -> None:
        """Find the bytes that this rank reads, in the source and in additional sources of parts."""
        fills = [fill for part in self.matched.values() for fill in part.fills]
        of_source = [fill for fill in fills if fill.listing is self.source.listing]
        others = {id(fill.listing): fill.listing for fill in fills}
        others.pop(id(self.source.listing), None)
        self.located = [self.source.locate(of_source, self.ranks)]
        for listing in others.values():
            self.located.append((listing, [fill for fill in fills if fill.listing is listing]))

    def _compare_settings(self) -> list[str]:
        """Compare the script's settings with those of the saved run; return problems."""
        script = self.inner.settings
        # A part that the source lacks starts as the script made it, like one in skip=.
        self.filled = {k: part for k, part in self.matched.items() if part.outcome != "fresh"}
        used = self.arguments.settings
        self.settings_diff = compare(script, self.source.settings, self.filled, used)
        return find_problems(script, self.settings_diff)

    def _unknown_names(self) -> list[str]:
        """Return the problem of names in skip= that are not parts, if there are any.

        Names that an earlier resume of the run has skipped are allowed, because a restarted job
        calls resume with the same arguments.
        """
        skipped = {name for entry in self.source.lineage for name in entry.get("skipped", ())}
        known = {*self.source.names, *self.inner.parts, *skipped, RANDOM}
        text = ", ".join(repr(name) for name in self.arguments.skip if name not in known)
        names = ", ".join(sorted(known))
        if not text:
            return []
        return [f"skip= contains {text}, which the state does not have. Its parts are: {names}"]

    def fill(self) -> None:
        """Read, and put everything in place. After a failure the state must be resumed again.

        Raises:
            CheckpointError: reading failed, and the state is marked as only partly restored.
            CorruptCheckpoint: the same, because bytes differ from those that were saved.
        """
        self.inner.unusable = _half_restored_text("it was interrupted")  # until it is whole again
        try:
            self._read()
            self.ranks.run("restoring the state", self._commit)
            if self.has_meta_buffers:
                self._rebuild()
            self.outcomes = self._restore_streams()
        except Exception as error:
            self.inner.unusable = _half_restored_text(
                (str(error) or type(error).__name__).splitlines()[0]
            )
            text = f"{error}\n  the state is only partly restored: resume again before you use it"
            kind = CorruptCheckpoint if isinstance(error, CorruptCheckpoint) else CheckpointError
            raise kind(text, causes=getattr(error, "causes", None)) from error
        self.inner.unusable = None

    def _read(self) -> None:
        """Call the `load` of the parts that have one, then read the tensors of the others."""
        for part in self.matched.values():
            if part.load is not None:
                self.bytes_read += part.load()
        buffer = buffer_for(fill.local.device for _, fills in self.located for fill in fills)
        for listing, own_fills in self.located:
            files = {chunk.file for fill in own_fills for chunk in fill.stored.chunks}
            with Reader(
                listing,
                buffer_bytes=buffer,
                threads=read_threads(self.ranks.ranks_on_node),
                verify=self.source.verify,
            ) as reader:
                self._read_from(reader, own_fills, files)

    def _read_from(self, reader: Reader, fills: Sequence[TensorFill], files: set[int]) -> None:
        """Fill this rank's memory from one listing; each rank reads the tensors that it holds."""

        def read() -> None:
            faults.point("resume.read")
            try:
                read_own(fills, reader, self.ranks)
            except LoadError as error:
                raise unreadable_error(self.source.path, error) from error

        self.ranks.run("opening the checkpoint", lambda: reader.open(files))
        self.ranks.run("reading the checkpoint", read)
        self.bytes_read += reader.bytes_read

    def _commit(self) -> None:
        faults.point("resume.commit")
        state, source = self.state, self.source
        state.step, state.samples, state.run = source.step, source.samples, source.run
        entry: dict[str, Any] = {"step": source.step, "ranks": source.saved_on.ranks}
        entry |= {"skipped": [*self.arguments.skip]} if self.arguments.skip else {}
        state.lineage = [*source.lineage, entry]
        for part in self.matched.values():
            part.commit()
        self._continue_counts()
        assert self.settings_diff is not None  # match has made it
        self.rate_notes = apply_settings(self.inner.settings, self.settings_diff, self.filled)

    def _continue_counts(self) -> None:
        """Let loaders that are skipped continue to count from the run's steps and samples."""
        source, loaders = self.source, self.inner.loaders()
        counts = {**source.loader_counts}
        if loaders == [self.state.data]:  # the run's own, if the source has none of another tool
            counts.setdefault("data", (source.step, source.samples))
        for name in self.arguments.skip:
            part = self.inner.parts.get(name)
            if isinstance(part, ElasticLoader) and name in counts:
                part.position.continue_counts(*counts[name])
        counted = sum(loader.samples for loader in loaders)
        self.inner.samples_before = max(0, source.samples - counted)

    def _rebuild(self) -> None:
        for part in self.inner.parts.values():
            if isinstance(part, nn.Module):
                targets = find_tensors(part, with_packed=True)
                initializer, device = Initializer(part, self.inner.seed), default_device(targets)
                replace(rebuilt_values(targets, self.ranks, initializer, device)[1])

    def _restore_streams(self) -> dict[str, GeneratorOutcome]:
        """Restore the random generators; last, so that nothing draws from them afterwards."""
        if RANDOM in self.arguments.skip:  # they continue as the script seeded them
            return {}
        source, seed, samples = self.source, self.inner.seed, self.state.samples
        coords, generators = rank_coords(self.state, self.ranks), self.inner.generators
        saved = source.generators
        undrawn: Collection[str]
        if saved is None:
            undrawn = outcomes = derive_all(
                coords,
                seed=seed,
                samples=samples,
                generators=generators,
                reason=source.no_generators,
            )
        else:
            undrawn = saved.unused
            restore_saved = partial(
                restore, saved, coords, seed=seed, samples=samples, generators=generators
            )
            _, outcomes = self.ranks.run_and_reduce(  # the first rank's outcomes count
                "restoring the random generators",
                lambda: (None, restore_saved()),
                lambda first, _: first,
            )
        # Generators that were never drawn from count as new: seeding them here is not a draw.
        digests = self.inner.digests_of_generators()
        self.inner.generators_before |= {name: digests[name] for name in undrawn if name in digests}
        return outcomes

    def _notes(self) -> list[str]:
        notes = [
            f"random generator {name}: {outcome.how}, {outcome.reason}"
            for name, outcome in self.outcomes.items()
            if outcome.how not in ("exact", "unused")
            and outcome.reason != self.source.no_generators
        ]
        notes += [note for part in self.matched.values() for note in part.notes]
        notes += self._warnings()
        notes += _note_differences(self.source.differed)
        for loader in self.state.parts.loaders():
            notes += epochs_in_words(loader.receipts)
            notes += loader.notes
        return notes

    def _warnings(self) -> list[str]:
        """Collect the notes that users must know."""
        warnings = [text for part in self.matched.values() for text in part.warnings]
        assert self.settings_diff is not None
        of_settings = notes_on(self.settings_diff)
        return [*self.source.warnings(), *warnings, *self.rate_notes, *of_settings]

    def _generator_outcome(self) -> Outcome:
        """Return one outcome for all random generators."""
        before, ranks = self.source.saved_on.ranks, self.ranks.size
        for kind in ("derived", "skipped"):
            names = [name for name, generator in self.outcomes.items() if generator.how == kind]
            if not names:
                continue
            if kind == "derived" and self.source.generators is not None and before != ranks:
                reason = "random numbers drawn outside the loop are reseeded, because the rank "
                reason += f"count changed from {before} to {ranks}"
                if isinstance(self.state.data, ElasticLoader):
                    reason += "; data order, augmentation and dropout are not affected"
                return Outcome(kind, reason)
            return Outcome(kind, f"{', '.join(names)}: {self.outcomes[names[0]].reason}")
        return Outcome("exact")

    def report(self) -> ResumeReport:
        """Make the report of the resume. Collective."""
        source = self.source
        seconds = time.perf_counter() - self.start
        # The report has these two numbers for each rank, and must be the same on every rank.
        measured = self.ranks.gather("measuring the resume", (self.bytes_read, seconds))
        components = {name: part.outcome for name, part in self.matched.items()}
        components[RANDOM] = self._generator_outcome()
        for name in self.arguments.skip:
            components[name] = Outcome("skipped", "requested with skip=")
        report = ResumeReport(
            step=source.step,
            epoch=source.epoch,
            samples=source.samples,
            path=source.path,
            saved_on=source.saved_on,
            ranks=self.ranks.size,
            lost_steps=source.lost_steps,
            lost_samples=source.lost_samples,
            set_aside=source.set_aside,
            components=components,
            notes=[*source.notes(), *self._notes()],
            verified=source.verified,
            bytes_read=[rank_row[0] for rank_row in measured],
            seconds=max(rank_row[1] for rank_row in measured),
        )
        if self.ranks.index == 0:
            _log_report(report, [*self._warnings(), *_note_differences(source.differed)])
        return report


def _half_restored_text(reason: str) -> str:
    """Return the reason why a state is unusable after its resume failed."""
    return f"the state is only partly restored, because a resume failed midway ({reason})"


def _note_differences(names: Sequence[str]) -> list[str]:
    """Return a note on tensors that differed between the ranks that saved them, if any."""
    if not names:
        return []
    return [
        f"{count(len(names), 'tensor')} differed between the ranks that saved the checkpoint; the "
        f"first rank's values are kept: {', '.join(names[:10])}"
    ]


def _log_report(report: ResumeReport, warned: Sequence[str]) -> None:
    """Log a resume; warn about parts that were not restored exactly, and of some of its notes."""
    log.info("%s", report)
    if report.set_aside:
        log.warning(
            "lost %s and %s: %s renamed to %s",
            count(report.lost_steps, "step"),
            count(report.lost_samples, "sample"),
            "the newest checkpoint is corrupt and was"
            if len(report.set_aside) == 1
            else "the newest checkpoints are corrupt and were",
            ", ".join(report.set_aside),
        )
    for name, outcome in report.components.items():
        if outcome not in ("exact", "resharded"):
            log.warning("%s is %s: %s", name, outcome, outcome.reason)
    for note in warned:
        log.warning("%s", note)
