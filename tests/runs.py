"""One save, or one resume, of a state by a `Checkpoints` of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import anyrank


def save(path: str | os.PathLike[str], state: anyrank.TrainState, **options: Any) -> None:
    """Save the state's step, and release the folder. All ranks."""
    with anyrank.Checkpoints(path, state, **options) as ckpts:
        ckpts.save()


def resume(
    path: str | os.PathLike[str],
    state: anyrank.TrainState,
    which: str | int = "auto",
    *,
    skip: Sequence[str] = (),
    **options: Any,
) -> anyrank.ResumeReport | None:
    """Resume the state, and release the folder. All ranks."""
    with anyrank.Checkpoints(path, state, **options) as ckpts:
        return ckpts.resume(which, skip=skip)
