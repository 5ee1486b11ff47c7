"""What is verified as it is read on several ranks: damage is found everywhere, at little cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runs import resume
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.testing import run_ranks

Found = tuple[int, int, list[str], list[float], list[int]]


def build(sizes: list[int], seed: int) -> anyrank.TrainState:
    """Square layers under FSDP2 and their Adam state."""
    torch.manual_seed(seed)
    net: nn.Module = nn.Sequential(*(nn.Linear(n, n, bias=False) for n in sizes))
    for layer in net.children():
        fully_shard(layer)
    fully_shard(net)
    return anyrank.TrainState(net, torch.optim.AdamW(net.parameters(), lr=0.1))


def sums(state: anyrank.TrainState) -> list[float]:
    """The sum of each tensor of the model and the optimizer, over all ranks."""
    net, optimizer = state.parts.by_name["model"], state.parts.by_name["optimizer"]
    tensors = [*net.parameters()]
    tensors += [state["exp_avg"] for state in optimizer.state.values()]
    return [float(tensor.detach().full_tensor().double().sum()) for tensor in tensors]


def job_save(path: str, sizes: list[int], steps: int) -> list[list[float]]:
    state = build(sizes, 0)
    net, optimizer = state.parts.by_name["model"], state.parts.by_name["optimizer"]
    seen: list[list[float]] = []
    with anyrank.Checkpoints(path, state, every=1) as ckpts:
        for _ in range(steps):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            seen.append(sums(state))
            ckpts.step_done()
    return seen


def job_resume(path: str, sizes: list[int]) -> Found:
    state = build(sizes, 1)
    report = resume(path, state)
    assert report is not None
    return report.step, report.lost_steps, report.set_aside, sums(state), report.bytes_read


@pytest.mark.parametrize("file", ["__0_0.distcp", "__2_0.distcp", "__1_0.xxh3"])
def test_a_flipped_bit_sets_the_step_aside_on_all_ranks(tmp_path: Path, file: str) -> None:
    seen = run_ranks(3, job_save, str(tmp_path), [48, 64], 2)[0]
    damaged = tmp_path / "step-00000002" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    for step, lost, aside, found, _ in run_ranks(2, job_resume, str(tmp_path), [48, 64]):
        assert (step, lost, aside) == (1, 1, [".aside-damaged-step-00000002"])
        assert found == pytest.approx(seen[0], rel=1e-12)
    assert sorted(p.name for p in tmp_path.glob("*step-*")) == [
        ".aside-damaged-step-00000002",
        "step-00000001",
    ]


def test_verifying_reads_blocks_of_64_kib_around_each_share_on_other_ranks(tmp_path: Path) -> None:
    sizes = [512, 1024, 768]  # layers of 1, 4 and 2.25 MiB
    run_ranks(4, job_save, str(tmp_path), sizes, 1)
    needed = sum(3 * 4 * n * n for n in sizes)
    runs = 3 * len(sizes) * (4 + 3 - 1)  # of bytes, of three tensors a layer: both splits' borders
    for *_, bytes_read in run_ranks(3, job_resume, str(tmp_path), sizes):
        assert sum(bytes_read) - needed < runs * 64 * 1024
