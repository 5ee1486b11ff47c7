"""The machine that a benchmark ran on, and what has to be done to it before a clock counts."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GIB = 1 << 30
PAGE = 4096
MADV_POPULATE_WRITE = 23  # Linux 5.14
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "anyrank")


def describe_machine() -> dict[str, object]:
    """One line of hardware, the versions, the command and the date; part of every result file."""
    return {
        "command": shlex.join(["python", *map(_relative, sys.argv)]),
        "machine": hardware_line(),
        "versions": {"python": platform.python_version(), **versions()},
        "date": time.strftime("%Y-%m-%d"),
    }


def hardware_line() -> str:
    """CPU, cores, memory, huge pages and kernel."""
    text = Path("/proc/cpuinfo").read_text(encoding="ascii")
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    setting = huge.read_text(encoding="ascii").split("[")[-1].split("]")[0] if huge.exists() else ""
    memory = meminfo("MemTotal") / GIB
    return (
        f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}, "
        f"{memory:.0f} GiB memory, huge pages {setting or 'unknown'}, "
        f"{platform.system()} {platform.release()}"
    )


def versions() -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def meminfo(name: str) -> int:
    """A field of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no field {name}")


def load_average() -> float:
    """Processes that want a core, averaged over the last minute: tells when others were busy."""
    return os.getloadavg()[0]


def warm_memory(nbytes: int) -> None:
    """Touch memory and free it, so that no contender pays for the hypervisor giving it.

    A virtual machine may hand free memory back to its host, huge blocks first and within seconds;
    the next use of it is then ten times slower than on a machine of its own.

    Args:
        nbytes: how much; at most 85 % of what is free is taken.
    """
    nbytes = min(nbytes, meminfo("MemFree") * 85 // 100) // PAGE * PAGE
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # no huge pages on this machine
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(MADV_POPULATE_WRITE)


def warm_files(folder: Path) -> int:
    """Read every file of a folder once into the page cache; bytes read."""
    total = 0
    block = bytearray(8 << 20)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                total += count
    return total


def _relative(argument: str) -> str:
    """An argument of the command line, free of this machine's folders."""
    root = f"{Path(__file__).parents[1]}/"
    return argument.removeprefix(root)
