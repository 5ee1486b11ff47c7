"""A run's `log.jsonl`: one flat JSON object per line, a form that metrics readers accept.

Each process appends its own lines: a first with `"event": "start"`, one for every tenth step, and a
last with `"event": "end"`, or "error" if an exception ended it, even one of another rank. A process
that is killed, or whose other ranks are, writes no last line. Every line has the seconds that this
process has spent so far, so that its last line counts. Lines that do not parse are ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

LOG = "log.jsonl"
START, END, ERROR = "start", "end", "error"
SECONDS = ("steps_sec", "saves_sec", "restart_sec", "waiting_sec")
MAX_LINE = 4096  # characters


@dataclass(frozen=True)
class LogLine:
    """One line.

    Attributes:
        time: seconds since 1970.
        step: completed optimizer steps of the run.
        ranks: ranks of the process group.
        loss: mean over the step's global batch, if the loop computes one.
        event: "start", "end", "error", or "" for a step.
        redone_steps: in a start: upper bound on the steps that will be repeated.
        steps_sec, saves_sec, restart_sec, waiting_sec: seconds of this process so far, on the first
            rank.
    """

    time: float
    step: int
    ranks: int
    loss: float | None = None
    event: str = ""
    redone_steps: int = 0
    steps_sec: float = 0.0
    saves_sec: float = 0.0
    restart_sec: float = 0.0
    waiting_sec: float = 0.0

    def to_json(self) -> str:
        """Return the line as text, without empty fields."""
        kept = {k: v for k, v in vars(self).items() if v not in (None, "") or k in SECONDS}
        return json.dumps(kept)


def read_log(folder: str) -> Iterator[LogLine]:
    """Read the lines of a run on a local disk; none if there is no log."""
    path = os.path.join(folder, LOG)
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        while text := file.readline(MAX_LINE):
            if (line := _line(text)) is not None:
                yield line


def _line(text: str) -> LogLine | None:
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return LogLine(**json.loads(text))
    return None
