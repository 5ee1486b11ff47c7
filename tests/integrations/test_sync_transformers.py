"""`sync` between transformers models: by their own names, and by those of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.integrations.families import build, save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import anyrank
from anyrank.testing import run_ranks


def job_families(folder: str, families: list[str]) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    for family in families:
        path = Path(folder) / family
        torch.manual_seed(3)
        model = build(family)
        anyrank.load(model, path)
        expected = {k: v.clone() for k, v in model.state_dict().items()}
        src: Any = fully_shard(model, mesh=mesh) if dist.get_rank() < 2 else None
        with anyrank.meta():
            dst: Any = build(family)
        report = anyrank.sync(dst, src, verify=True)
        for name, value in dst.state_dict().items():
            assert torch.equal(value, expected[name]), (family, name)
        assert report.unexpected == report.missing == []
        # The names and the pieces of its file: on rank 2 alone, fused on the way.
        weights = load_file(path / "model.safetensors") if dist.get_rank() == 2 else None
        with torch.no_grad():
            for parameter in dst.parameters():
                parameter.zero_()
        anyrank.sync(dst, weights, verify=True)
        for name, value in dst.state_dict().items():
            assert torch.equal(value, expected[name]), (family, name)


def job_rows(folder: str) -> None:
    """A fused weight, cut by rows over the ranks, into the layers that a mapping makes of it."""
    import transformers

    sizes: dict[str, int] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 32}
    torch.manual_seed(3)
    model: Any = transformers.AutoModel.from_config(transformers.NomicBertConfig(**sizes))
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    weights = load_file(Path(folder) / "model.safetensors")
    assert any("qkv" in name.lower() for name in weights)
    mesh = DeviceMesh("cpu", [0, 1])
    src = {key: distribute_tensor(value, mesh, [Shard(0)]) for key, value in weights.items()}
    torch.manual_seed(5)
    dst: Any = fully_shard(transformers.AutoModel.from_config(model.config), mesh=mesh)
    anyrank.sync(dst, src, verify=True)
    for name, value in dst.state_dict().items():
        assert torch.equal(value.full_tensor(), model.state_dict()[name]), name


@pytest.mark.slow
def test_rows_of_fused_weights_that_are_sharded(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.20")
    run_ranks(2, job_rows, str(tmp_path), timeout=60)


FAMILIES = ["llama_tied", "mixtral", "qwen3_moe", "llava", "gpt2"]


@pytest.mark.slow
def test_live_models_and_the_names_of_their_files(tmp_path: Path) -> None:
    for family in FAMILIES:
        save(family, tmp_path / family)
    run_ranks(3, job_families, str(tmp_path), FAMILIES)
