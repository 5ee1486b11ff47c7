"""Hashes of names and numbers that are the same on every machine, with every Python and torch."""

from __future__ import annotations

from hashlib import blake2b

import torch


def derive(*parts: int | str, size: int = 8) -> int:
    """Return a number of `size` bytes that depends on all parts, their types and their order."""
    digest = blake2b(repr(parts).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "little")


def mix64(values: torch.Tensor) -> torch.Tensor:
    """Return splitmix64 of each value (Steele, Lea, Flood 2014), a mixing bijection of int64."""
    return mix64_(values.clone())


def mix64_(values: torch.Tensor) -> torch.Tensor:
    """Do what `mix64` does, in place; for many values this is several times as fast."""
    values += 0x9E3779B97F4A7C15 - (1 << 64)
    values ^= _shift(values, 30)
    values *= 0xBF58476D1CE4E5B9 - (1 << 64)
    values ^= _shift(values, 27)
    values *= 0x94D049BB133111EB - (1 << 64)
    values ^= _shift(values, 31)
    return values


def _shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right and fill with zeros, as for unsigned numbers."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def signed(number: int) -> int:
    """Return the int64 with the bits of a number in [0, 2 ** 64)."""
    return number - (1 << 64) if number >> 63 else number


SPREAD = signed(0x9E3779B97F4A7C15)  # odd: the step between two positions before mixing
