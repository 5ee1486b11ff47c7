"""Host memory of a process as the kernel counts it. Linux only.

Anonymous pages only: pages of mapped files belong to the page cache.
"""

from __future__ import annotations


def pss_anon(pid: int | None = None) -> int:
    """Bytes of anonymous memory of a process, a page shared by n processes counted as 1/n.

    Exact, and slow on large processes: the kernel walks every page.

    Args:
        pid: the process; this one when None. Raises OSError when it is gone or not ours.
    """
    path = f"/proc/{pid or 'self'}/smaps_rollup"
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(b"Pss_Anon:"):
                return int(line.split()[1]) * 1024  # of kB
    raise OSError(f"{path} has no field Pss_Anon")
