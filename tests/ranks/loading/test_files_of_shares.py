"""Files into which torch.save put one rank's part of a sharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.testing import run_ranks


def net(seed: int) -> Any:
    torch.manual_seed(seed)
    return fully_shard(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))


def job_shares(folder: str) -> None:
    rank, model = dist.get_rank(), net(0)
    flat, nested = f"{folder}/flat{rank}.pt", f"{folder}/nested{rank}.pt"
    torch.save(model.state_dict(), flat)
    torch.save({"model": model.state_dict(), "step": 1}, nested)
    dist.barrier()
    sources: list[Any] = [f"{folder}/flat0.pt", f"{folder}/nested0.pt"]
    sources.append([f"{folder}/flat0.pt", f"{folder}/flat1.pt"])
    for source in sources:
        for missing in ("error", "init", "keep"):
            with pytest.raises(
                anyrank.LoadError,
                match=r"contains one rank's local shards of DTensors \(0\.weight, 0\.bias",
            ):
                anyrank.load(net(1), source, missing=missing)  # type: ignore[arg-type]
    other = net(1)
    anyrank.load(other, torch.load(flat, weights_only=False))  # the way out of the error
    assert torch.equal(other[0].weight.full_tensor(), model[0].weight.full_tensor())


def test_a_file_of_one_ranks_shares_says_so_and_the_way_out_works(tmp_path: Path) -> None:
    run_ranks(2, job_shares, str(tmp_path))
