"""Plot the loss and the rank counts of a run over its steps."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from anyrank.errors import AnyrankError, LoadError
from anyrank.runs.resume.run_log import LOG, START, LogLine, read_log

SIZE = (8.0, 5.0)  # inches


def draw(folder: str, path: str) -> None:
    """Plot the log of a run on a local disk. Needs matplotlib (`pip install 'anyrank[plot]'`).

    Each start of the run is a separate line, so repeated steps appear twice.

    Args:
        folder: folder of the run.
        path: path of the picture; its ending determines the format.

    Raises:
        LoadError: the run has no log.
        AnyrankError: matplotlib is not installed or does not know the format, or the folder of
            `path` does not exist.
    """
    if find_spec("matplotlib") is None:
        raise AnyrankError("a plot needs matplotlib: pip install 'anyrank[plot]'")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    legs: list[list[LogLine]] = []
    for line in read_log(folder):
        if line.event == START or not legs:
            legs.append([])
        legs[-1].append(line)
    if not legs:
        raise LoadError(
            f"{os.path.join(folder, LOG)}: does not exist, or is empty. Pass the folder of a run "
            "on a local disk; `Checkpoints` writes the log from its first resume() or step on"
        )
    figure = Figure(figsize=SIZE, layout="constrained")
    axes: Any = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    upper, lower = axes
    for leg in legs:
        points = [(line.step, line.loss) for line in leg if line.loss is not None]
        losses = zip(*points, strict=True) if points else ([], [])
        upper.plot(*losses, color="tab:blue", marker=".", markersize=3)
        ends = [leg[0].step, leg[-1].step]
        lower.plot(ends, [leg[0].ranks] * 2, color="tab:orange", linewidth=3)
        for plot in axes:
            plot.axvline(leg[0].step, color="0.8", linewidth=1, zorder=0)
    upper.set_ylabel("loss")
    lower.set_ylabel("ranks")
    lower.set_xlabel("step")
    lower.set_ylim(0, max(leg[0].ranks for leg in legs) + 0.5)
    for axis in (lower.xaxis, lower.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise AnyrankError(f"{path}: cannot write the plot: {error}") from error
