"""What is not documented is private: the public attributes of each public class, listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anyrank

WEIGHTS = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}

# A function that makes an instance of the class, and the instance's public attributes.
NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "LoadReport": (
        lambda: anyrank.load(nn.Linear(2, 2), WEIGHTS),
        "missing unexpected initialised rebuilt kept tied duplicates cast renewed own_code"
        " own_code_not_run frozen format strategy reason nonfinite verified skipped tensors"
        " bytes_read bytes_sent peak_host_bytes peak_device_bytes seconds to_json",
    ),
    "LoadPlan": (
        lambda: anyrank.plan(nn.Linear(2, 2), WEIGHTS),
        "strategy reason world_size nodes model_bytes source_bytes share_bytes read_bytes"
        " sent_bytes peak_bytes node_read_bytes node_peak_bytes seconds format missing unexpected"
        " to_json",
    ),
    "the result of inspect": (
        lambda: anyrank.inspect(WEIGHTS),
        "path format files tensors dtypes parameters nbytes metadata skipped steps to_json",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_class_shows_what_is_documented_alone(name: str) -> None:
    make, names = NAMES[name]
    assert {each for each in dir(make()) if not each.startswith("_")} == set(names.split())
