"""A microbatch without step.backward is refused where others have one, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyrank
from anyrank.testing import RanksFailed, run_ranks


def loader_of(exact: bool = False) -> anyrank.ElasticLoader:
    return anyrank.ElasticLoader(
        torch.arange(24.0), global_batch=12, microbatch=2, shuffle=False, exact=exact
    )


def skip(model: nn.Module, without: set[int], exact: bool, early: bool = True) -> str:
    """Two steps, in the second of which some microbatches are left by `continue`."""
    try:
        for step in loader_of(exact):
            for batch in step.microbatches(model):
                if early and step.number and step.k in without:
                    continue
                loss = model(batch[:, None]).square().mean()
                if step.number and step.k in without:
                    continue
                step.backward(loss)
            model.zero_grad()
    except ValueError as error:
        return str(error)
    return "no error"


def job_skips() -> list[str]:
    found: list[str] = []
    for exact in (False, True):
        for without in ({0}, {2}, {5}, {2, 3}, {0, 1, 2}, set(range(6))):
            found.append(skip(nn.Linear(1, 1), without, exact))
            found.append(skip(nn.Linear(1, 1), without, exact, early=False))
    # DDP exchanges in the last backward without exact=True, and in the gather before with it.
    found.append(skip(DistributedDataParallel(nn.Linear(1, 1)), {2, 3}, True))
    return found


def test_a_microbatch_without_backward_is_the_same_error_on_any_number_of_ranks() -> None:
    alone = run_ranks(1, job_skips)[0]
    named = [text.partition("not called for")[2].partition(",")[0] for text in alone]
    expected = [f" microbatch {k}" for k in (0, 2, 5, 2, 0) for _ in range(2)] + ["", ""]
    assert named == [*expected, *expected, " microbatch 2"]
    assert alone[0].startswith(
        "step 1: step.backward() was not called for microbatch 0, but was for others"
    )
    assert "call step.backward(loss, weight=0) and" in alone[0]
    # Three ranks have two each, so {2, 3} is all that a rank has.
    assert run_ranks(3, job_skips_of_a_rank) == [[alone[6], alone[-1]]] * 3


def job_skips_of_a_rank() -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    return [skip(nn.Linear(1, 1), {2, 3}, False), skip(ddp, {2, 3}, True)]


def job_sharded() -> None:
    model: Any = fully_shard(nn.Linear(1, 1))
    error = skip(model, {2}, exact=False)  # it exchanges in the backward of microbatch 3
    if error != "no error":
        raise ValueError(error)


def test_the_rank_that_skips_raises_before_it_makes_fsdp_wait() -> None:
    with pytest.raises(RanksFailed, match="not called for microbatch 2,"):
        run_ranks(3, job_sharded, timeout=30)


def test_what_has_no_backward_by_intent_goes_on() -> None:
    model = nn.Linear(1, 1)
    gradients: list[torch.Tensor | None] = []
    for step in loader_of():
        for batch in step.microbatches(model):  # weight=0 leaves a microbatch out
            loss = model(batch[:, None]).square().mean()
            step.backward(loss, weight=0 if step.k == 1 else len(batch))
        gradients.append(model.weight.grad)
        for batch in step.microbatches(model):  # an evaluation, before the gradients are used
            model(batch[:, None])
        assert model.weight.grad is gradients[-1]
        model.zero_grad()
        for batch in step.microbatches(model, own_backward=True):
            if step.k:
                model(batch[:, None]).sum().backward()
    assert all(gradient is not None for gradient in gradients)
