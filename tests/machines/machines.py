"""Two machines of one: network namespaces with a link that can be cut, a host name and a disk of
their own each. Needs iproute2 on Linux, and root or namespaces of a user's own. Everything else is
shared, as NFS would be.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

JOBS = Path(__file__).with_name("jobs.py")
RELAY = Path(__file__).with_name("relay.py")
PORT = 29500  # in the namespaces, where nobody else listens
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
# Processes that have imported torch already
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed", "anyrank.loading.load", "anyrank.resume"])


def reason_not_to() -> str:
    """Why there can be no simulated machines here; "" where there can."""
    if sys.platform != "linux":
        return "simulated machines need Linux"
    if shutil.which("ip") is None:
        return "simulated machines need the command ip"
    name = f"anyrank-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"simulated machines need network namespaces: {made.stderr.strip()}"
    ip("netns", "del", name)
    return ""


def namespace_of_this_user() -> list[str]:
    """What a command begins with that runs as root of namespaces of its own; [] where none may."""
    start = ["unshare", "--map-root-user", "--net", "--mount", "sh", "-c"]
    start += ['mount -t tmpfs none /run && exec "$@"', "sh"]
    try:
        made = subprocess.run([*start, "ip", "netns", "add", "a"], capture_output=True, check=False)
    except FileNotFoundError:
        return []
    return [] if made.returncode else start


def ip(*arguments: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def enter(namespace: str, machine: int, disk: str) -> None:
    """Put this process on a machine: its network, its host name and a disk of its own."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    with open(f"/var/run/netns/{namespace}", "rb") as network:
        check(libc.setns(network.fileno(), CLONE_NEWNET))
    check(libc.unshare(CLONE_NEWUTS | CLONE_NEWNS))
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    check(libc.mount(b"none", disk.encode(), b"tmpfs", 0, None))
    socket.sethostname(f"machine{machine}")


def run_job(
    namespace: str, log: Path, environ: dict[str, str], path: list[str], arguments: list[str]
) -> None:
    """The process of a rank: enter its machine, and run `jobs.py` there."""
    written = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.update(environ)
    enter(namespace, int(environ["MACHINE"]), environ["LOCAL_DISK"])
    sys.path[:], sys.argv = path, [str(JOBS), *arguments]
    runpy.run_path(str(JOBS), run_name="__main__")


class Machines:
    """Two machines, one or more ranks each, and what runs on them.

    Args:
        folder: shared by both.
        ranks_each: ranks on each machine.
        delay_sec: of a packet between them.
    """

    def __init__(self, folder: Path, ranks_each: int = 1, delay_sec: float = 0.0) -> None:
        self.folder = folder
        self.ranks_each = ranks_each
        self.names = [f"anyrank-{os.getpid()}-{number}" for number in range(2)]
        self.disk = tempfile.mkdtemp(dir=folder)
        self.delay_sec = delay_sec
        self.running: dict[int, BaseProcess] = {}
        self.relays: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Machines:
        for name in self.names:
            ip("netns", "add", name)
        if self.delay_sec:
            self.plug_in_slowly()
        else:
            self.plug_in()
        for number, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        return self

    def plug_in(self) -> None:
        """A cable between them."""
        cables = [f"ar{os.getpid()}v{number}" for number in range(2)]
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable in zip(self.names, cables, strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "link", "set", cable, "name", "eth0")

    def plug_in_slowly(self) -> None:
        """A cable that is slow, as not every kernel can delay packets itself."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for name, end in zip(self.names, ends, strict=True):
            ip("-n", name, "tuntap", "add", "dev", "eth0", "mode", "tap")
            command = ["ip", "netns", "exec", name, sys.executable, str(RELAY), "eth0"]
            command += [str(self.delay_sec), str(end.fileno())]
            self.relays.append(subprocess.Popen(command, pass_fds=[end.fileno()]))
            end.close()

    def __exit__(self, *error: object) -> None:
        for number in (0, 1):
            self.kill(number)
        for relay in self.relays:
            relay.kill()
            relay.wait()
        for name in self.names:
            ip("netns", "del", name)

    def cut(self) -> None:
        """Unplug the cable between them: packets are lost, and no connection is closed."""
        ip("-n", self.names[0], "link", "set", "eth0", "down")

    def kill(self, machine: int) -> None:
        """Power off one of them."""
        for rank in range(machine * self.ranks_each, (machine + 1) * self.ranks_each):
            process = self.running.pop(rank, None)
            if process is not None:
                process.kill()
                process.join()

    def kill_rank(self, rank: int) -> None:
        """Kill one process."""
        process = self.running.pop(rank)
        process.kill()
        process.join()

    def start(self, job: str, *arguments: str, on: int | None = None, **environ: str) -> None:
        """Start a function of `jobs.py` on all ranks, or in one process on one machine alone."""
        size = 2 * self.ranks_each if on is None else 1
        for place in range(size) if on is None else [on * self.ranks_each]:
            machine = place // self.ranks_each
            env = {
                "LOCAL_DISK": self.disk,
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": str(PORT),
                "RANK": str(place if on is None else 0),
                "WORLD_SIZE": str(size),
                "MACHINE": str(machine),
                **environ,
            }
            self.result(place).unlink(missing_ok=True)
            told = [job, str(self.result(place)), *arguments]
            process = CONTEXT.Process(
                target=run_job,
                args=(self.names[machine], self.log(place), env, list(sys.path), told),
            )
            process.start()
            self.running[place] = process

    def result(self, rank: int) -> Path:
        """Where a rank leaves what its function returned."""
        return self.folder / f"result-{rank}.json"

    def log(self, rank: int) -> Path:
        """What a rank has written."""
        return self.folder / f"log-{rank}.txt"

    def wait_for(self, path: Path, seconds: float = 240.0) -> None:
        """Wait until a file of the shared folder is there."""
        end = time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < end, f"{path} did not come\n{self.logs()}"
            time.sleep(0.02)

    def finish(self, seconds: float = 240.0) -> list[Any]:
        """Wait for the ranks that run; what their functions returned, None for those that ended."""
        end = time.monotonic() + seconds
        for rank, process in list(self.running.items()):
            process.join(max(0.1, end - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} hangs\n{self.logs()}"
            assert process.exitcode == 0, self.logs()
            del self.running[rank]
        files = [self.result(rank) for rank in range(2 * self.ranks_each)]
        return [json.loads(one.read_text()) if one.exists() else None for one in files]

    def logs(self) -> str:
        """All that was written, for a failure's message."""
        files = sorted(self.folder.glob("log-*.txt"))
        return "\n".join(f"-- {one.name}\n{one.read_text(errors='replace')}" for one in files)
