"""transformers models: the same weights as `from_pretrained`, sharded, tied, fused and with adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

import anyrank
from anyrank.testing import run_ranks
from tests.integrations.families import CONFIGS, build, save


def shard(model: Any) -> Any:
    for module in list(model.modules()):
        kind = type(module).__name__
        if kind.endswith(("DecoderLayer", "EncoderLayer", "GPT2Block", "VisionBlock", "BertLayer")):
            fully_shard(module)
    return fully_shard(model)


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole: Any = tensor.detach()
    return whole.full_tensor() if hasattr(whole, "full_tensor") else whole


def job_family(family: str, folder: str, peft: bool, meta: bool) -> tuple[dict[str, Any], Any, Any]:
    torch.manual_seed(torch.distributed.get_rank() + 7)
    if meta:
        with anyrank.meta():
            model = build(family)
            if peft:
                model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    else:
        model = build(family)
        if peft:
            model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    shard(model)
    report = anyrank.load(model, folder)
    base = model.get_base_model() if peft else model
    tied = base.get_output_embeddings()
    same = tied is not None and tied.weight is base.get_input_embeddings().weight
    return {k: full(v) for k, v in model.state_dict().items()}, report, same


def plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", CONFIGS)
def test_same_weights_as_from_pretrained(tmp_path: Any, family: str, peft: bool) -> None:
    if peft and family in ("mixtral", "qwen3_moe", "gpt2", "bert", "qwen2_vl"):
        pytest.skip("one adapter case for each way of naming is enough: llama, llama_tied, llava")
    expected = save(family, tmp_path)
    results = run_ranks(2, job_family, family, str(tmp_path), peft, True, timeout=60)
    for weights, report, tied in results:
        found = {plain_name(k): v for k, v in weights.items() if "lora_" not in k}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        assert report.missing == report.unexpected == []
        assert tied == (family in ("llama_tied", "gpt2", "bert"))
    adapters = [{k: v for k, v in w.items() if "lora_" in k} for w, _, _ in results]
    assert bool(adapters[0]) == peft
    for name, value in adapters[0].items():
        assert torch.equal(value, adapters[1][name]), name
        assert bool((value == 0).all()) == ("lora_B" in name), name
