"""A rank of `anyrank run --watch`: run an unchanged script, and watch it while it has a group.

Started as `python -m anyrank.watching.launched OPTIONS SCRIPT ARGUMENTS`. OPTIONS are the arguments
of `watch` as JSON; `-m MODULE` may replace the script. This module does not import torch, because
the script may set environment variables first.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import traceback
from typing import Any

from anyrank.errors import AnyrankError

LOOK_SEC = 0.2  # between searches for a process group
END_SEC = 4.0  # for the thread, at the end of the script


def _watch_groups(options: dict[str, Any], ended: threading.Event) -> None:
    """Start a watch whenever the script has initialized a process group, until it ends."""
    while not ended.wait(LOOK_SEC):
        group: Any = sys.modules.get("torch.distributed")
        has_group = getattr(group, "is_initialized", None)
        if has_group is None or not has_group():
            continue
        from anyrank.watching.hang import RUNNING, watch

        if not RUNNING:
            try:
                watch(**options)
            except (AnyrankError, OSError) as error:
                print(f"anyrank: this rank is not watched: {error}", file=sys.stderr, flush=True)
                return


def run_program(program: tuple[str, ...]) -> None:
    """Run a script, or `-m` and a module, with its arguments, as Python does."""
    if program[0] == "-m":
        sys.argv = [*program[1:]]
        sys.path[0] = os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*program]
        path = os.path.abspath(program[0])
        sys.path[0] = os.path.dirname(path)
        runpy.run_path(path, run_name="__main__")


def main(options: str, *program: str) -> None:
    """Run the program, and show an error without the frames of this launcher."""
    ended = threading.Event()
    looking = threading.Thread(
        target=_watch_groups, args=[json.loads(options), ended], daemon=True, name="anyrank-look"
    )
    looking.start()
    try:
        run_program(program)
    except Exception as error:
        trace = error.__traceback__
        for entry in traceback.extract_tb(trace):
            if trace is not None and (entry.filename == __file__ or "runpy" in entry.filename):
                trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
    finally:  # a daemon thread in C++ code would abort the process at its end
        ended.set()
        looking.join(END_SEC)


if __name__ == "__main__":
    main(*sys.argv[1:])
