"""A sync between a model on the device and one on the CPU, both ways, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import anyrank

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_go_to_the_device_and_back(device: torch.device, dtype: torch.dtype) -> None:
    src = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    dst = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device, dtype)
    dst[0].weight.data.fill_(7)  # still under way when the call begins
    report = anyrank.sync(dst, src, verify=True)
    assert report.tensors == 6
    for held, wanted in zip(dst.parameters(), src.parameters(), strict=True):
        assert held.device == device
        assert torch.equal(held.cpu(), wanted.to(dtype))
    back = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    anyrank.sync(back, dst, verify=True)
    for held, wanted in zip(back.parameters(), dst.parameters(), strict=True):
        assert torch.equal(held, wanted.cpu().float())
