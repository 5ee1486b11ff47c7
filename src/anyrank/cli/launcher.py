"""torchrun as a child process of a command: it ends with the command, and with the script's code.

Started as `python -m anyrank.cli.launcher PARENT ARGUMENTS`, where PARENT is the command's process
and ARGUMENTS are torchrun's own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
SIGNALLED = 128  # added to the number of the signal that ended a process, as shells do


def main(parent: int, arguments: list[str]) -> int:
    """Run torchrun to its end; the exit code of the script's first rank that failed, or 0."""
    if not end_with(parent):
        return SIGNALLED + signal.SIGTERM
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else SIGNALLED - failure.exitcode
    except SignalException as error:
        return SIGNALLED + error.sigval
    return 0


def end_with(parent: int) -> bool:
    """Have SIGTERM sent to this process, and so to the ranks, when its parent ends. Linux only.

    Returns:
        False where the parent has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
