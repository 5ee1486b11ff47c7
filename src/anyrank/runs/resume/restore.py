"""One resume: match every part of a state with its source, fill the parts, then the generators."""

from __future__ import annotations

import operator
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from anyrank.runs.resume.reporting import RANDOM, Restored, log_report, make_report
from anyrank.runs.resume.search import unreadable_error
from anyrank.runs.resume.settings.applying import apply_settings
from anyrank.runs.resume.settings.comparison import SettingsDiff, compare, find_problems
from anyrank.runs.resume.source import ResumeSource, misfit_text
from anyrank.runs.state.part_types import PartMatch
from anyrank.runs.state.resume_report import ResumeReport
from anyrank.runs.state.train_state import TrainState, rank_coords
from anyrank.training.random_state.saved import GeneratorOutcome, derive_all, restore
from anyrank.training.steps.loader import ElasticLoader
from anyrank.world.device import read_threads
from anyrank.world.ranks import Ranks


class _Matched(NamedTuple):
    """A state that matches its source.

    Attributes:
        parts: the match of each part.
        filled: those of the parts that the source has.
        settings_diff: where the script's settings differ from those of the saved run.
        located: the fills of this rank, by the listing from which their bytes are read.
        has_meta_buffers: whether any rank has non-persistent buffers on meta.
    """

    parts: dict[str, PartMatch]
    filled: dict[str, PartMatch]
    settings_diff: SettingsDiff
    located: list[tuple[Listing, list[TensorFill]]]
    has_meta_buffers: bool


def restore_state(
    state: TrainState, source: ResumeSource, arguments: ResumeArguments, ranks: Ranks
) -> ResumeReport:
    """Restore a state from its source. Collective.

    Raises:
        CheckpointError: the source does not match, and nothing has changed; or reading failed
            midway.
        CorruptCheckpoint: the source is corrupt.
    """
    start = time.perf_counter()
    restorer = _Restorer(state, source, arguments, ranks)
    restored = restorer.fill(restorer.match())
    # The report has these two numbers for each rank, and must be the same on every rank.
    own_numbers = restored.bytes_read, time.perf_counter() - start
    measured = ranks.gather("measuring the resume", own_numbers)
    report = make_report(restored, state, source, arguments.skip, measured)
    if ranks.index == 0:
        log_report(report, restored, source)
    return report


class _Restorer:
    """Matches a state with its source, and fills it. `match` and `fill` are collective."""

    def __init__(
        self, state: TrainState, source: ResumeSource, arguments: ResumeArguments, ranks: Ranks
    ) -> None:
        self.state, self.parts = state, state.parts
        self.source, self.arguments, self.ranks = source, arguments, ranks

    def match(self) -> _Matched:
        """Compare everything with the source; change nothing.

        Raises:
            CheckpointError: the source does not match; the error lists all problems.
        """

        def match_parts() -> tuple[tuple[dict[str, PartMatch], SettingsDiff], bool]:
            parts = self.source.match(self.state, self.arguments, self.ranks)
            problems = self._unknown_names()
            self._check([*problems, *(text for part in parts.values() for text in part.problems)])
            script, used = self.parts.settings, self.arguments.settings
            script.add_new_groups()  # that the script has added since it made the state
            diff = compare(script, self.source.settings, _filled(parts), used)
            self._check(find_problems(script, diff))
            return (parts, diff), any(part.has_meta_buffers for part in parts.values())

        what = "matching the checkpoint"
        (parts, diff), has_meta_buffers = self.ranks.run_and_reduce(what, match_parts, operator.or_)
        located = self._locate([fill for part in parts.values() for fill in part.fills])
        return _Matched(parts, _filled(parts), diff, located, has_meta_buffers)

    def _check(self, problems: Sequence[str]) -> None:
        """Raise CheckpointError if there are problems; the error lists all of them."""
        if problems:
            raise CheckpointError(misfit_text(self.source.path, self.parts.unusable, problems))

    def _locate(self, fills: Sequence[TensorFill]) -> list[tuple[Listing, list[TensorFill]]]:
        """Find the bytes that this rank reads, in the source and in additional sources of parts."""
        of_source = [fill for fill in fills if fill.listing is self.source.listing]
        others = {id(fill.listing): fill.listing for fill in fills}
        others.pop(id(self.source.listing), None)
        located = [self.source.locate(of_source, self.ranks)]
        for listing in others.values():
            located.append((listing, [fill for fill in fills if fill.listing is listing]))
        return located

    def _unknown_names(self) -> list[str]:
        """Return the problem of names in skip= that are not parts, if there are any.

        Names that an earlier resume of the run has skipped are allowed, because a restarted job
        calls resume with the same arguments.
        """
        skipped = {name for entry in self.source.lineage for name in entry.get("skipped", ())}
        known = {*self.source.names, *self.parts.by_name, *skipped, RANDOM}
        text = ", ".join(repr(name) for name in self.arguments.skip if name not in known)
        names = ", ".join(sorted(known))
        if not text:
            return []
        return [f"skip= contains {text}, which the state does not have. Its parts are: {names}"]

    def fill(self, matched: _Matched) -> Restored:
        """Read, and put everything in place. After a failure the state must be resumed again.

        Raises:
            CheckpointError: reading failed, and the state is marked as only partly restored.
            CorruptCheckpoint: the same, because bytes differ from those that were saved.
        """
        self.parts.unusable = _half_restored_text("it was interrupted")  # until it is whole again
        try:
            bytes_read = self._read(matched)
            rate_notes = self.ranks.run("restoring the state", lambda: self._commit(matched))
            if matched.has_meta_buffers:
                self._rebuild()
            generators = self._restore_streams()
        except Exception as error:
            self.parts.unusable = _half_restored_text(
                (str(error) or type(error).__name__).splitlines()[0]
            )
            text = f"{error}\n  the state is only partly restored: resume again before you use it"
            kind = CorruptCheckpoint if isinstance(error, CorruptCheckpoint) else CheckpointError
            raise kind(text, causes=getattr(error, "causes", None)) from error
        self.parts.unusable = None
        return Restored(matched.parts, matched.settings_diff, rate_notes, generators, bytes_read)

    def _read(self, matched: _Matched) -> int:
        """Call the `load` of the parts that have one, then read the tensors of the others. Return
        the bytes that this rank read.
        """
        bytes_read = 0
        for part in matched.parts.values():
            if part.load is not None:
                bytes_read += part.load()
        buffer = buffer_for(fill.local.device for _, fills in matched.located for fill in fills)
        for listing, own_fills in matched.located:
            files = {chunk.file for fill in own_fills for chunk in fill.stored.chunks}
            with Reader(
                listing,
                buffer_bytes=buffer,
                threads=read_threads(self.ranks.ranks_on_node),
                verify=self.source.verify,
            ) as reader:
                self._read_from(reader, own_fills, files)
                bytes_read += reader.bytes_read
        return bytes_read

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

    def _commit(self, matched: _Matched) -> list[str]:
        """Put everything in place; return notes on the learning rates that were applied."""
        faults.point("resume.commit")
        state, source = self.state, self.source
        state.step, state.samples, state.run = source.step, source.samples, source.run
        entry: dict[str, Any] = {"step": source.step, "ranks": source.saved_on.ranks}
        entry |= {"skipped": [*self.arguments.skip]} if self.arguments.skip else {}
        state.lineage = [*source.lineage, entry]
        for part in matched.parts.values():
            part.commit()
        self._continue_counts()
        return apply_settings(self.parts.settings, matched.settings_diff, matched.filled)

    def _continue_counts(self) -> None:
        """Let loaders that are skipped continue to count from the run's steps and samples."""
        source, loaders = self.source, self.parts.loaders()
        counts = {**source.loader_counts}
        if loaders == [self.state.data]:  # the run's own, if the source has none of another tool
            counts.setdefault("data", (source.step, source.samples))
        for name in self.arguments.skip:
            part = self.parts.by_name.get(name)
            if isinstance(part, ElasticLoader) and name in counts:
                part.position.continue_counts(*counts[name])
        counted = sum(loader.samples for loader in loaders)
        self.parts.samples_before = max(0, source.samples - counted)

    def _rebuild(self) -> None:
        for part in self.parts.by_name.values():
            if isinstance(part, nn.Module):
                targets = find_tensors(part, with_packed=True)
                initializer, device = Initializer(part, self.parts.seed), default_device(targets)
                replace(rebuilt_values(targets, self.ranks, initializer, device)[1])

    def _restore_streams(self) -> dict[str, GeneratorOutcome]:
        """Restore the random generators; last, so that nothing draws from them afterwards."""
        if RANDOM in self.arguments.skip:  # they continue as the script seeded them
            return {}
        source, seed, samples = self.source, self.parts.seed, self.state.samples
        coords, generators = rank_coords(self.state, self.ranks), self.parts.generators
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
        digests = self.parts.digests_of_generators()
        self.parts.generators_before |= {name: digests[name] for name in undrawn if name in digests}
        return outcomes


def _filled(parts: Mapping[str, PartMatch]) -> dict[str, PartMatch]:
    """Return the parts that the source has: one that it lacks starts as the script made it."""
    return {name: part for name, part in parts.items() if part.outcome != "fresh"}


def _half_restored_text(reason: str) -> str:
    """Return the reason why a state is unusable after its resume failed."""
    return f"the state is only partly restored, because a resume failed midway ({reason})"
