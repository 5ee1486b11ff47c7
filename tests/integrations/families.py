"""Tiny transformers models of the kinds that break loaders: fused experts, two towers, ties,
adapters.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def llava() -> Any:
    text = tf.LlamaConfig(**SMALL)
    vision = tf.CLIPVisionConfig(**VISION)
    return tf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=95)


def qwen2_vl() -> Any:
    text = {**SMALL, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2,
              "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
    return tf.Qwen2VLConfig(text_config=text, vision_config=vision)


CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama_tied": lambda: tf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mixtral": lambda: tf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **SMALL, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8
    ),
    "llava": llava,
    "qwen2_vl": qwen2_vl,
    "gpt2": lambda: tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64),
    "bert": lambda: tf.BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
    ),
}
CLASSES: dict[str, Any] = {
    "llava": tf.LlavaForConditionalGeneration,
    "qwen2_vl": tf.Qwen2VLForConditionalGeneration,
    "bert": tf.BertForMaskedLM,
}


def build(family: str) -> Any:
    """The model from its config; values as its own rules give them."""
    config = CONFIGS[family]()
    kind = CLASSES.get(family)
    return kind(config) if kind is not None else tf.AutoModelForCausalLM.from_config(config)


def save(family: str, folder: Any) -> dict[str, torch.Tensor]:
    """Save with `save_pretrained` and return what `from_pretrained` makes of it."""
    torch.manual_seed(1)
    model = build(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)
    again = type(model).from_pretrained(folder)
    return {k: v.clone() for k, v in again.state_dict().items()}
