"""Show tensors that differ only in a layer number on one line: `layers.{0..31}.up.weight x32`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from anyrank.wording import in_units, printable, short_dtype

SHOWN_RUNS = 6
# A part of a name that is a number, but not 007, because its number is written as 7.
NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of the same shape and dtype whose names differ only in their first number.

    Attributes:
        name: one name for all, safe for a terminal; several numbers are in braces.
        shape, dtype: shape and dtype of each tensor.
        count: number of tensors.
        nbytes: total size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        shape, dtype = list(self.shape), short_dtype(self.dtype)
        return f"{self.name} {shape} {dtype}{times}, {in_units(self.nbytes)}"


def group(tensors: Iterable[tuple[str, tuple[int, ...], str, int]]) -> list[TensorGroup]:
    """Group (name, shape, dtype, nbytes), and sort by name; numbers in names sort as numbers."""
    alike: dict[tuple[str, str, tuple[int, ...], str], list[tuple[str, int]]] = {}
    for name, shape, dtype, nbytes in tensors:
        number = NUMBER.search(name)
        start, stop = number.span() if number else (len(name), len(name))
        members = alike.setdefault((name[:start], name[stop:], shape, dtype), [])
        members.append((name[start:stop], nbytes))
    groups: list[tuple[list[tuple[int, str]], TensorGroup]] = []
    for (before, after, shape, dtype), members in alike.items():
        numbers = sorted(int(number) for number, _ in members if number)
        name = printable(f"{before}{_runs(numbers)}{after}")
        nbytes = sum(size for _, size in members)
        first = f"{before}{min(numbers, default='')}{after}"
        groups.append((_in_order(first), TensorGroup(name, shape, dtype, len(members), nbytes)))
    return [group for _, group in sorted(groups, key=lambda item: (item[0], item[1].shape))]


def _in_order(name: str) -> list[tuple[int, str]]:
    """Return the sort key of a name: a number, or -1 and a word, for each part."""
    parts = name.split(".")
    return [(int(part), "") if NUMBER.fullmatch(part) else (-1, part) for part in parts]


def _runs(numbers: list[int]) -> str:
    """Return sorted numbers as text: "7", "{0..31}", "{0,2,4..7}"."""
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = ["..".join(map(str, run)) for run in runs]
    shown = texts if len(texts) <= SHOWN_RUNS else [*texts[: SHOWN_RUNS - 1], "..", texts[-1]]
    return f"{{{','.join(shown)}}}"
