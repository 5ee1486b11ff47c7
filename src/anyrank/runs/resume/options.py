"""The arguments of `Checkpoints` and of its resume, with their checks; the same on every rank."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, get_args

from anyrank.checks import check_bool, check_choice, check_int, check_names, check_type
from anyrank.errors import CheckpointError
from anyrank.runs.state.script_settings import Settings
from anyrank.sources.tables.renaming import renamer
from anyrank.tensors.names import Rename
from anyrank.world.arguments import compare_arguments
from anyrank.world.ranks import Ranks

TIME_PATTERN = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|sec|min|h|d)$")
UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
RENAMING = (
    "If parameters of this run were renamed, start a new run from its weights: "
    "anyrank.load(model, path, rename=...)"
)
FOREIGN = ("rename", "parts", "epoch", "scheduler_steps")  # only for another tool's checkpoint


@dataclass(frozen=True)
class ResumeArguments:
    """The arguments of `Checkpoints.resume`, whose docstring describes them."""

    which: str | int | os.PathLike[str]
    skip: Sequence[str]
    fresh: Sequence[str]
    drop: Sequence[str]
    rename: Rename
    parts: Mapping[str, str] | None
    epoch: int | None
    scheduler_steps: int | None = None
    settings: Settings = "saved"

    @property
    def path(self) -> str | None:
        """The path, if one was passed."""
        which = self.which
        is_path = isinstance(which, os.PathLike) or (
            isinstance(which, str) and which not in ("auto", "must")
        )
        return os.fspath(which) if is_path else None  # type: ignore[arg-type]

    def check(self) -> None:
        """Check this rank's arguments.

        Raises:
            ValueError, TypeError: an argument is wrong; the error names it.
        """
        which: Any = self.which
        if isinstance(which, bool) or not isinstance(which, (str, int, os.PathLike)):
            raise TypeError(
                f"which={which!r}: expected 'auto', 'must', a step number or a path, got "
                f"{type(which).__name__}"
            )
        if which == "" or (isinstance(which, int) and which < 0):
            raise ValueError(f"which={which!r}: must be 'auto', 'must', a step number or a path")
        check_names("skip", self.skip)
        check_names("fresh", self.fresh)
        check_names("drop", self.drop)
        check_choice("settings", self.settings, get_args(Settings))
        if self.rename is not None and self.path is None:
            raise ValueError(
                "rename= applies only to another tool's checkpoint, whose path must be passed to "
                f"resume(). {RENAMING}"
            )
        renamer(self.rename)
        if self.parts is not None:
            check_type("parts", self.parts, Mapping, "a dict: part of the state -> its name there")
        for name, least in (("epoch", 0), ("scheduler_steps", 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least)
        named = [name for name in FOREIGN if name != "rename" and getattr(self, name) is not None]
        if named and self.path is None:
            raise ValueError(
                f"{named[0]}= applies only to another tool's checkpoint, whose path must be passed "
                "to resume()."
            )

    def agree(self, ranks: Ranks) -> None:
        """Check the arguments, and compare them over the ranks. Collective.

        Raises:
            ValueError, TypeError: as for `check`, on every rank.
            CheckpointError: the arguments differ.
        """
        arguments: dict[str, Any] = {}

        def check() -> None:
            self.check()
            arguments["which"] = self.path or self.which
            arguments.update(skip=sorted(self.skip), fresh=sorted(self.fresh))
            arguments.update(drop=sorted(self.drop))
            arguments.update(rename=self.rename, settings=self.settings, epoch=self.epoch)
            arguments.update(scheduler_steps=self.scheduler_steps)
            arguments.update(parts=sorted((self.parts or {}).items()))

        compare_arguments(ranks, "resume", arguments, CheckpointError, check)


@dataclass(frozen=True)
class Cadence:
    """When a save is due: every `steps` steps, or every `seconds`; never if both are None."""

    steps: int | None = None
    seconds: float | None = None

    def is_due(self, step: int, last_save: float) -> bool:
        """Return True if a save is due after this step; `last_save` is on the monotonic clock."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and time.monotonic() - last_save >= self.seconds


def parse_cadence(every: int | str | None, name: str = "every") -> Cadence:
    """Parse the cadence that is passed as `every=`, or as an argument of another name.

    Raises:
        TypeError: the value is neither a number nor text.
        ValueError: it is neither a positive number of steps nor a time such as "10min".
    """
    if every is None:
        return Cadence()
    check_type(name, every, (Integral, str), "a number of steps or a time such as '10min'")
    text = str(every).strip()
    if text.isdigit() and int(text) > 0:
        return Cadence(steps=int(text))
    match = TIME_PATTERN.match(text)
    if match and float(match[1]) > 0:
        return Cadence(seconds=float(match[1]) * UNITS[match[2]])
    raise ValueError(
        f"{name}={every!r}: must be a number of steps, such as {name}=500, or a time, such as "
        f"'10min' (units: {', '.join(UNITS)})"
    )


@dataclass(frozen=True)
class SaveOptions:
    """The options of a run's saves; `Checkpoints` describes them.

    Raises:
        ValueError: an option is not among the allowed values.
        TypeError: an option has the wrong type.
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
        check_int("keep", self.keep, 2)  # because the newest may turn out to be corrupt
        check_bool(background=self.background, verify=self.verify)
        if self.keep_every is not None and not callable(self.keep_every):
            check_int("keep_every", self.keep_every, 1)
        if self.replicas_every is not None:
            check_int("replicas_every", self.replicas_every, 1)
        parse_cadence(self.every)
        parse_cadence(_as_every(self.peers), "peers")

    def is_kept_forever(self, step: int) -> bool:
        """Return True if a step of this number is never removed. On the first rank."""
        if callable(self.keep_every):
            return self.keep_every(step)
        return self.keep_every is not None and step % self.keep_every == 0

    def compares_replicas(self, step: int) -> bool:
        """Return True if the replicas are compared at the end of a step."""
        return self.replicas_every is not None and step % self.replicas_every == 0

    @property
    def cadence(self) -> Cadence:
        """When a save is due."""
        return parse_cadence(self.every)

    @property
    def peers_cadence(self) -> Cadence:
        """When a snapshot in memory is due."""
        return parse_cadence(_as_every(self.peers), "peers")


def _as_every(peers: bool | int | str) -> int | str | None:
    """Convert `peers=` into a cadence: True means every step, False never."""
    return int(peers) or None if isinstance(peers, bool) else peers
