"""The time of a run by its use, summed over the lines of its log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from anyrank.runs.resume.run_log import END, ERROR, SECONDS, START, LogLine
from anyrank.wording import count

MOST_RANKS = 8  # maximum number of rank counts to show


@dataclass(frozen=True)
class RunTime:
    """The time of a run by its use, over all of its processes. Prints as one line.

    Attributes:
        ranks: number of ranks of each start, in order.
        kills: starts without an end, except for the last one: one of their ranks was killed.
        errors: starts that an exception of any rank ended.
        is_open: whether the last start has no end: the process is still running, or was killed.
        steps: completed steps; repeated ones count twice.
        redone_steps: upper bound on the steps repeated after kills: the log has every tenth step.
        steps_sec, saves_sec, restart_sec, waiting_sec: seconds on the first rank. A restart lasts
            from the last line of a process that was killed, otherwise from the new one's first
            call, to the end of the resume.
        share: share of the time that went into steps that count; from 0 to 1.
    """

    ranks: list[int]
    kills: int
    errors: int
    is_open: bool
    steps: int
    redone_steps: int
    steps_sec: float
    saves_sec: float
    restart_sec: float
    waiting_sec: float
    share: float

    def __str__(self) -> str:
        shown = [str(ranks) for ranks in self.ranks[-MOST_RANKS:]]
        ends = [count(self.kills, "kill")] if self.kills or not self.is_open else []
        ends += [count(self.errors, "error")] if self.errors else []
        ends += ["the last process is still running or was killed"] if self.is_open else []
        most = "up to " if self.redone_steps else ""
        rank_counts = "... " * (len(self.ranks) > MOST_RANKS) + " -> ".join(shown)
        return (
            f"{self.share:.0%} of the time trained: steps {self.steps_sec:.1f} s, saves "
            f"{self.saves_sec:.1f} s, restarts {self.restart_sec:.1f} s, waiting "
            f"{self.waiting_sec:.1f} s; {most}{count(self.redone_steps, 'step')} repeated, "
            f"{', '.join(ends)}; ranks {rank_counts}"
        )


def sum_up(lines: Iterable[LogLine]) -> RunTime | None:
    """Sum the time of a run; return None if its log has no line."""
    starts: list[LogLine] = []
    ends: list[LogLine] = []  # the last line of each
    for line in lines:
        if line.event == START or not starts:
            starts.append(line)
            ends.append(line)
        ends[-1] = line
    if not starts:
        return None
    seconds = {key: sum(float(getattr(line, key)) for line in ends) for key in SECONDS}
    steps = sum(max(0, last.step - first.step) for first, last in zip(starts, ends, strict=True))
    redone, total = sum(line.redone_steps for line in starts), sum(seconds.values())
    counting = 1 - min(1.0, redone / max(steps, 1))
    return RunTime(
        ranks=[line.ranks for line in starts],
        kills=sum(line.event not in (END, ERROR) for line in ends[:-1]),
        errors=sum(line.event == ERROR for line in ends),
        is_open=ends[-1].event not in (END, ERROR),
        steps=steps,
        redone_steps=redone,
        share=seconds["steps_sec"] * counting / total if total > 0 else 0.0,
        **cast("Any", seconds),
    )
