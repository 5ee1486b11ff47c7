"""The errors of a call: ranks that failed, died or did not finish."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from anyrank.watching.stacks import INSTALLED, read_faulthandler, unescape

HARNESS = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.join(os.path.dirname(HARNESS), "")
_SHOWN_FRAMES = 9


@dataclass(frozen=True)
class Died:
    """The result of a rank that a fault of the test ended.

    Attributes:
        signal: "SIGKILL" or "SIGSTOP".
        point: the fault point where it ended.
    """

    signal: str
    point: str


class RanksFailed(Exception):
    """Raised if at least one rank raised, died unexpectedly, or did not finish.

    Attributes:
        errors: rank -> its exception, in order of arrival. A RuntimeError with its last line if the
            original cannot be pickled, a ChildProcessError for a death, a TimeoutError for a rank
            that did not finish.
        stacks: rank -> its stack traces, for ranks that were stopped or crashed.
    """

    def __init__(
        self, message: str, errors: dict[int, BaseException], stacks: dict[int, str]
    ) -> None:
        super().__init__(message)
        self.errors = errors
        self.stacks = stacks


class FaultNotReached(AssertionError):
    """Raised if no rank failed, but a fault of the test was never injected.

    Attributes:
        results: the values that the call would have returned, by rank.
    """

    def __init__(self, message: str, results: list[Any]) -> None:
        super().__init__(message)
        self.results = results


def name_exit(code: int) -> str:
    """Return an exit code as text."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def is_whole(dump: str) -> bool:
    """Return whether a faulthandler dump is complete; the main thread is written last."""
    return dump.rstrip().endswith((" in <module>", "\n  ..."))


def _place_of(stack: str) -> list[str]:
    """Return the position of the main thread: its last call, then those of the tested code."""
    frames = [(), *read_faulthandler(stack).values()][-1]
    tested = [f for f in frames[1:] if f.file.startswith(_PACKAGE) or not INSTALLED.search(f.file)]
    return [str(frame) for frame in (*frames[:1], *tested)][:_SHOWN_FRAMES]


def trim_stack(dump: str) -> str:
    """Return a faulthandler dump without the frames of this package."""
    harness = (f'File "{HARNESS}', 'File "<string>"')
    lines = [line for line in unescape(dump).splitlines() if not line.lstrip().startswith(harness)]
    return "\n".join(lines).strip()


def failure(
    job: str,
    world_size: int,
    errors: dict[int, BaseException],
    texts: dict[int, str],
    stacks: dict[int, str],
) -> RanksFailed:
    """Return the exception for a call; each line about a rank has the rank as its prefix.

    The positions of ranks with stacks come last, because often only the end of a long output is
    kept.

    Args:
        job: name of the job.
        world_size: number of ranks.
        errors: as in RanksFailed.
        texts: rank -> its traceback, if any.
        stacks: as in RanksFailed.
    """
    lines = [f"{len(errors)} of {world_size} ranks failed in {job}"]
    for rank, error in errors.items():
        text = texts.get(rank) or f"{type(error).__name__}: {error}"
        if stacks.get(rank):
            text += f"\nIts stacks:\n{stacks[rank]}"
        lines += [f"[rank{rank}] {line}".rstrip() for line in text.splitlines()]
    places = {rank: _place_of(stacks[rank]) for rank in errors if stacks.get(rank)}
    if any(places.values()):
        lines.append("Positions of the main threads, innermost call first:")
        lines += [f"[rank{rank}] {call}" for rank, calls in places.items() for call in calls]
    return RanksFailed("\n".join(lines), errors, stacks)
