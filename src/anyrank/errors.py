"""The exception tree.

AnyrankError
 +- LoadError          weights do not match the model, or cannot be read
 +- CheckpointError    a run checkpoint cannot be written or resumed
 |   +- CorruptCheckpoint   stored bytes are not the ones that were saved
 +- RankError          another rank failed, died, or made a different call
 +- RecomputeError     backward would use values that differ from those of the forward pass
 +- UnsafeFile         a file asks to run code, or its header makes impossible claims

A wrong argument is a ValueError or a TypeError. `WrongValue` and `WrongType` are for arguments that
only some ranks may find wrong, in the middle of a call: because they are AnyrankErrors, they are
raised on every rank.
"""

from __future__ import annotations


class AnyrankError(Exception):
    """Base of every error that anyrank raises on purpose.

    Attributes:
        causes: rank -> the error of that rank, the same on every rank. Empty if the call used only
            one rank.

    Example::

        try:
            anyrank.load(torch.nn.Linear(2, 2), {"weight": torch.eye(2)})
        except anyrank.AnyrankError as error:
            print(error)  # the bias is missing, and how to fix it
            print(error.causes)  # rank -> its error, if several ranks loaded
    """

    def __init__(self, message: str, *, causes: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.causes: dict[int, str] = causes or {}


class LoadError(AnyrankError):
    """Raised if weights do not match the model, or if a source cannot be read.

    Example::

        model = torch.nn.Linear(2, 2)
        try:
            anyrank.load(model, {"weight": torch.eye(3), "bias": torch.ones(2)})
        except anyrank.LoadError as error:
            assert "weight" in str(error)  # and the model is as it was
    """


class CheckpointError(AnyrankError):
    """Raised if a run checkpoint cannot be written or resumed.

    Example::

        ckpts = anyrank.Checkpoints("runs/a", anyrank.TrainState(torch.nn.Linear(2, 2)))
        try:
            ckpts.resume("must")
        except anyrank.CheckpointError as error:
            assert "runs/a" in str(error)  # nothing has been saved there yet
    """


class CorruptCheckpoint(CheckpointError):
    """Raised if stored bytes are not the ones that were saved, or if some are missing.

    Example::

        from pathlib import Path

        ckpts = anyrank.Checkpoints("runs/a", anyrank.TrainState(torch.nn.Linear(2, 2)))
        ckpts.save()
        Path(ckpts.latest(), "anyrank.json").write_text("{}")
        try:
            ckpts.resume()
        except anyrank.CorruptCheckpoint as error:
            print(error)  # which checkpoint is corrupt, and why
    """


class RankError(AnyrankError):
    """Raised if a rank died, failed with an unforeseen error, or made a different call."""


class RecomputeError(AnyrankError):
    """Raised if backward of a recomputed, tiled or offloaded region would use changed values.

    They differ from those that the forward pass used.

    Example::

        hidden = torch.ones(2, requires_grad=True) * 2
        loss = anyrank.recompute(torch.exp, hidden).sum()
        hidden.detach().mul_(2)  # the recomputation would read the new values
        try:
            loss.backward()
        except anyrank.RecomputeError as error:
            print(error)  # what was changed, and how to fix it
    """


class UnsafeFile(AnyrankError):
    """Raised for a file that would run code when read, or whose header makes impossible claims.

    Example::

        from pathlib import Path

        Path("short.safetensors").write_bytes((1 << 40).to_bytes(8, "little"))  # a header of 1 TiB
        try:
            anyrank.inspect("short.safetensors")
        except anyrank.UnsafeFile as error:
            assert "short.safetensors" in str(error)
    """


class WrongValue(AnyrankError, ValueError):
    """A ValueError that is raised on every rank."""


class WrongType(AnyrankError, TypeError):
    """A TypeError that is raised on every rank."""
