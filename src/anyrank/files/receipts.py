"""Receipts of the steps of runs, compared: where two runs part, without a byte of payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parting:
    """The first step in which two runs differ.

    Attributes:
        step: both have a receipt of it.
        tensors: names of those that differ, or that one of them lacks; empty where only the data
            differs.
    """

    step: int
    tensors: Sequence[str]


def first_parting(
    first: Mapping[int, Mapping[str, Any]], second: Mapping[int, Mapping[str, Any]]
) -> Parting | None:
    """Where two runs part, by the receipts of their steps; None if all in common are equal.

    Args:
        first: step -> `Manifest.receipt`; steps without a receipt are left out.
        second: of the other run.
    """
    for step in sorted(set(first) & set(second)):
        one, other = first[step], second[step]
        if one and other and one["digest"] != other["digest"]:
            names = sorted(set(one["tensors"]) | set(other["tensors"]))
            differ = [n for n in names if one["tensors"].get(n) != other["tensors"].get(n)]
            return Parting(step, differ)
    return None
