"""`convert` to folders that `from_pretrained` opens: names, ties and configuration are right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.runs import save
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.errors import LoadError
from anyrank.testing import run_ranks

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 33,
}


def llama(tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SMALL, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


def equal(model: Any, other: Any) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_becomes_a_folder_that_transformers_opens(tmp_path: Path, tied: bool) -> None:
    model = llama(tied)
    save(tmp_path / "run", anyrank.TrainState(model))
    report = anyrank.convert(tmp_path / "run", tmp_path / "out", model=model)
    names = load_file(tmp_path / "out/model.safetensors").keys()
    assert ("lm_head.weight" in names) != tied
    assert report.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert equal(model, opened)
    assert (opened.lm_head.weight is opened.model.embed_tokens.weight) == tied


def test_experts_are_written_as_transformers_does(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "own")
    torch.save(model.state_dict(), tmp_path / "w.pt")
    with anyrank.meta():
        on_meta = mixtral()
    anyrank.convert(tmp_path / "w.pt", tmp_path / "out", model=on_meta)
    assert anyrank.diff(tmp_path / "own", tmp_path / "out")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert equal(model, opened)
    anyrank.convert(model, tmp_path / "live")
    assert anyrank.diff(tmp_path / "own", tmp_path / "live")


def test_ties_of_two_values_and_other_models_are_refused(tmp_path: Path) -> None:
    model = llama(True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "copies.pt")
    report = anyrank.convert(tmp_path / "copies.pt", tmp_path / "out", model=model)
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    state["lm_head.weight"] += 1
    with pytest.raises(LoadError, match="differ in the source"):
        anyrank.convert(state, tmp_path / "bad", model=model)
    del state["model.norm.weight"], state["lm_head.weight"]
    with pytest.raises(
        LoadError, match=r"the source lacks 1 tensor of the model\. The first is model\.norm"
    ):
        anyrank.convert(state, tmp_path / "bad", model=model)


def job_experts(folder: str) -> dict[str, str]:
    model = mixtral()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return anyrank.convert(model, os.path.join(folder, "out"), rename={"lm_head": "head"}).renamed


def test_a_sharded_model_of_experts_is_written_as_transformers_does(tmp_path: Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "own")
    renamed = run_ranks(2, job_experts, str(tmp_path))
    assert renamed[0]["lm_head.weight"] == "head.weight"
    anyrank.convert(tmp_path / "own", tmp_path / "named", rename={"lm_head": "head"})
    assert anyrank.diff(tmp_path / "named", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["named", "out", "own"]


def job(folder: str) -> list[str]:
    model = llama(True)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return anyrank.convert(model, os.path.join(folder, "out"), dtype="bfloat16").files


def test_a_sharded_model_becomes_a_folder_that_transformers_opens(tmp_path: Path) -> None:
    files = run_ranks(2, job, str(tmp_path))
    assert files[0] == files[1]
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.dtype == torch.bfloat16
    assert equal(llama(True).bfloat16(), opened)
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    assert not dist.is_initialized()


def test_the_configuration_says_the_dtype_of_the_weights(tmp_path: Path) -> None:
    llama(tied=False).bfloat16().save_pretrained(tmp_path / "a")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "a", dtype="auto").float()
    assert model.config.dtype == torch.bfloat16
    anyrank.convert(model, tmp_path / "b")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    assert read.dtype == torch.float32
    assert equal(read, model)
