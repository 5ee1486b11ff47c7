"""The options of `anyrank.watch` and `anyrank run --watch`. Does not import torch."""

from __future__ import annotations

import os
import re

TIME = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|sec|min|h)?$")
UNITS = {None: 1.0, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
VERDICT = (
    "anyrank-verdict"  # name of the memory file with the last verdict of a watch, and its time
)
EXIT_CODE = 124  # for a job that hung; the same as that of `timeout`


def read_options(after: object, exit: object, report: object) -> tuple[float, str | None]:
    """Read the arguments of `watch`: seconds without a step, and the absolute path of the report.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `after` is not a positive time, the folder of `report` does not exist, or
            `report` exists and is not a file.
    """
    if not isinstance(exit, bool):
        raise TypeError(f"exit={exit!r}: expected True or False, got {type(exit).__name__}")
    return _seconds(after), None if report is None else _report_path(report)


def _seconds(after: object) -> float:
    if isinstance(after, bool) or not isinstance(after, (int, float, str)):
        raise TypeError(
            f"after={after!r}: expected a time such as '60s', got {type(after).__name__}"
        )
    match = TIME.match(str(after).strip())
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not seconds:
        raise ValueError(f"after={after!r}: must be a positive time such as '60s', '10min' or '1h'")
    return seconds


def _report_path(report: object) -> str:
    if not isinstance(report, (str, os.PathLike)):
        raise TypeError(
            f"report={report!r}: expected the path of a file, got {type(report).__name__}"
        )
    text = os.fspath(report)
    path = os.path.realpath(text)  # absolute, because the script may change its working directory
    # The report replaces a file, or the target of a link; never a pipe or a device.
    is_taken = os.path.exists(text) and not os.path.isfile(text)
    if not os.path.isdir(os.path.dirname(path)) or is_taken:
        raise ValueError(f"report={str(report)!r}: must be a file in a folder that exists")
    return path
