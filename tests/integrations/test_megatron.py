"""Megatron-core's tensor-parallel layers: parts are converted, loaded and synced as wholes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import anyrank
from anyrank.integrations import megatron
from anyrank.testing import run_ranks

WIDTH, HIDDEN, VOCAB = 4, 6, 8
WEIGHTS = {"linear_fc1.weight": "fc1", "linear_fc2.weight": "fc2", "embed.weight": "embed"}
SHAPES = {"fc1": (2 * HIDDEN, WIDTH), "fc2": (WIDTH, HIDDEN), "embed": (VOCAB, WIDTH)}


def whole(name: str) -> torch.Tensor:
    """A weight, whole; those of fc1 are the gate's above those of the up projection."""
    return torch.arange(float(torch.Size(SHAPES[name]).numel())).reshape(SHAPES[name]) + len(name)


class Mlp(nn.Module):
    """The layers as Megatron documents them: their attributes, and what each rank holds."""

    def __init__(self, rank: int, size: int, stride: int) -> None:
        super().__init__()
        self.config = type("Config", (), {"gated_linear_unit": True})()
        self.linear_fc1 = nn.Linear(WIDTH, 2 * HIDDEN // size)
        self.linear_fc2 = nn.Linear(HIDDEN // size, WIDTH)
        self.embed = nn.Embedding(VOCAB // size, WIDTH)
        parts = [one.chunk(size)[rank] for one in whole("fc1").chunk(2)]
        weights = {
            "fc1": (self.linear_fc1.weight, torch.cat(parts), 0, stride),
            "fc2": (self.linear_fc2.weight, whole("fc2").chunk(size, 1)[rank], 1, 1),
            "embed": (self.embed.weight, whole("embed").chunk(size)[rank], 0, 1),
        }
        for parameter, value, dim, step in weights.values():
            parameter.data.copy_(value)
            given: Any = parameter
            given.tensor_model_parallel, given.partition_dim = True, dim
            given.partition_stride = step
        bias: Any = self.linear_fc1.bias
        bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, stride
        bias.data.copy_(torch.cat([part[:, 0] for part in parts]))
        self.linear_fc2.bias.data.fill_(1)


def check_weights(folder: str) -> None:
    want = {
        "linear_fc1.weight": whole("fc1"),
        "linear_fc1.bias": whole("fc1")[:, 0],
        "linear_fc2.weight": whole("fc2"),
        "linear_fc2.bias": torch.ones(WIDTH),
        "embed.weight": whole("embed"),
    }
    assert anyrank.diff(folder, want)


def check_synced(model: Any, given: dict[str, Any]) -> None:
    """Into a whole copy on the last rank, and from there into parts that hold zeros."""
    last = dist.get_rank() == dist.get_world_size() - 1
    copy = {name: torch.zeros(whole(part).shape) for name, part in WEIGHTS.items()}
    copy |= {"linear_fc1.bias": torch.zeros(2 * HIDDEN), "linear_fc2.bias": torch.zeros(WIDTH)}
    anyrank.sync(copy if last else None, model, layout=(None, given), verify=True)
    assert not last or all(torch.equal(copy[name], whole(part)) for name, part in WEIGHTS.items())
    held = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    anyrank.sync(model, copy if last else None, layout=(given, None), verify=True)
    assert all(torch.equal(parameter, held[name]) for name, parameter in model.named_parameters())


def job(folder: str, stride: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = Mlp(rank, size, stride)
    given = megatron.layout(model, range(size))
    check_synced(model, given)
    anyrank.convert(model, f"{folder}/weights", layout=given)


def job_load(folder: str) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, want = Mlp(rank, size, 2), Mlp(rank, size, 2)
    for parameter in model.parameters():
        parameter.data.zero_()
    anyrank.load(model, f"{folder}/weights", layout=megatron.layout(model, range(size)))
    pairs = zip(model.parameters(), want.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("stride", [1, 2], ids=["before 0.16", "0.16"])
def test_parallel_layers_are_parts(tmp_path: Path, stride: int) -> None:
    run_ranks(2, job, str(tmp_path), stride)
    check_weights(str(tmp_path / "weights"))
    assert run_ranks(1, job_load, str(tmp_path)) == [True]


def test_what_has_no_one_meaning_is_refused() -> None:
    model = Mlp(0, 1, 1)
    with pytest.raises(ValueError, match="mesh has 2 axes"):
        megatron.layout(model, [[0, 1]])
    expert: Any = model.linear_fc2.weight
    expert.allreduce = False
    with pytest.raises(ValueError, match=r"linear_fc2.*belongs to an expert"):
        megatron.layout(model, [0])


def job_real(folder: str) -> dict[str, Any]:
    """The same with the layers of Megatron-core, each of which is given `whole`."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
    )
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(dist.get_world_size())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=1,
        ffn_hidden_size=HIDDEN,
        gated_linear_unit=True,
        use_cpu_initialization=True,
        init_method=lambda tensor: tensor.copy_(whole("fc1" if len(tensor) > WIDTH else "embed")),
        output_layer_init_method=lambda tensor: tensor.copy_(whole("fc2")),
        embedding_init_method=lambda tensor: tensor.copy_(whole("embed")),
    )
    group = parallel_state.get_tensor_model_parallel_group()
    with torch.no_grad():
        model: Any = MLP(
            config,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            tp_group=group,
        )
        model.embed = VocabParallelEmbedding(
            VOCAB, WIDTH, init_method=config.embedding_init_method, config=config, tp_group=group
        )
        model.linear_fc2.bias.fill_(1)
        model.linear_fc1.bias.copy_(model.linear_fc1.weight[:, 0])
    given = megatron.layout(model, dist.get_process_group_ranks(group))
    check_synced(model, given)
    anyrank.convert(model, f"{folder}/weights", layout=given)
    parallel_state.destroy_model_parallel()
    return given


def test_the_layers_of_megatron_core_are_parts(tmp_path: Path) -> None:
    (given, _) = run_ranks(2, job_real, str(tmp_path))
    halves = [[(0, 3), (6, 3)], [(3, 3), (9, 3)]]
    assert given["linear_fc1.weight"] == ([0, 1], [Shard(0)], halves)
    check_weights(str(tmp_path / "weights"))
