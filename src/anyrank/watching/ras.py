"""NCCL's knowledge of a rank on another machine that does not answer, from its RAS.

A thread of NCCL in each process answers on a local port without the GIL, and knows the processes of
all machines: NCCL 2.24 and newer, as JSON from 2.28 on.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from anyrank.watching.looks import Look

ADDRESS = "localhost:28028"  # NCCL's own default for NCCL_RAS_ADDR
REQUESTS = ("client protocol 2", "set format json", "timeout 3")  # one line answers each
ANSWER_SEC = 5.0  # NCCL gives up on other processes after the three seconds above


def look_by_nccl(rank: int, size: int) -> Look:
    """A rank as NCCL sees its process: "lost" if NCCL does not know either.

    Args:
        rank: global rank.
        size: number of ranks of the job.
    """
    for group in _ask().get("communicators", []):
        if group["size"] != size:  # a group of some ranks only, which numbers them differently
            continue
        launches = {entry["rank"]: _launches(entry) for entry in group["ranks"]}
        for entry in (*group["ranks"], *group.get("missing_ranks", [])):
            if entry["rank"] == rank:
                state, what = "lost", "does not answer NCCL either"
                if rank in launches:
                    most = max(launches.values())
                    state, what = "gil", f"lives, and has launched {launches[rank]} collectives"
                    what += f"; others up to {most}"
                elif entry.get("considered_dead"):
                    state, what = "killed", "is dead"
                process = f"process {entry['pid']} on {entry['host']}"
                return Look(rank, state, detail=f"NCCL says: {process} {what}")
    return Look(rank, "lost")


def _launches(entry: dict[str, Any]) -> int:
    """The number of collectives that a rank of a communicator has launched."""
    return sum(entry.get("collective_counts", {}).values())


def _ask() -> dict[str, Any]:
    """NCCL's answer; empty if nobody answers, or not in JSON."""
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
