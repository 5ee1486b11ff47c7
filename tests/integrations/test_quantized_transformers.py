"""Quantized transformers checkpoints: the values that `from_pretrained` dequantizes them to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tests.quantized import fp8, mxfp4

import anyrank

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


def gpt_oss() -> Any:
    return tf.GptOssConfig(
        **SMALL, hidden_size=32, intermediate_size=32, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2, layer_types=["full_attention"] * 2,
    )  # fmt: skip


def qwen3_moe() -> Any:
    return tf.Qwen3MoeConfig(
        **SMALL, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, head_dim=8,
    )  # fmt: skip


def save(config: Any, folder: Path) -> None:
    """A checkpoint of which every weight of an expert, and of attention, is quantized."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if name.endswith(("gate_up_proj", "down_proj")):  # gpt-oss; square, so that a swap is seen
            experts, columns, rows = tensor.shape
            del tensors[name]
            blocks, scales = mxfp4(experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = blocks
            tensors[f"{name}_scales"] = scales % 20 + 110
        elif config.model_type != "gpt_oss" and "proj.weight" in name:
            values, scales = fp8(*tensor.shape, 16)
            tensors[name], tensors[f"{name}_scale_inv"] = values, scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("config", [gpt_oss, qwen3_moe])
def test_the_values_of_from_pretrained(tmp_path: Path, config: Any) -> None:
    made = config()
    save(made, tmp_path)
    how: Any = tf.Mxfp4Config(dequantize=True)
    made.quantization_config = {"quant_method": "mxfp4"}
    if made.model_type != "gpt_oss":
        how = tf.FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
        made.quantization_config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    made.save_pretrained(tmp_path)
    theirs = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=how, dtype=torch.bfloat16
    )
    del made.quantization_config
    model = tf.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    report = anyrank.load(model, tmp_path)
    expected = theirs.state_dict()
    assert expected.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert set(report.cast.values()) == {
        "mxfp4 -> bfloat16" if made.model_type == "gpt_oss" else "fp8 -> bfloat16"
    }


def test_a_converted_folder_is_one_that_from_pretrained_opens(tmp_path: Path) -> None:
    made = gpt_oss()
    save(made, tmp_path / "a")
    made.quantization_config = {"quant_method": "mxfp4"}
    made.save_pretrained(tmp_path / "a")
    anyrank.convert(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    theirs = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", quantization_config=tf.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    plain = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.bfloat16)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
