"""The exception tree.

AnyrankError
 +- LoadError          weights do not fit, or could not be read
 +- CheckpointError    a run checkpoint could not be written or resumed
 |   +- CorruptCheckpoint   its bytes are not the ones that were saved
 +- RankError          another rank failed, died or disagrees
 +- RecomputeError     backward cannot have back what the forward pass saw
 +- UnsafeFile         the file asks to run code, or lies about its own size

An argument that is wrong is a ValueError or a TypeError. `WrongValue` and `WrongType` are such ones
that may show on one rank alone, while the ranks work together: these raise an AnyrankError's class
on all of them.
"""

from __future__ import annotations


class AnyrankError(Exception):
    """Base of every error that anyrank raises on purpose.

    Attributes:
        causes: rank -> what that rank reported. Empty when the error did not cross ranks; equal on
            all ranks when it did.
    """

    def __init__(self, message: str, *, causes: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.causes: dict[int, str] = causes or {}


class LoadError(AnyrankError):
    """Weights that do not fit the model, or a source that cannot be read."""


class CheckpointError(AnyrankError):
    """A run checkpoint that cannot be written or resumed."""


class CorruptCheckpoint(CheckpointError):
    """Bytes that are not the ones that were saved."""


class RankError(AnyrankError):
    """Another rank failed in an unforeseen way, died, or did something else at the same place."""


class RecomputeError(AnyrankError):
    """What backward needs of a recomputed, tiled or offloaded region is not what forward saw."""


class UnsafeFile(AnyrankError):
    """A file that would run code when read, or whose header makes claims the file cannot hold."""


class WrongValue(AnyrankError, ValueError):
    """A ValueError that is raised on all ranks."""


class WrongType(AnyrankError, TypeError):
    """A TypeError that is raised on all ranks."""
