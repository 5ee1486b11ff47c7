"""Tests on several ranks: reused rank processes, named faults, process memory. Linux only.

`run_ranks(4, job, ...)` runs a function on four ranks and returns the value of each, in about ten
milliseconds after the ranks are started. Nothing else in anyrank imports this package.
"""

from __future__ import annotations

from anyrank.models.memory_meter import PeakMemory, rss_anon
from anyrank.testing.fault import Fault, InjectedFault
from anyrank.testing.memory import pss_anon
from anyrank.testing.pool import RankPool, close_pool, run_ranks
from anyrank.testing.report import Died, FaultNotReached, RanksFailed

__all__ = [
    "Died",
    "Fault",
    "FaultNotReached",
    "InjectedFault",
    "PeakMemory",
    "RankPool",
    "RanksFailed",
    "close_pool",
    "pss_anon",
    "rss_anon",
    "run_ranks",
]
