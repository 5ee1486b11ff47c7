"""The options of `anyrank.watch` and `anyrank run --watch`. Without torch."""

from __future__ import annotations

import os
import re

TIME = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|sec|min|h)?$")
UNITS = {None: 1.0, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
VERDICT = "anyrank-verdict"  # the file in memory with a watch's last verdict, and its time
EXIT_CODE = 124  # that of `timeout`, for a job that hung


def read_options(after: object, exit: object, report: object) -> tuple[float, str | None]:
    """Read the arguments of `watch`: seconds without a step, and the absolute path of the report.

    Raises:
        TypeError: an argument of another type.
        ValueError: `after` is not a time above 0, `report` is in no folder that exists, or it is
            there and not a file.
    """
    if not isinstance(exit, bool):
        raise TypeError(f"exit= takes True or False, not {exit!r}")
    return _seconds(after), None if report is None else _report_path(report)


def _seconds(after: object) -> float:
    if isinstance(after, bool) or not isinstance(after, (int, float, str)):
        raise TypeError(f"after= takes a time such as '60s', not {after!r}")
    match = TIME.match(str(after).strip())
    seconds = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not seconds:
        raise ValueError(f"after={after!r}: give a time above 0, such as '60s', '10min' or '1h'")
    return seconds


def _report_path(report: object) -> str:
    if not isinstance(report, (str, os.PathLike)):
        raise TypeError(f"report= takes the path of a file, not {report!r}")
    text = os.fspath(report)
    path = os.path.realpath(text)  # absolute, because the script may change its folder
    # The report takes the place of a file, for a link of its target; never of a pipe or a device.
    is_taken = os.path.exists(text) and not os.path.isfile(text)
    if not os.path.isdir(os.path.dirname(path)) or is_taken:
        raise ValueError(f"report={str(report)!r}: give a file in a folder that exists")
    return path
