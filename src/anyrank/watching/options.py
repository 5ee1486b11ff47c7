"""What `anyrank.watch` and `anyrank run --watch` take. Without torch."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass

TIME = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|sec|min|h)?$")
UNITS = {None: 1.0, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
LONGEST_SEC = 1e9
EXIT_CODE = 124  # of `timeout`, and of a job that hung
LAUNCHED = "anyrank.watching.launched"


@dataclass(frozen=True)
class Options:
    """The arguments of `watch`, read.

    Attributes:
        after_sec: time without a step.
        exit: whether the ranks end then.
        report: absolute path of the file, or None.
    """

    after_sec: float
    exit: bool
    report: str | None

    def program(self, *program: str) -> tuple[str, ...]:
        """The program of a rank that runs this program, a script or `-m` and a module, watched."""
        return ("-m", LAUNCHED, json.dumps(asdict(self)), *program)


def read_options(after: object, exit: object, report: object) -> Options:
    """Read the arguments of `watch`.

    Raises:
        TypeError: an argument of another type.
        ValueError: `after` is no time above 0, or the folder of `report` does not exist.
    """
    if not isinstance(exit, bool):
        raise TypeError(f"exit= takes True or False, not {exit!r}")
    path = None if report is None else _report_path(report)
    return Options(_seconds(after), exit, path)


def _seconds(after: object) -> float:
    if isinstance(after, bool) or not isinstance(after, (int, float, str)):
        raise TypeError(f"after= takes a time such as '60s', not {after!r}")
    match = TIME.match(str(after).strip())
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 0 < seconds < LONGEST_SEC:
        raise ValueError(f"after={after!r}: give a time above 0, such as '60s', '10min' or '1h'")
    return seconds


def _report_path(report: object) -> str:
    if not isinstance(report, (str, os.PathLike)):
        raise TypeError(f"report= takes the path of a file, not {report!r}")
    path = os.path.abspath(os.fspath(report))  # the script may change its folder
    if not os.path.isdir(os.path.dirname(path)) or os.path.isdir(path):
        raise ValueError(f"report={str(report)!r}: give a file in a folder that exists")
    return path
