"""Warm starts: the ranks of the next attempt, which have imported torch and wait for their turn.

A torchrun of their own starts them as usual, while the attempt before runs: so their environment,
streams, signals and exit codes are those of any rank. They wait at a FIFO: to open it takes until
`anyrank run` has opened it too. What is imported ahead of the script reads the environment as it is
then, so ranks ask for a warm start only if their script has left alone what torch reads.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence

from anyrank.cli import torchrun
from anyrank.settings import PEERS_FOLDER, WARM_GATE, WARM_REQUEST

LOOK_SEC = 1.0  # how often to look whether a rank has asked for a warm start
RANK_MODULE = "anyrank.cli.warm_rank"


class WarmStart:
    """The next attempt, ahead of its time. A context: at its end what still waits is killed.

    Args:
        ranks: number of processes.
        script, arguments: what they will run.
        environ: theirs, all of it.
    """

    def __init__(
        self, ranks: int, script: str, arguments: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        folder = environ[PEERS_FOLDER]
        self.request = os.path.join(folder, WARM_REQUEST)
        self.gate = os.path.join(folder, f"gate-{uuid.uuid4().hex[:8]}")
        self.line = torchrun.line(ranks, "-m", RANK_MODULE, script, *arguments)
        self.environ = {**environ, WARM_GATE: self.gate}
        self.process: subprocess.Popen[bytes] | None = None
        self.opened: int | None = None

    def wait_for(self, process: subprocess.Popen[bytes]) -> int:
        """The exit code of the attempt before; what waits is started as soon as a rank asks."""
        while self.process is None:
            try:
                return process.wait(LOOK_SEC)
            except subprocess.TimeoutExpired:
                if os.path.exists(self.request):
                    os.mkfifo(self.gate, 0o600)
                    self.process = subprocess.Popen(self.line, env=self.environ)  # noqa: S603 - the user's own script
        return process.wait()

    def begin(self) -> subprocess.Popen[bytes] | None:
        """Open the gate: what waits is the attempt from now on. None if nothing does."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.request)  # the new ranks have to ask again
        if self.process is None or self.process.poll() is not None:
            return None
        self.opened = os.open(self.gate, os.O_RDWR | os.O_CLOEXEC)  # kept for ranks that come late
        return self.process

    def __enter__(self) -> WarmStart:
        return self

    def __exit__(self, *_: object) -> None:
        if self.opened is not None:
            os.close(self.opened)
        elif self.process is not None:
            torchrun.kill_all(self.process)  # torchrun would say much of a SIGTERM
