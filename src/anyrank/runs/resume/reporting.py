"""The report of a resume, and its log lines."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyrank.runs.resume.settings.comparison import SettingsDiff, notes_on
from anyrank.runs.resume.source import ResumeSource
from anyrank.runs.state.part_types import PartMatch
from anyrank.runs.state.resume_report import Outcome, ResumeReport
from anyrank.runs.state.train_state import TrainState
from anyrank.training.data.receipts import epochs_in_words
from anyrank.training.random_state.saved import GeneratorOutcome
from anyrank.training.steps.loader import ElasticLoader
from anyrank.wording import count

log = logging.getLogger("anyrank.resume")

RANDOM = "random"  # names the random generators, in reports and in skip=


@dataclass(frozen=True)
class Restored:
    """What a resume has restored, on this rank.

    Attributes:
        parts: the matches of the parts.
        settings_diff: where the script's settings differ from those of the saved run.
        rate_notes: notes on learning rates that were applied.
        generators: random generator -> outcome; empty if they were skipped.
        bytes_read: bytes that this rank read.
    """

    parts: Mapping[str, PartMatch]
    settings_diff: SettingsDiff
    rate_notes: Sequence[str]
    generators: Mapping[str, GeneratorOutcome]
    bytes_read: int


def make_report(
    restored: Restored,
    state: TrainState,
    source: ResumeSource,
    skip: Sequence[str],
    measured: Sequence[tuple[int, float]],
) -> ResumeReport:
    """Make the report of a resume.

    Args:
        restored: what was restored.
        state, source: the state, and where it was restored from.
        skip: names of the parts that were left as they are.
        measured: the bytes that each rank read, and its seconds.
    """
    components = {name: part.outcome for name, part in restored.parts.items()}
    components[RANDOM] = _generator_outcome(restored, state, source, len(measured))
    for name in skip:
        components[name] = Outcome("skipped", "requested with skip=")
    return ResumeReport(
        step=source.step,
        epoch=source.epoch,
        samples=source.samples,
        path=source.path,
        saved_on=source.saved_on,
        ranks=len(measured),
        lost_steps=source.lost_steps,
        lost_samples=source.lost_samples,
        set_aside=source.set_aside,
        components=components,
        notes=[*source.notes(), *_notes(restored, state, source)],
        verified=source.verified,
        bytes_read=[bytes_read for bytes_read, _ in measured],
        seconds=max(seconds for _, seconds in measured),
    )


def _generator_outcome(
    restored: Restored, state: TrainState, source: ResumeSource, ranks: int
) -> Outcome:
    """Return one outcome for all random generators."""
    before, outcomes = source.saved_on.ranks, restored.generators
    for kind in ("derived", "skipped"):
        names = [name for name, outcome in outcomes.items() if outcome.how == kind]
        if not names:
            continue
        if kind == "derived" and source.generators is not None and before != ranks:
            reason = "random numbers drawn outside the loop are reseeded, because the rank "
            reason += f"count changed from {before} to {ranks}"
            if isinstance(state.data, ElasticLoader):
                reason += "; data order, augmentation and dropout are not affected"
            return Outcome(kind, reason)
        return Outcome(kind, f"{', '.join(names)}: {outcomes[names[0]].reason}")
    return Outcome("exact")


def _notes(restored: Restored, state: TrainState, source: ResumeSource) -> list[str]:
    notes = [
        f"random generator {name}: {outcome.how}, {outcome.reason}"
        for name, outcome in restored.generators.items()
        if outcome.how not in ("exact", "unused") and outcome.reason != source.no_generators
    ]
    notes += [note for part in restored.parts.values() for note in part.notes]
    notes += _warnings(restored, source)
    notes += _note_differences(source.differed)
    for loader in state.parts.loaders():
        notes += epochs_in_words(loader.receipts)
        notes += loader.notes
    return notes


def _warnings(restored: Restored, source: ResumeSource) -> list[str]:
    """Collect the notes that users must know."""
    warnings = [text for part in restored.parts.values() for text in part.warnings]
    of_settings = notes_on(restored.settings_diff)
    return [*source.warnings(), *warnings, *restored.rate_notes, *of_settings]


def _note_differences(names: Sequence[str]) -> list[str]:
    """Return a note on tensors that differed between the ranks that saved them, if any."""
    if not names:
        return []
    return [
        f"{count(len(names), 'tensor')} differed between the ranks that saved the checkpoint; the "
        f"first rank's values are kept: {', '.join(names[:10])}"
    ]


def log_report(report: ResumeReport, restored: Restored, source: ResumeSource) -> None:
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
    for note in [*_warnings(restored, source), *_note_differences(source.differed)]:
        log.warning("%s", note)
