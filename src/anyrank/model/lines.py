"""Words that the reports of loads and syncs share."""

from __future__ import annotations

MIB = 1 << 20
SHOWN = 5


def mib_by_rank(values: list[int]) -> str:
    """Bytes of each rank, in words."""
    shown = " ".join(f"{value / MIB:.1f}" for value in values[:16])
    more = f" ... (max {max(values) / MIB:.1f})" if len(values) > 16 else ""
    return f"{shown}{more} MiB by rank"


def group_line(title: str, items: list[str]) -> str:
    """One line of a report: how many, and the first few."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return f"  {title:<12} {len(items)}: {'; '.join(items[:SHOWN])}{more}"
