"""The arguments of `Checkpoints` and of its resume, checked; every rank gives the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anyrank.checks import check_bool, check_int, check_names
from anyrank.errors import CheckpointError
from anyrank.resume.cadence import Cadence, parse_cadence
from anyrank.tensors.names import Rename, renamer
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks

RENAMING = (
    "for a run whose model has other names now, start a new run from its weights: "
    "anyrank.load(model, path, rename=...)"
)


@dataclass(frozen=True)
class ResumeArguments:
    """The arguments of `resume`; see there."""

    which: str | int | os.PathLike[str]
    skip: Sequence[str]
    fresh: Sequence[str]
    rename: Rename

    @property
    def path(self) -> str | None:
        """The path, where one is given."""
        which = self.which
        is_path = isinstance(which, os.PathLike) or (
            isinstance(which, str) and which not in ("auto", "must")
        )
        return os.fspath(which) if is_path else None  # type: ignore[arg-type]

    def check(self) -> None:
        """Check this rank's arguments.

        Raises:
            ValueError, TypeError: names the argument.
        """
        which: Any = self.which
        if isinstance(which, bool) or not isinstance(which, (str, int, os.PathLike)):
            raise TypeError(f"resume takes 'auto', 'must', a step or a path, not {which!r}")
        if which == "" or (isinstance(which, int) and which < 0):
            raise ValueError(f"resume takes 'auto', 'must', a step or a path, not {which!r}")
        check_names("skip", self.skip)
        check_names("fresh", self.fresh)
        if self.rename is not None and self.path is None:
            raise ValueError(f"rename= is for another tool's checkpoint: give its path; {RENAMING}")
        renamer(self.rename)

    def agree(self, ranks: Ranks) -> None:
        """Check the arguments, and compare them over the ranks. All ranks.

        Raises:
            ValueError, TypeError: as `check`; on all ranks.
            CheckpointError: they differ.
        """
        arguments = {
            "which": self.path or self.which,
            "skip": sorted(self.skip) if isinstance(self.skip, (list, tuple)) else self.skip,
            "fresh": sorted(self.fresh) if isinstance(self.fresh, (list, tuple)) else self.fresh,
            "rename": self.rename,
        }
        compare_arguments(ranks, "resume", arguments, CheckpointError, self.check)


@dataclass(frozen=True)
class RunOptions:
    """The options of a run's saves; `Checkpoints` describes them.

    Raises:
        ValueError: an option outside of what is allowed.
        TypeError: an option of another type.
    """

    path: str
    keep: int
    every: int | str | None
    background: bool
    verify: bool
    keep_every: int | Callable[[int], bool] | None
    peers: bool | int | str = False
    replicas_every: int | None = None

    def __post_init__(self) -> None:
        check_int("keep", self.keep, 2)  # the newest may turn out damaged
        check_bool(background=self.background, verify=self.verify)
        if self.keep_every is not None and not callable(self.keep_every):
            check_int("keep_every", self.keep_every, 1)
        if self.replicas_every is not None:
            check_int("replicas_every", self.replicas_every, 0)
        parse_cadence(self.every)
        parse_cadence(_as_every(self.peers), "peers")

    def is_kept_forever(self, step: int) -> bool:
        """Whether a step of this number is never removed. On the first rank."""
        if callable(self.keep_every):
            return self.keep_every(step)
        return self.keep_every is not None and step % self.keep_every == 0

    def compares_replicas(self, step: int) -> bool:
        """Whether the replicas are compared at the end of a step."""
        return bool(self.replicas_every) and step % (self.replicas_every or 1) == 0

    @property
    def cadence(self) -> Cadence:
        """When a save is due."""
        return parse_cadence(self.every)

    @property
    def peers_cadence(self) -> Cadence:
        """When a snapshot in memory is due."""
        return parse_cadence(_as_every(self.peers), "peers")


def _as_every(peers: bool | int | str) -> int | str | None:
    """`peers=` as a cadence: True is each step, False is never."""
    return int(peers) or None if isinstance(peers, bool) else peers
