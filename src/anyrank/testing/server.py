"""The fork server: a process that has imported torch, and forks a rank in about ten milliseconds.

The server runs no tensor operation and starts no thread, so that forking is safe. It also watches
the ranks: it reports each death, and kills all ranks when its owner ends for any reason.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Connection, Pipe
from typing import Any

import anyrank

# torch._dynamo: the first fully_shard in a process imports it, which takes longer than most tests.
PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
)
# The server also imports all modules of these packages that the owner, such as a test module, has
# imported, because importing them in each rank would take seconds.
PACKAGES = ("accelerate", "anyrank", "hypothesis", "lightning", "peft", "pytest", "transformers")
START_SECONDS = 120.0
COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from anyrank.testing.server import serve; serve(int(sys.argv[2]), sys.argv[3], sys.argv[4:])"
)
FRAME = struct.Struct("=cii")
FORK, SIGNAL, BORN, DIED = b"F", b"S", b"B", b"D"


def serve(control_fd: int, folder: str, preload: list[str]) -> None:
    """Run the server: import, then fork and signal on request until the owner has ended.

    Args:
        control_fd: the server's end of the socket to its owner.
        folder: folder for the stack dumps of the ranks.
        preload: modules to import. Import errors are ignored here, because ranks raise them.
    """
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in anyrank.__all__:  # else each rank imports those that it uses, in 0.3 s
        getattr(anyrank, name)
    gc.collect()
    gc.freeze()  # ranks need not scan imported objects, which takes 0.2 s each time
    control = socket.socket(fileno=control_fd)
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    children: set[int] = set()
    while True:
        ready = select.select([control, wake_read], [], [])[0]
        if wake_read in ready:
            wake_read.recv(4096)
            _report_deaths(control, children)
        if control in ready and not answer(control, children, folder):
            break
    signal.set_wakeup_fd(-1)
    for pid in children:
        send_signal(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)  # because an owner that was killed could not do it


def answer(control: socket.socket, children: set[int], folder: str) -> bool:
    """Process one request of the owner; return False if the owner has ended."""
    data, fds, _, _ = socket.recv_fds(control, FRAME.size, 1)
    if not data:
        return False
    kind, pid, signum = FRAME.unpack(data)
    if kind == SIGNAL:
        if pid in children:  # not reaped yet, so the id still belongs to the rank
            send_signal(pid, signum)
        return True
    child = os.fork()
    if child == 0:
        _run_child(control, fds[0], folder)
    os.close(fds[0])
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    children.add(child)
    control.sendall(FRAME.pack(BORN, child, 0))
    return True


def _run_child(control: socket.socket, fd: int, folder: str) -> None:
    """Become a rank; never return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        os.setpgid(0, 0)  # its own group, to kill its processes with it
        from anyrank.testing import worker

        worker.work(Connection(fd), os.path.join(folder, str(os.getpid())))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)  # without exit handlers, which belong to the server


def _report_deaths(control: socket.socket, children: set[int]) -> None:
    """Kill the processes that dead ranks started, notify the owner, and reap the ranks.

    The order matters: the owner must be notified before the process of a rank disappears.
    """
    for pid in list(children):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            send_signal(pid, signal.SIGKILL)  # the group exists as long as it has members
            control.sendall(FRAME.pack(DIED, pid, code))
            children.discard(pid)
            os.waitpid(pid, 0)


def send_signal(pid: int, signum: int) -> None:
    """Signal a rank; send SIGKILL also to all processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if signum == signal.SIGKILL:
            os.killpg(pid, signum)
        else:
            os.kill(pid, signum)


class ForkServer:
    """The owner's end of the fork server. Every wait has a deadline.

    Attributes:
        died: process id -> exit code (negative for a signal) of ranks that are known to be dead.
    """

    def __init__(self, folder: str) -> None:
        self.died: dict[int, int] = {}
        self.control, server_end = socket.socketpair()
        imported = [name for name in sys.modules if name.partition(".")[0] in PACKAGES]
        preload = [*PRELOAD, *imported, "anyrank.testing.worker"]
        arguments = [json.dumps([*map(str, sys.path)]), str(server_end.fileno()), folder, *preload]
        environ = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        self.process: subprocess.Popen[Any] = subprocess.Popen(  # noqa: S603 - our own code
            [sys.executable, "-c", COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[server_end.fileno()],
            env=environ,
            start_new_session=True,  # the owner handles Ctrl-C
        )
        server_end.close()

    def fork(self) -> tuple[int, Connection[Any, Any]]:
        """Start a rank; return its process id and the pipe to it."""
        owner_end, rank_end = Pipe()
        with rank_end:
            socket.send_fds(self.control, [FRAME.pack(FORK, 0, 0)], [rank_end.fileno()])
        deadline = time.monotonic() + START_SECONDS
        while (pid := self.read(deadline)) is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the fork server started no rank within {START_SECONDS:.0f} s")
        self.died.pop(pid, None)
        return pid, owner_end

    def signal(self, pid: int, signum: int) -> None:
        """Signal a rank; do nothing if it is dead."""
        self.control.sendall(FRAME.pack(SIGNAL, pid, signum))

    def watch(self, seconds: float = 0.0) -> None:
        """Wait at most `seconds` for a death, and record all reported deaths."""
        deadline = time.monotonic() + seconds
        while select.select([self.control], [], [], max(0.0, deadline - time.monotonic()))[0]:
            self.read(deadline)
            deadline = 0.0

    def read(self, deadline: float) -> int | None:
        """Read a message; return the id of a new rank, or None after a death or the deadline."""
        seconds = max(0.0, deadline - time.monotonic())
        if not select.select([self.control], [], [], seconds)[0]:
            return None
        data = self.control.recv(FRAME.size, socket.MSG_WAITALL)
        if len(data) < FRAME.size:
            raise RuntimeError(f"the fork server ended with code {self.process.wait(5)}")
        kind, pid, code = FRAME.unpack(data)
        if kind == BORN:
            return pid
        self.died[pid] = code
        return None

    def close(self) -> None:
        """End the server and all ranks."""
        self.control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
