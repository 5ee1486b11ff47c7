"""One of the sessions of tests that the Makefile runs side by side.

`python tests/session.py NAME ARGUMENT...` runs pytest with these arguments and prints its lines,
each after the session's name. Once pytest has ended, so do the processes of its group: a test that
passes its deadline ends pytest at once, and a DataLoader worker that hangs would keep the output
open for as long as make waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from typing import IO, Any, NoReturn

SECONDS_FOR_LAST_LINES = 10


def main(name: str, arguments: list[str]) -> int:
    """Run the session and return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", *arguments]
    pytest = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )

    def end(signum: int, frame: Any) -> NoReturn:
        os.killpg(pytest.pid, signum)
        sys.exit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end)
    printing = threading.Thread(target=_print_lines, args=(name, pytest.stdout), daemon=True)
    printing.start()
    code = pytest.wait()
    with contextlib.suppress(ProcessLookupError):  # nothing was left
        os.killpg(pytest.pid, signal.SIGKILL)
    printing.join(SECONDS_FOR_LAST_LINES)
    return code if code >= 0 else 128 - code


def _print_lines(name: str, output: IO[bytes]) -> None:
    for line in output:
        sys.stdout.buffer.write(f"{name:9} | ".encode() + line)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
