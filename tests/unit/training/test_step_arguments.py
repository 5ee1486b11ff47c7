"""What the methods of a step are given."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import anyrank


@pytest.mark.parametrize("exact", [False, True])
def test_what_a_step_is_given(exact: bool) -> None:
    model = nn.Linear(1, 1)
    loader = anyrank.ElasticLoader(torch.ones(4, 1), global_batch=4, microbatch=4, exact=exact)
    steps: Any = iter(loader)
    step = next(steps)
    with pytest.raises(TypeError, match=r"model=: expected a torch\.nn\.Module, got SGD"):
        next(iter(step.microbatches(torch.optim.SGD(model.parameters(), lr=0.1))))  # type: ignore[arg-type]
    for batch in step.microbatches(model):
        with pytest.raises(TypeError, match=r"loss=0\.5: expected the mean loss of .*, got float"):
            step.backward(0.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"weight='8': expected a number, got str"):
            step.backward(model(batch).mean(), weight="8")  # type: ignore[arg-type]
        step.backward(model(batch).mean(), weight=numpy.int64(4))  # type: ignore[arg-type]
    for wrong in ("1", True, None):
        with pytest.raises(TypeError, match="max_norm="):
            step.clip_grad_norm_(wrong)  # type: ignore[arg-type]
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm="):
            step.clip_grad_norm_(bad)
    with pytest.raises(ValueError, match="norm_type="):
        step.clip_grad_norm_(1.0, 0.5)
    if exact:
        with pytest.raises(ValueError, match="1, 2 or inf with exact=True"):
            step.clip_grad_norm_(1.0, 3.0)
    step.clip_grad_norm_(torch.tensor(1.0))  # type: ignore[arg-type]
    steps.close()
    with pytest.raises(ValueError, match="this step is over"):
        step.clip_grad_norm_(1.0)


def test_numpys_numbers_and_any_collection_of_names_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    number = numpy.int64
    state = anyrank.TrainState(
        nn.Linear(1, 1), seed=number(3), counter=Counter(), first_rank={"counter"}
    )
    loader = anyrank.ElasticLoader(
        torch.ones(4, 1), global_batch=number(4), microbatch=number(2), seed=number(1)
    )
    json.dumps(loader.state_dict())
    with anyrank.Checkpoints("run", state, keep=number(2), every=number(1)) as ckpts:
        ckpts.step_done()
        assert ckpts.saved()[0].step == 1
    logits = torch.randn(4, 3)
    anyrank.tiled_loss(nn.Linear(3, 5), logits, torch.zeros(4, dtype=torch.int64), count=number(4))
    anyrank.Offload(number(1 << 20)).close()


class Counter:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...
