"""What no save could hold is said when the run is opened, or after the first step; not hours in."""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank
from anyrank.testing import run_ranks


def test_an_optimizer_of_other_parameters_is_refused_when_the_run_is_opened(
    tmp_path: Path,
) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    state = anyrank.TrainState(nn.Linear(1, 1), optimizer)
    ckpts = anyrank.Checkpoints(tmp_path / "run", state)
    with pytest.raises(anyrank.CheckpointError, match="belongs to no module of the state"):
        ckpts.resume()


class Slow(torch.optim.SGD):
    """Keeps, from its first step on, tensors that its state_dict() does not hold."""

    def step(self, closure: Any = None) -> Any:
        if not hasattr(self, "slow"):
            self.slow = {
                i: p.detach().clone() for i, p in enumerate(self.param_groups[0]["params"])
            }
        return super().step(closure)


class Sparse(torch.optim.SGD):
    """Keeps, from its first step on, state that no save can hold."""

    def step(self, closure: Any = None) -> Any:
        parameter = self.param_groups[0]["params"][0]
        self.state[parameter]["rows"] = torch.eye(1).to_sparse()
        return super().step(closure)


def job(path: str, kind: type[torch.optim.SGD], steps: int) -> list[str]:
    noted: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: noted.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("anyrank").addHandler(handler)
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = kind(model.parameters(), lr=0.1)
    ckpts = anyrank.Checkpoints(path, anyrank.TrainState(model, optimizer))
    ckpts.resume()
    for _ in range(steps):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        ckpts.step_done()
    ckpts.close()
    logging.getLogger("anyrank").removeHandler(handler)
    return noted


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Slow, "optimizer: slow of a Slow hold tensors that its state_dict() does not include"),
        (Sparse, "after the first step: the next save will fail: optimizer.state.weight.rows"),
    ],
)
def test_what_a_save_would_lose_or_refuse_is_a_warning_after_the_first_step(
    tmp_path: Path, kind: type[torch.optim.SGD], said: str
) -> None:
    first, second = run_ranks(2, job, str(tmp_path / "run"), kind, 3)
    (line,) = first
    assert line.startswith(f"WARNING {said}")
    assert second == []


def saving(path: str) -> list[str]:
    noted: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: noted.append(f"{record.name} {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("anyrank")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with anyrank.Checkpoints(path, anyrank.TrainState(nn.Linear(1, 1))) as ckpts:
        ckpts.step_done()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return noted


def test_a_save_is_logged_once_by_the_logger_that_the_docs_name(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    first, second = run_ranks(2, saving, path)
    saved, summary = first
    assert saved == f"anyrank.saving saved step 1: {path}/step-00000001"
    assert summary.startswith(f"anyrank.resume {path}: ")
    assert "of the time trained" in summary
    assert second == []


class Lookahead:
    """An object that keeps its state as optimizers around optimizers do."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = defaultdict(dict)

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["slow"]


def test_a_defaultdict_comes_back_as_one(tmp_path: Path) -> None:
    saved, restored = Lookahead(), Lookahead()
    saved.state["w"]["count"] = 3
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(nn.Linear(1, 1), part=saved)) as ckpts:
        ckpts.save()
    with anyrank.Checkpoints(tmp_path, anyrank.TrainState(nn.Linear(1, 1), part=restored)) as ckpts:
        ckpts.resume()
    assert restored.state == {"w": {"count": 3}}
    assert restored.state["other"] == {}
