"""A rank that leaves the loop over its microbatches is known to the others within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import anyrank
from anyrank.testing import RanksFailed, run_ranks


def job_leaves(folder: str, leaver: int) -> None:
    """Breaks out of the second step on one rank, which then says that it is done."""
    model = nn.Linear(1, 1)
    loader = anyrank.ElasticLoader(torch.arange(48.0)[:, None], global_batch=12, microbatch=2)
    ckpts = anyrank.Checkpoints(folder, anyrank.TrainState(model, data=loader))
    for step in loader:
        for batch in step.microbatches(model):
            step.backward(model(batch).square().mean())
            if step.number == 1 and torch.distributed.get_rank() == leaver:
                break
        ckpts.step_done()


@pytest.mark.parametrize("leaver", [0, 2])
def test_the_others_learn_of_it_in_seconds(tmp_path: Path, leaver: int) -> None:
    with pytest.raises(RanksFailed, match=rf"completing the step on rank {leaver}\b") as caught:
        run_ranks(3, job_leaves, str(tmp_path / "run"), leaver, timeout=120)
    others = {0, 1, 2} - {leaver}
    assert all(f"[rank{rank}] anyrank.errors.RankError" in str(caught.value) for rank in others)
