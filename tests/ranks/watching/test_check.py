"""`anyrank.check` finds seeded mistakes, names the parameter or rank, and is silent where all is
well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import sharded_nets
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import anyrank
from anyrank.testing import run_ranks

DATA = TensorDataset(torch.arange(64.0).reshape(32, 2))
Arguments = dict[str, Any]


def seeded() -> None:
    """Every rank its own random numbers, as they should be."""
    torch.manual_seed(100 + dist.get_rank())


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Tied(nn.Module):
    """An embedding and a head that are one."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))


# -- two mistakes for each rule: what is checked, and what `where` has to name ---------------------


def replica_of_one_rank() -> Arguments:
    model = net()
    with torch.no_grad():
        model[2].weight[1, 1] += dist.get_rank()
    return {"model": model}


def frozen_part_of_one_rank() -> Arguments:
    model = net()
    model[0].requires_grad_(False).bias.data += dist.get_rank()
    return {"model": model}


def replicas_built_with_own_seeds() -> Arguments:
    seeded()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return {"model": fully_shard(model, mesh=mesh_of_replicas())}


def mesh_of_replicas() -> Any:
    shape = (dist.get_world_size(), 1)
    return torch.distributed.device_mesh.init_device_mesh(
        "cpu", shape, mesh_dim_names=("replicas", "shards")
    )


def tie_of_a_copy() -> Arguments:
    model = Tied()
    model.head = copy.deepcopy(model.head)
    return {"model": DistributedDataParallel(model)}


def tie_in_two_units() -> Arguments:
    model = Tied()
    fully_shard(model.embed)
    fully_shard(model.head)
    return {"model": fully_shard(model)}


def optimizer_without_a_layer() -> Arguments:
    model = net()
    return {"model": model, "optimizer": torch.optim.AdamW(model[0].parameters())}


def optimizer_made_before_sharding() -> Arguments:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": fully_shard(model), "optimizer": optimizer}


def trained_on_one_rank() -> Arguments:
    model = net()
    model[2].bias.requires_grad_(dist.get_rank() == 0)
    return {"model": model}


def order_of_a_set() -> Arguments:
    model: Any = nn.ModuleDict()
    for name in ("a", "b") if dist.get_rank() else ("b", "a"):
        torch.manual_seed(0)
        model[name] = nn.Linear(4, 4)
    return {"model": model}


def dropout_with_one_seed() -> Arguments:
    model = nn.Sequential(net(), nn.Dropout(0.1))
    return {"model": DistributedDataParallel(model)}


def dropout_that_drew_more_on_one_rank() -> Arguments:
    """As after batches of other widths."""
    arguments = dropout_with_one_seed()
    torch.rand(5 + dist.get_rank())
    return arguments


def sampler_with_own_seeds() -> Arguments:
    seeded()
    return with_loader(DistributedSampler(DATA, seed=dist.get_rank()))


def with_loader(sampler: Any, batch_size: int = 2, **options: Any) -> Arguments:
    loader: Any = DataLoader(DATA, batch_size=batch_size, sampler=sampler)
    return {"model": net(), "loader": loader, **options}


def sharded_twice() -> Arguments:
    mine = Subset(DATA, range(dist.get_rank(), len(DATA), dist.get_world_size()))
    loader: Any = DataLoader(mine, batch_size=2, sampler=DistributedSampler(mine))
    return {"model": net(), "loader": loader}


def padded() -> Arguments:
    some = Subset(DATA, range(31))
    loader: Any = DataLoader(some, batch_size=2, sampler=DistributedSampler(some))
    return {"model": net(), "loader": loader}


def too_many_samples() -> Arguments:
    return with_loader(DistributedSampler(DATA), global_batch=4, accumulation=2)


def batch_of_one_rank() -> Arguments:
    return with_loader(DistributedSampler(DATA), batch_size=2 + dist.get_rank())


def frozen_with_dropout() -> Arguments:
    seeded_model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 4))
    seeded_model[0].requires_grad_(False)
    with torch.no_grad():
        for parameter in seeded_model.parameters():
            parameter.zero_()
    seeded()
    return {"model": seeded_model}


def frozen_and_broadcast() -> Arguments:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), net())
    model[0].requires_grad_(False).eval()
    return {"model": DistributedDataParallel(model)}


BUGS: list[tuple[str, Callable[[], Arguments], str]] = [
    ("replicas", replica_of_one_rank, "2.weight; rank 0 differs from rank 1"),
    ("replicas", frozen_part_of_one_rank, "0.bias; rank 0 differs from rank 1"),
    ("replicas", replicas_built_with_own_seeds, "0.weight, 0.bias, 1.weight, 1.bias; rank 0"),
    ("ties", tie_of_a_copy, "embed.weight, head.weight, ranks 0, 1"),
    ("ties", tie_in_two_units, "embed.weight, head.weight, ranks 0, 1"),
    ("optimizer", optimizer_without_a_layer, "2.weight, 2.bias, ranks 0, 1"),
    ("optimizer", optimizer_made_before_sharding, "0.weight, 0.bias, 2.weight, 2.bias"),
    ("trainable", trained_on_one_rank, "2.bias; rank 0 differs from rank 1"),
    ("trainable", order_of_a_set, "b.weight, a.weight"),
    ("random", dropout_with_one_seed, "1, ranks 0, 1"),
    ("random", dropout_that_drew_more_on_one_rank, "1, ranks 0, 1"),
    ("random", sampler_with_own_seeds, "loader.sampler, ranks 0, 1"),
    ("sampler", sharded_twice, "loader.dataset, ranks 0, 1"),
    ("sampler", padded, "loader.sampler, ranks 0, 1"),
    ("batch", too_many_samples, "loader.batch_size, ranks 0, 1"),
    ("batch", batch_of_one_rank, "loader.batch_size, ranks 0, 1"),
    ("frozen", frozen_with_dropout, "0, ranks 0, 1"),
    ("frozen", frozen_and_broadcast, "0, ranks 0, 1"),
]


def job_check(build: Callable[[], Arguments]) -> tuple[list[anyrank.Finding], str]:
    arguments = build()
    findings = anyrank.check(arguments.pop("model"), **arguments)
    return [*findings], str(findings)


@pytest.mark.parametrize(("rule", "build", "where"), BUGS, ids=[bug[1].__name__ for bug in BUGS])
def test_a_mistake_is_found_and_named(
    rule: str, build: Callable[[], Arguments], where: str
) -> None:
    (found, text), other = run_ranks(2, job_check, build)
    assert (found, text) == other
    assert [finding.rule for finding in found] == [rule], text
    assert where in found[0].where, text


# -- right set-ups --------------------------------------------------------------------------------


def right_ddp() -> Arguments:
    model = DistributedDataParallel(nn.Sequential(net(), nn.Dropout(0.1), nn.BatchNorm1d(4)))
    seeded()
    loader: Any = DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = 2 * dist.get_world_size()
    return {"model": model, "optimizer": optimizer, "loader": loader, "global_batch": batch}


def right_fsdp2() -> Arguments:
    model = sharded_nets.fsdp(sharded_nets.reference())
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def right_tp_and_fsdp2() -> Arguments:
    model: Any = nn.Sequential(sharded_nets.fsdp_tp(sharded_nets.reference()), nn.Dropout(0.1))
    torch.manual_seed(dist.get_rank() // 2)  # alike on the ranks that share their data
    place = {"num_replicas": dist.get_world_size() // 2, "rank": dist.get_rank() // 2}
    loader: Any = DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA, **place))
    arguments = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    return arguments | {"loader": loader, "global_batch": dist.get_world_size()}


def right_ties() -> Arguments:
    model = Tied()
    fully_shard(model.body)
    return {"model": fully_shard(model), "optimizer": torch.optim.AdamW(model.parameters())}


def right_freeze() -> Arguments:
    frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model = nn.Sequential(anyrank.freeze(frozen), net())
    wrapped = DistributedDataParallel(model)
    return {"model": wrapped.train(), "optimizer": torch.optim.AdamW(wrapped.parameters())}


def right_lora() -> Arguments:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(gpt2(), LoraConfig(target_modules=["c_attn"], lora_dropout=0.1))
    wrapped = DistributedDataParallel(model)
    seeded()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return {"model": wrapped.train(), "optimizer": optimizer}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=17, n_positions=8)
    return GPT2LMHeadModel(config).train()


def right_elastic_loader() -> Arguments:
    model = DistributedDataParallel(nn.Sequential(net(), nn.Dropout(0.1)))
    loader = anyrank.ElasticLoader(DATA, global_batch=8, microbatch=2)
    return {"model": model, "loader": loader, "global_batch": 8}


RIGHT = [
    right_ddp,
    right_fsdp2,
    right_tp_and_fsdp2,
    right_ties,
    right_freeze,
    right_lora,
    right_elastic_loader,
]


@pytest.mark.parametrize("build", RIGHT, ids=[build.__name__ for build in RIGHT])
def test_a_right_set_up_has_no_findings(build: Callable[[], Arguments]) -> None:
    for found, text in run_ranks(4, job_check, build):
        assert found == [], text
