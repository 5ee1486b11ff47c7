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
    """The result of a rank that was ended by a fault of the test.

    Attributes:
        signal: "SIGKILL" or "SIGSTOP".
        point: the fault point where it ended.
    """

    signal: str
    point: str


class RanksFailed(Exception):
    """At least one rank raised, died unexpectedly, or did not finish.

    Attributes:
        errors: rank -> its exception, in order of arrival. RuntimeError with its last line if the
            original cannot be pickled, ChildProcessError for a death, TimeoutError for a rank that
            was stopped.
        stacks: rank -> its stack traces, for ranks that were stopped or crashed.
    """

    def __init__(
        self, message: str, errors: dict[int, BaseException], stacks: dict[int, str]
    ) -> None:
        super().__init__(message)
        self.errors = errors
        self.stacks = stacks


class FaultNotReached(AssertionError):
    """No rank failed, but a fault of the test was never injected.

    Attributes:
        results: by rank, the values that the call would have returned.
    """

    def __init__(self, message: str, results: list[Any]) -> None:
        super().__init__(message)
        self.results = results


def name_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def is_whole(dump: str) -> bool:
    """Return whether a faulthandler dump includes all of the main thread, which is written last."""
    return dump.rstrip().endswith((" in <module>", "\n  ..."))


def _place_of(stack: str) -> list[str]:
    """The position of a dump's main thread: its last call, then those of the code under test."""
    frames = [(), *read_faulthandler(stack).values()][-1]
    tested = [f for f in frames[1:] if f.file.startswith(_PACKAGE) or not INSTALLED.search(f.file)]
    return [str(frame) for frame in (*frames[:1], *tested)][:_SHOWN_FRAMES]


def trim_stack(dump: str) -> str:
    """A faulthandler dump without this package's own frames."""
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
    """The exception for one call; each line of a rank's text is prefixed with the rank.

    The positions of the ranks with stacks come last, because often only the end of a long output is
    kept.

    Args:
        job: the job's name.
        world_size: the number of ranks.
        errors: as in RanksFailed.
        texts: rank -> the traceback, if any.
        stacks: as in RanksFailed.
    """
    lines = [f"{len(errors)} of {world_size} ranks failed in {job}"]
    for rank, error in errors.items():
        text = texts.get(rank) or f"{type(error).__name__}: {error}"
        if stacks.get(rank):
            text += f"\nIt stood at:\n{stacks[rank]}"
        lines += [f"[rank{rank}] {line}".rstrip() for line in text.splitlines()]
    places = {rank: _place_of(stacks[rank]) for rank in errors if stacks.get(rank)}
    if any(places.values()):
        lines.append("The main threads stood at, innermost call first:")
        lines += [f"[rank{rank}] {call}" for rank, calls in places.items() for call in calls]
    return RanksFailed("\n".join(lines), errors, stacks)
