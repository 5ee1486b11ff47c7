"""A sync between a model on the device and one on the CPU, both ways, in one process."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

import anyrank
from anyrank.live import verify
from anyrank.live.live import LiveSide
from anyrank.loading.sharing.places import LocalMemory

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


@pytest.mark.parametrize("atomic", [False, True])
def test_what_stays_on_the_device_waits_for_it_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    """Whole copies, with casts and turned, behind what the caller has asked of both ends."""
    src = {str(n): torch.randn(640, 640).to(device) for n in range(4)}
    src["turned"] = torch.randn(640, 320).to(device).t()
    dst = {name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in src.items()}
    dst["0"].fill_(7)  # still under way when the call begins
    for tensor in src.values():
        tensor.add_(1)
    waits: list[LocalMemory] = []
    usual = LocalMemory.settle
    monkeypatch.setattr(LocalMemory, "settle", lambda self: (waits.append(self), usual(self)))
    report = anyrank.sync(dst, src, atomic=atomic)
    assert len(waits) == 1
    assert report.bytes_copied == [(4 * 640 + 320) * 640 * 2]
    for name, tensor in dst.items():
        assert torch.equal(tensor.cpu(), src[name].cpu().bfloat16()), name


def test_an_end_that_moves_between_two_calls_is_seen(device: torch.device) -> None:
    src, dst = (nn.Linear(64, 64).to(device) for _ in range(2))
    weights = anyrank.Sync(dst, src)
    for model, place in ((dst, device), (dst, "cpu"), (src, "cpu"), (dst, device), (src, device)):
        model.to(place)
        with torch.no_grad():
            src.weight.normal_()
        weights()
        assert torch.equal(dst.weight.cpu(), src.weight.cpu())


def test_verify_finds_a_byte_on_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values go to the host by the MiB, and a byte that differs is found and named."""
    src = {str(n): torch.randn(640, 640).to(device) for n in range(3)}
    dst = {name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in src.items()}
    nbytes: list[int] = []
    usual_hash, usual_move = verify.hash_of, LiveSide.move

    def hash_of(parts: Iterable[torch.Tensor]) -> str:
        held = [*parts]
        nbytes.extend(part.nbytes for part in held)
        return usual_hash(held)

    def move(self: LiveSide) -> None:
        usual_move(self)
        dst["1"].view(torch.uint8)[639, 1279] ^= 1

    monkeypatch.setattr(verify, "hash_of", hash_of)
    anyrank.sync(dst, src, verify=True)
    assert nbytes
    assert max(nbytes) <= 1 << 20
    monkeypatch.setattr(LiveSide, "move", move)
    with pytest.raises(anyrank.LoadError, match=r"1 tensor differs between dst and src .*: 1\."):
        anyrank.sync(dst, src, verify=True)
