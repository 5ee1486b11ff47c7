"""The exception tree.

AnyrankError
 +- LoadError          weights do not fit, or could not be read
 +- CheckpointError    a run checkpoint could not be written or resumed
 |   +- CorruptCheckpoint   its bytes are not the ones that were saved
 +- RankError          another rank failed, died or disagrees
 +- RecomputeError     backward does not see what the forward pass saw
 +- UnsafeFile         the file asks to run code, or lies about its own size

A wrong argument is a ValueError or a TypeError. `WrongValue` and `WrongType` are for arguments that
one rank alone may find wrong in the middle of a call: as AnyrankErrors they are raised on all
ranks.
"""

from __future__ import annotations


class AnyrankError(Exception):
    """Base of every error that anyrank raises on purpose.

    Attributes:
        causes: rank -> that rank's error, equal on all ranks. Empty for an error of one rank.

    Example::

        try:
            anyrank.load(torch.nn.Linear(2, 2), {"weight": torch.eye(2)})
        except anyrank.AnyrankError as error:
            print(error)  # the bias is missing, and the ways out
            print(error.causes)  # rank -> its own error, where several ranks loaded
    """

    def __init__(self, message: str, *, causes: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.causes: dict[int, str] = causes or {}


class LoadError(AnyrankError):
    """Weights that do not fit the model, or a source that cannot be read.

    Example::

        model = torch.nn.Linear(2, 2)
        try:
            anyrank.load(model, {"weight": torch.eye(3), "bias": torch.ones(2)})
        except anyrank.LoadError as error:
            assert "weight" in str(error)  # and the model is as it was
    """


class CheckpointError(AnyrankError):
    """A run checkpoint that cannot be written or resumed.

    Example::

        ckpts = anyrank.Checkpoints("runs/a", anyrank.TrainState(torch.nn.Linear(2, 2)))
        try:
            ckpts.resume("must")
        except anyrank.CheckpointError as error:
            assert "runs/a" in str(error)  # nothing was saved there yet
    """


class CorruptCheckpoint(CheckpointError):
    """Bytes that are not the ones that were saved.

    Example::

        from pathlib import Path

        ckpts = anyrank.Checkpoints("runs/a", anyrank.TrainState(torch.nn.Linear(2, 2)))
        ckpts.save()
        Path(ckpts.latest(), "anyrank.json").write_text("{}")
        try:
            ckpts.resume()
        except anyrank.CorruptCheckpoint as error:
            print(error)  # the only step of the run, and what is wrong with it
    """


class RankError(AnyrankError):
    """Another rank failed in an unforeseen way, died, or did something else at the same place."""


class RecomputeError(AnyrankError):
    """Backward of a recomputed, tiled or offloaded region does not see the values of forward.

    Example::

        hidden = torch.ones(2, requires_grad=True) * 2
        loss = anyrank.recompute(torch.exp, hidden).sum()
        hidden.detach().mul_(2)  # the second run would read the new values
        try:
            loss.backward()
        except anyrank.RecomputeError as error:
            print(error)  # what was changed, and the way out
    """


class UnsafeFile(AnyrankError):
    """A file that would run code when read, or whose header makes claims the file cannot hold.

    Example::

        from pathlib import Path

        Path("short.safetensors").write_bytes((1 << 40).to_bytes(8, "little"))  # bytes of header
        try:
            anyrank.inspect("short.safetensors")
        except anyrank.UnsafeFile as error:
            assert "short.safetensors" in str(error)
    """


class WrongValue(AnyrankError, ValueError):
    """A ValueError that is raised on all ranks."""


class WrongType(AnyrankError, TypeError):
    """A TypeError that is raised on all ranks."""
