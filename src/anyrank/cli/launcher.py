"""Run torchrun as a child that ends with its parent and returns the exit code of the script.

Started as `python -m anyrank.cli.launcher PARENT ARGUMENTS`, where PARENT is the command's process
and ARGUMENTS are torchrun's own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys

from anyrank.settings import PEERS_FOLDER

PR_SET_PDEATHSIG = 1
SIGNALLED = 128  # the exit code of a process that signal N ended is 128 + N, as in shells


def main(parent: int, arguments: list[str]) -> int:
    """Run torchrun to its end; return the exit code of the first rank that failed, or 0."""
    if not end_with(parent):
        return SIGNALLED + signal.SIGTERM
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        try:
            torchrun(arguments)
        finally:
            if os.getppid() != parent:  # the parent was killed, so it cannot remove the folder
                shutil.rmtree(os.environ.get(PEERS_FOLDER, ""), ignore_errors=True)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else SIGNALLED - failure.exitcode
    except SignalException as error:
        return SIGNALLED + error.sigval
    return 0


def end_with(parent: int, number: signal.Signals = signal.SIGTERM) -> bool:
    """Send a signal to this process when its parent ends; a launcher forwards it. Linux only.

    Returns:
        False if the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
    return parent == os.getppid()


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # the next attempt waits; unloading torch took 1.8 s on busy cores
