"""Two machines of one: network namespaces with a link that can be cut, a host name and a disk of
their own each. Needs root and iproute2 on Linux; everything else is shared, as NFS would be.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOBS = Path(__file__).with_name("jobs.py")
RELAY = Path(__file__).with_name("relay.py")
ROOT = Path(__file__).parents[2]
PORT = 29500  # in the namespaces, where nobody else listens
START = """
hostname machine$0
mount -t tmpfs none "$LOCAL_DISK"
exec "$@"
"""


def reason_not_to() -> str:
    """Why there can be no simulated machines here; "" where there can."""
    if sys.platform != "linux":
        return "simulated machines need Linux"
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"simulated machines need the command {tool}"
    name = f"anyrank-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"simulated machines need network namespaces: {made.stderr.strip()}"
    ip("netns", "del", name)
    return ""


def ip(*arguments: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


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
        self.running: dict[int, subprocess.Popen[bytes]] = {}
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
                process.send_signal(signal.SIGKILL)
                process.wait()

    def start(self, job: str, *arguments: str, on: int | None = None, **environ: str) -> None:
        """Start a function of `jobs.py` on all ranks, or in one process on one machine alone."""
        size = 2 * self.ranks_each if on is None else 1
        for place in range(size) if on is None else [on * self.ranks_each]:
            machine = place // self.ranks_each
            env = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *sys.path]),
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
            inside = ["ip", "netns", "exec", self.names[machine], "unshare", "--uts", "--mount"]
            program = [sys.executable, str(JOBS), job, str(self.result(place)), *arguments]
            self.result(place).unlink(missing_ok=True)
            with self.log(place).open("wb") as log:
                self.running[place] = subprocess.Popen(
                    [*inside, "bash", "-c", START, str(machine), *program],
                    env=env, stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip

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
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} hangs\n{self.logs()}") from None
            assert process.returncode == 0, self.logs()
            del self.running[rank]
        files = [self.result(rank) for rank in range(2 * self.ranks_each)]
        return [json.loads(one.read_text()) if one.exists() else None for one in files]

    def logs(self) -> str:
        """All that was written, for a failure's message."""
        files = sorted(self.folder.glob("log-*.txt"))
        return "\n".join(f"-- {one.name}\n{one.read_text(errors='replace')}" for one in files)
