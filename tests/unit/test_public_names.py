"""What is not documented is private: the public attributes of each public class, listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import anyrank

DATA = torch.zeros(8, 1)
POSITION = "epoch step consumed samples dropped padded notes receipts in_step commit"
POSITION += " state_dict load_state_dict"


def loader() -> anyrank.ElasticLoader:
    return anyrank.ElasticLoader(DATA, global_batch=4, microbatch=2)


def share() -> Any:
    sampler = anyrank.ElasticSampler(8, global_batch=4, microbatch=2)
    next(iter(sampler))
    return sampler.share(0)


# A function that makes an instance of the class, and the instance's public attributes.
NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "ElasticLoader": (loader, f"{POSITION} from_shards"),
    "ElasticSampler": (
        lambda: anyrank.ElasticSampler(8, global_batch=4, microbatch=2),
        f"{POSITION} share",
    ),
    "Share": (share, "weight is_last step k seed scale seeded"),
    "Step": (
        lambda: next(iter(loader())),
        "number epoch samples k microbatches backward scale loss",
    ),
    "Offload": (lambda: anyrank.Offload(1), "stats close"),
    "OffloadStats": (
        lambda: anyrank.Offload(1).stats(),
        "pool_bytes held_bytes used_bytes peak_bytes copied_bytes loaded_bytes shared kept"
        " allocated reused",
    ),
    "the handle of recompute_": (
        lambda: anyrank.recompute_(nn.Sequential(nn.ReLU()), "*"),
        "names remove",
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_class_shows_what_is_documented_alone(name: str) -> None:
    make, names = NAMES[name]
    assert {each for each in dir(make()) if not each.startswith("_")} == set(names.split())
