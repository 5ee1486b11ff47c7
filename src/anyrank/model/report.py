"""What the reports of loads and syncs share: both say how a model was filled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from anyrank.wording import joined

MIB = 1 << 20
SHOWN = 5


def mib_by_rank(values: list[int]) -> str:
    """Bytes of each rank, in words."""
    shown = " ".join(f"{value / MIB:.1f}" for value in values[:16])
    more = f" ... (max {max(values) / MIB:.1f})" if len(values) > 16 else ""
    return f"{shown}{more} MiB by rank"


def _group_line(title: str, items: list[str]) -> str:
    """One line of a report: how many, and the first few."""
    return f"  {title:<12} {len(items)}: {joined(items, SHOWN, '; ')}"


@dataclass(frozen=True)
class FillReport:
    """How a model was filled; `LoadReport` and `SyncReport` describe each field."""

    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    initialised: dict[str, str] = field(default_factory=dict[str, str])
    rebuilt: dict[str, str] = field(default_factory=dict[str, str])
    kept: list[str] = field(default_factory=list[str])
    tied: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    duplicates: dict[str, str] = field(default_factory=dict[str, str])
    cast: dict[str, str] = field(default_factory=dict[str, str])
    renewed: list[str] = field(default_factory=list[str])
    verified: str = ""
    tensors: int = 0
    bytes_sent: list[int] = field(default_factory=list[int])
    peak_host_bytes: list[int] = field(default_factory=list[int])
    peak_device_bytes: list[int] = field(default_factory=list[int])
    seconds: float = 0.0

    def to_json(self) -> str:
        """All fields, as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def _lines(self, others: Mapping[str, list[str]]) -> list[str]:
        """What happened to tensors, a line for each title that has any; and what was verified."""
        groups = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "initialised": [f"{name} by {rule}" for name, rule in self.initialised.items()],
            "rebuilt": [f"{name} by {rule}" for name, rule in self.rebuilt.items()],
            "kept": self.kept,
            "tied": [f"{name} = {', '.join(also)}" for name, also in self.tied.items()],
            "cast": [f"{name} {cast}" for name, cast in self.cast.items()],
            "new objects": self.renewed,
            **others,
        }
        lines = [_group_line(title, items) for title, items in groups.items() if items]
        return [*lines, f"  verified     {self.verified}"] if self.verified else lines
