"""One save, or one resume, of a state by a `Checkpoints` of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

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
    drop: Sequence[str] = (),
    **options: Any,
) -> anyrank.ResumeReport | None:
    """Resume the state, and release the folder. All ranks."""
    with anyrank.Checkpoints(path, state, **options) as ckpts:
        return ckpts.resume(which, skip=skip, drop=drop)


def forge(step: Path, table: dict[str, Any]) -> None:
    """Write a step's manifest with its right checksum of itself."""
    table = {key: value for key, value in table.items() if key != "self"}
    text = json.dumps(table, indent=1).removesuffix("\n}")
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    (step / "anyrank.json").write_text(f'{text},\n "self": "{digest}"\n}}\n')
