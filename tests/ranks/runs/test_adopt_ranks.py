"""Errors with another tool's checkpoint are every rank's, and nothing is changed."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from tests.unit.sources.test_foreign import Payload, accelerate_folder, net_of
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import run_ranks


def job(sources: list[str], folder: str) -> tuple[str, str, bool, int]:
    """What a resume with this rank's source raises, and whether the state is as it was."""
    net = DistributedDataParallel(net_of(1))
    optimizer = torch.optim.AdamW(net.parameters())
    state = anyrank.TrainState(net, optimizer)
    before = [p.detach().clone() for p in net.parameters()]
    source = sources[dist.get_rank() % len(sources)]
    if source.startswith("@"):  # a place that the first rank alone sees
        os.chdir(source[1:] if dist.get_rank() == 0 else os.path.dirname(folder))
        source = "a"
    try:
        with anyrank.Checkpoints(folder, state) as ckpts:
            ckpts.resume(source)
        found = ("", "")
    except Exception as error:
        found = (type(error).__name__, str(error))
    same = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    return *found, same and not optimizer.state, state.step


def test_every_rank_raises_the_error(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    accelerate_folder(tmp_path / "seen/a")
    accelerate_folder(tmp_path / "unsafe")
    torch.save({"state": {}, "extra": Payload()}, tmp_path / "unsafe/optimizer.bin")
    (tmp_path / "runs").mkdir()
    place, unsafe = str(tmp_path / "seen"), str(tmp_path / "unsafe")
    for sources, kind, match in (
        ([unsafe], "UnsafeFile", "eval, which could run code"),
        ([unsafe, f"{place}/a"], "CheckpointError", "which"),
        ([f"@{place}"], "CheckpointError", "Put the checkpoint where every rank can see it"),
    ):
        for name, text, same, step in run_ranks(2, job, sources, str(tmp_path / "runs/x")):
            assert name == kind, text
            assert match in text
            assert same
            assert step == 0
