"""Host memory of a process, as the kernel counts it. Linux only.

Counts only anonymous pages, because pages of mapped files belong to the page cache.
"""

from __future__ import annotations


def pss_anon(pid: int | None = None) -> int:
    """Return the bytes of anonymous memory of a process; a page of n processes counts as 1/n.

    The value is exact, but slow for large processes, because the kernel walks every page.

    Args:
        pid: the process; None for this one.

    Raises:
        OSError: the process does not exist, or belongs to another user.
    """
    path = f"/proc/{pid or 'self'}/smaps_rollup"
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(b"Pss_Anon:"):
                return int(line.split()[1]) * 1024  # the unit is kB
    raise OSError(f"{path} has no field Pss_Anon")
