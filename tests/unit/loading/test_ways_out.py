"""A refusal names the option, or the call, by which the user goes on without losing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyrank


class Split(nn.Module):
    """Takes a fused weight of older files apart while it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_load_state_dict_pre_hook(self.split)

    @staticmethod
    def split(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for kind in ("weight", "bias"):
            if (fused := state.pop(f"{prefix}qk.{kind}", None)) is not None:
                state[f"{prefix}q.{kind}"], state[f"{prefix}k.{kind}"] = fused.chunk(2)


def split_net() -> nn.Module:
    return nn.ModuleDict({"attention": Split(), "out": nn.Linear(4, 4)})


FUSED = {
    "attention.qk.weight": torch.randn(8, 4),
    "attention.qk.bias": torch.randn(8),
    **{f"out.{name}": tensor for name, tensor in nn.Linear(4, 4).state_dict().items()},
}


def test_a_hook_that_splits_a_fused_weight_has_a_way_out() -> None:
    with pytest.raises(anyrank.LoadError, match=r"attention: overrides load_state_dict") as caught:
        anyrank.load(split_net(), FUSED)
    assert str(caught.value).index("whole.state_dict()") < str(caught.value).index("missing=")
    whole = split_net()
    whole.load_state_dict(FUSED)
    net = split_net()
    anyrank.load(net, whole.state_dict())
    assert torch.equal(net.state_dict()["attention.k.bias"], FUSED["attention.qk.bias"][4:])


def test_code_that_is_not_above_a_missing_tensor_is_no_way_out() -> None:
    source = {**split_net().state_dict(), "other": torch.ones(1)}
    del source["out.weight"]
    with pytest.raises(anyrank.LoadError) as caught:
        anyrank.load(split_net(), source)
    assert "load_state_dict code" not in str(caught.value)


def state(**parts: Any) -> anyrank.TrainState:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    if (schedule := parts.pop("schedule", None)) is not None:
        parts["scheduler"] = schedule(optimizer)
    return anyrank.TrainState(model, optimizer, **parts)


def average(width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(nn.Linear(width, 4).to(dtype))


def loader(rows: int) -> anyrank.ElasticLoader:
    return anyrank.ElasticLoader([*range(rows)], global_batch=4, microbatch=2, seed=0)


def steps(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


def cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)


@pytest.mark.parametrize(
    ("part", "saved", "given"),
    [
        ("ema", {"ema": average()}, {"ema": average(5)}),
        ("ema", {"ema": average()}, {"ema": average(dtype=torch.float64)}),
        ("ema", {"ema": average()}, {}),
        ("ema", {}, {"ema": average()}),
        ("data", {"data": loader(16)}, {"data": loader(20)}),
        ("scheduler", {"schedule": steps}, {"schedule": cosine}),
        ("scheduler", {}, {"schedule": cosine}),
    ],
)
def test_a_part_that_a_refusal_names_has_its_option_there(
    tmp_path: Path, part: str, saved: dict[str, Any], given: dict[str, Any]
) -> None:
    with anyrank.Checkpoints(tmp_path / "run", state(**saved)) as ckpts:
        ckpts.save()
    with anyrank.Checkpoints(tmp_path / "run", state(**given)) as ckpts:
        with pytest.raises(anyrank.CheckpointError, match=rf"skip=\['{part}'\]"):
            ckpts.resume()
        report = ckpts.resume(skip=[part])
    assert report is not None
    assert report.components["model"] == "exact"
