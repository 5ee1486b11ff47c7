"""The options of `Checkpoints`, checked; every rank gives the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anyrank.resume.cadence import Cadence, cadence
from anyrank.resume.select_step import VERIFY


@dataclass(frozen=True)
class RunOptions:
    """How a run is saved; `Checkpoints` describes each option.

    Raises:
        ValueError: an option outside of what is allowed.
    """

    path: str
    keep: int
    every: int | str | None
    background: bool
    verify: str
    keep_every: int | Callable[[int], bool] | None
    peers: bool | int | str = False

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise ValueError(f"keep={self.keep}: at least 2, as the newest may turn out damaged")
        if isinstance(self.keep_every, int) and self.keep_every < 1:
            raise ValueError(
                f"keep_every={self.keep_every}: give a positive number of steps, or None"
            )
        if self.verify not in VERIFY:
            raise ValueError(f"verify={self.verify!r}: give one of {', '.join(VERIFY)}")
        cadence(self.every)
        cadence(_as_every(self.peers), "peers")

    def keeps(self, step: int) -> bool:
        """Whether a step stays for good. Asked on the first rank."""
        if callable(self.keep_every):
            return self.keep_every(step)
        return self.keep_every is not None and step % self.keep_every == 0

    @property
    def cadence(self) -> Cadence:
        """When a save is due."""
        return cadence(self.every)

    @property
    def peers_cadence(self) -> Cadence:
        """When a snapshot in memory is due."""
        return cadence(_as_every(self.peers), "peers")


def _as_every(peers: bool | int | str) -> int | str | None:
    """True is each step, False is never."""
    return int(peers) or None if isinstance(peers, bool) else peers
