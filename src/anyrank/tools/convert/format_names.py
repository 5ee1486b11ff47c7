"""The names of the formats that `convert` writes, for the command line, which loads no torch."""

from __future__ import annotations

from typing import Literal

FormatName = Literal["safetensors", "dcp", "torch"]  # the keys of `OUTPUTS` in formats.py
