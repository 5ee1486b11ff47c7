"""Tensors that differ in layer numbers only, as one line: `layers.{0..31}.up.weight x32`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from anyrank.wording import printable, short_dtype

SHOWN_RUNS = 6
MAX_NUMBERS = 8  # numbers that a name is grouped by; further ones count as text
MAX_DIGITS = 9

Indices = tuple[int, ...]
Blanked = tuple[str | None, ...]  # a name's parts, None where a number stood


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one shape and dtype whose names differ in numbers only.

    Attributes:
        parts: the name between its dots, fit for a terminal; several numbers are in braces.
        shape, dtype: of each tensor.
        count: how many tensors.
        nbytes: of all of them.
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int

    @property
    def name(self) -> str:
        """All names in one: `layers.{0..31}.up.weight`."""
        return ".".join(self.parts)

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        return f"{self.name} {list(self.shape)} {short_dtype(self.dtype)}{times}"


def group(tensors: Iterable[tuple[str, tuple[int, ...], str, int]]) -> list[TensorGroup]:
    """Group (name, shape, dtype, nbytes), in the order of names with numbers counted as numbers.

    A group holds every combination of the numbers that its name shows, and each tensor is in one.
    """
    alike: dict[tuple[Blanked, tuple[int, ...], str], dict[Indices, int]] = {}
    for name, shape, dtype, nbytes in tensors:
        blanked, numbers = _blank(name)
        alike.setdefault((blanked, shape, dtype), {})[numbers] = nbytes
    made: list[tuple[list[tuple[int, str]], TensorGroup]] = []
    for (blanked, shape, dtype), members in alike.items():
        for product in as_products(members):
            size = math.prod(len(numbers) for numbers in product)
            nbytes = size * next(iter(members.values()))  # equal shape and dtype, equal bytes
            order = _filled(blanked, product)
            parts = tuple(text for _, text in order)
            made.append((order, TensorGroup(parts, shape, dtype, size, nbytes)))
    return [group for _, group in sorted(made, key=lambda item: (item[0], item[1].shape))]


def as_products(indices: Collection[Indices]) -> list[tuple[Indices, ...]]:
    """Tuples of equal length as disjoint products of sets: [(0, 1), (2,)] for 0.2 and 1.2.

    One product where every combination is there, as of layers and their experts; else one for each
    of the further numbers.
    """
    columns = [tuple(sorted(set(column))) for column in zip(*indices, strict=True)]
    if math.prod(map(len, columns)) == len(indices):
        return [tuple(columns)]
    by_rest: dict[Indices, list[int]] = {}
    for first, *rest in sorted(indices):
        by_rest.setdefault(tuple(rest), []).append(first)
    return [(tuple(numbers), *((number,) for number in rest)) for rest, numbers in by_rest.items()]


def _blank(name: str) -> tuple[Blanked, Indices]:
    """A name without its numbers, and the numbers."""
    numbers: list[int] = []
    parts: list[str | None] = []
    for part in name.split("."):
        # Not 007 or the digits of another script: the int would not give them back.
        plain = part.isascii() and part.isdigit() and (part == "0" or part[0] != "0")
        if plain and len(part) <= MAX_DIGITS and len(numbers) < MAX_NUMBERS:
            numbers.append(int(part))
            parts.append(None)
        else:
            parts.append(printable(part))
    return tuple(parts), tuple(numbers)


def _filled(blanked: Blanked, product: tuple[Indices, ...]) -> list[tuple[int, str]]:
    """The parts with numbers put back, each after what it sorts by: -1 for a word, or a number."""
    numbers = iter(product)
    order: list[tuple[int, str]] = []
    for part in blanked:
        if part is None:
            here = next(numbers)
            order.append((here[0], _runs(here)))
        else:
            order.append((-1, part))
    return order


def _runs(numbers: Indices) -> str:
    """Sorted numbers: "7", "{0..31}", "{0,2,4..7}"."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = ["..".join(map(str, run)) for run in runs]
    shown = texts if len(texts) <= SHOWN_RUNS else [*texts[: SHOWN_RUNS - 1], "..", texts[-1]]
    return f"{{{','.join(shown)}}}"
