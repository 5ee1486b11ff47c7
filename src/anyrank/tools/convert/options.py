"""The options of `convert`, checked before anything is read."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from anyrank.checks import check_bool, check_choice, check_int
from anyrank.models.dialects.layouts.given import GivenLayout, check_layout
from anyrank.sources.endings import format_of
from anyrank.sources.tables.renaming import renamer
from anyrank.tensors.names import Rename
from anyrank.tools.convert.formats import OUTPUTS, OutputFormat
from anyrank.wording import FLOATS, alternatives


@dataclass(frozen=True)
class ConvertOptions:
    """The options of `convert`, where they are documented.

    Raises:
        ValueError: the format or dtype is unknown, the size is not positive, or a regex is invalid.
        TypeError: an option has the wrong type.
    """

    to: str
    dtype: object  # a torch.dtype, its name or None
    rename: Rename
    shard_bytes: int | None
    overwrite: bool
    layout: GivenLayout

    def __post_init__(self) -> None:
        check_choice("to", self.to, [*OUTPUTS])
        if self.shard_bytes is not None:
            if not self.format.has_shards:
                names = alternatives([name for name, row in OUTPUTS.items() if row.has_shards])
                raise ValueError(
                    f"shard_bytes= is only for to={names}, and to={self.to!r}. Remove it"
                )
            check_int("shard_bytes", self.shard_bytes, 1)
        check_bool(overwrite=self.overwrite)
        renamer(self.rename)
        check_layout(self.layout)
        _ = self.cast_dtype

    @property
    def format(self) -> OutputFormat:
        """The format to write."""
        return OUTPUTS[self.to]

    @property
    def cast_dtype(self) -> torch.dtype | None:
        """Dtype of floating-point tensors in the output; None if they keep theirs.

        Raises:
            ValueError, TypeError: `dtype` is not a floating-point dtype, or its name.
        """
        if self.dtype is None:
            return None
        if not isinstance(self.dtype, (str, torch.dtype)):
            kind = type(self.dtype).__name__
            raise TypeError(f"dtype={self.dtype!r}: expected a torch.dtype or its name, got {kind}")
        name = FLOATS.get(str(self.dtype).removeprefix("torch."))
        if name is None:
            names = alternatives([*FLOATS])
            raise ValueError(
                f"dtype={self.dtype!r}: must be {names}, for floating-point tensors only"
            )
        return getattr(torch, name)

    def is_file(self, dst: str | os.PathLike[str]) -> bool:
        """Return whether the destination is a single file, not a folder."""
        return not self.format.has_folder or format_of(os.fspath(dst)) == self.to

    def check_name(self, dst: str) -> None:
        """Check that the ending of the destination is not that of a different format.

        Raises:
            ValueError: names both formats.
        """
        named = format_of(dst) or self.to
        if named != self.to:
            hint = f"to={named!r}, or a different name" if named in OUTPUTS else "a different name"
            raise ValueError(
                f"dst={dst!r}: is the name of a {named} file, but to={self.to!r}. Pass {hint}"
            )
