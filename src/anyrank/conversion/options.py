"""The options of `convert`: checked before anything is read."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from anyrank.checks import check_bool, check_choice, check_int
from anyrank.formats.weight_files import format_of
from anyrank.model.given_layouts import GivenLayout, check_layout
from anyrank.tensors.names import Rename, renamer
from anyrank.wording import FLOATS

FORMATS = ("safetensors", "dcp", "torch")
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ConvertOptions:
    """What the caller of `convert` asked for; see there for each."""

    to: str = "safetensors"
    dtype: torch.dtype | None = None
    rename: Rename = None
    shard_bytes: int = SHARD_BYTES
    merge: bool = False
    overwrite: bool = False
    layout: GivenLayout = None

    def is_file(self, dst: str | os.PathLike[str]) -> bool:
        """Whether the destination is one file, and not a folder."""
        return self.to == "torch" or format_of(os.fspath(dst)) == self.to

    def check_name(self, dst: str) -> None:
        """Refuse a destination that has the name of a file of another format.

        Raises:
            ValueError: names both.
        """
        named = format_of(dst) or self.to
        if named != self.to:
            raise ValueError(
                f"dst={dst!r} is the name of a file of {named}, and to={self.to!r}: give "
                f"to={named!r}, or another name"
            )


def options_of(
    to: object,
    dtype: object,
    rename: Rename,
    shard_bytes: object,
    merge: bool,
    overwrite: bool,
    layout: GivenLayout,
) -> ConvertOptions:
    """The options, checked.

    Raises:
        ValueError: an unknown format or dtype, no positive size, a regex that does not compile.
        TypeError: an option of another type.
    """
    check_choice("to", to, FORMATS)
    if shard_bytes is None:
        shard_bytes = SHARD_BYTES
    elif to != "safetensors":
        raise ValueError(f"shard_bytes= is for to='safetensors', not {to!r}")
    count = check_int("shard_bytes", shard_bytes, 1)
    check_bool(merge=merge, overwrite=overwrite)
    renamer(rename)
    check_layout(layout)
    return ConvertOptions(str(to), _dtype(dtype), rename, count, merge, overwrite, layout)


def _dtype(value: object) -> torch.dtype | None:
    if value is None:
        return None
    if not isinstance(value, (str, torch.dtype)):
        raise TypeError(f"dtype={value!r}: give a torch.dtype or its name")
    name = FLOATS.get(str(value).removeprefix("torch."))
    if name is None:
        names = ", ".join(FLOATS)
        raise ValueError(f"dtype={value!r}: give one of {names}; other tensors keep their dtype")
    return getattr(torch, name)
