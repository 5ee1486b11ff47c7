"""What NCCL's RAS knows about a rank on another machine that does not answer.

In each process, a thread of NCCL answers on a local port without the GIL, and knows the processes
on all machines. NCCL 2.24 and newer has it, with JSON output since 2.28.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from anyrank.watching.looks import Look
from anyrank.wording import count

ADDRESS = "localhost:28028"  # NCCL's default for NCCL_RAS_ADDR
REQUESTS = ("client protocol 2", "set format json", "timeout 3")  # NCCL answers each with a line
ANSWER_SEC = 5.0  # NCCL gives up on other processes after the three seconds above


def look_by_nccl(rank: int, size: int) -> Look:
    """Return a look at a rank from what NCCL knows; the state is "lost" if NCCL knows nothing.

    Args:
        rank: global rank.
        size: number of ranks of the job.
    """
    for group in _ask().get("communicators", []):
        if group["size"] != size:  # not all ranks, so its numbers are not global ranks
            continue
        launches = {entry["rank"]: _launches(entry) for entry in group["ranks"]}
        for entry in (*group["ranks"], *group.get("missing_ranks", [])):
            if entry["rank"] == rank:
                state, what = "lost", "does not answer NCCL either"
                if rank in launches:
                    most = max(launches.values())
                    state, what = (
                        "gil",
                        f"is alive, and has launched {count(launches[rank], 'collective')}",
                    )
                    what += f"; other ranks have launched up to {most}"
                elif entry.get("considered_dead"):
                    state, what = "killed", "is dead"
                process = f"process {entry['pid']} on {entry['host']}"
                return Look(rank, state, detail=f"NCCL says: {process} {what}")
    return Look(rank, "lost")


def _launches(entry: dict[str, Any]) -> int:
    """Return the number of collectives that a rank of a communicator has launched."""
    return sum(entry.get("collective_counts", {}).values())


def _ask() -> dict[str, Any]:
    """Return NCCL's answer; empty if NCCL does not answer, or not in JSON."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", ADDRESS).rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SEC) as connection:
            connection.settimeout(ANSWER_SEC)
            with connection.makefile("rw", encoding="utf-8", errors="replace") as lines:
                for request in REQUESTS:
                    print(request, file=lines, flush=True)
                    lines.readline()
                print("verbose status", file=lines, flush=True)
                return dict(json.loads(lines.read()))  # until NCCL closes the connection
    except (OSError, ValueError, TypeError):
        return {}
