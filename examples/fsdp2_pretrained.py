"""Pretrained weights into FSDP2: a dense, a mixture-of-experts or a vision-language model, or LoRA.

    python examples/fsdp2_pretrained.py --model mixtral
    torchrun --nproc-per-node 4 examples/fsdp2_pretrained.py --model llava --lora

Every rank reads its own bytes. The outputs are compared with those of `from_pretrained` on one
process, and the losses of three training steps are printed. The models are small, from configs,
and saved first, as no hub is needed; with a real folder only `folder` changes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

import anyrank

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def config_of(name: str, tied: bool) -> tuple[type[Any], Any]:
    if name == "llama":
        return tf.LlamaForCausalLM, tf.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    if name == "mixtral":  # transformers fuses its experts while it loads; so does anyrank
        config = tf.MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=tied)
        return tf.MixtralForCausalLM, config
    vision = {**SIZES, "image_size": 16, "patch_size": 8}
    vision = {k: v for k, v in vision.items() if k not in ("num_key_value_heads", "vocab_size")}
    text = tf.LlamaConfig(**SIZES)
    config = tf.LlavaConfig(
        text_config=text, vision_config=tf.CLIPVisionConfig(**vision), tie_word_embeddings=tied
    )
    return tf.LlavaForConditionalGeneration, config


def shard(model: Any) -> Any:
    for module in model.modules():
        if type(module).__name__.endswith(("DecoderLayer", "EncoderLayer")):
            fully_shard(module)
    return fully_shard(model)


def with_lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def sgd(model: Any) -> torch.optim.Optimizer:
    """Made before the first forward: FSDP2's root may hold whole parameters after one."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def train(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> list[float]:
    losses: list[float] = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(name: str, lora: bool, tied: bool, folder: str) -> tuple[Any, list[float], list[float]]:
    """Load into FSDP2; returns the report, this model's losses, and those of one process."""
    kind, config = config_of(name, tied)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        kind(config).save_pretrained(folder)
    dist.barrier()

    with anyrank.meta():
        model = kind(config)
        model = with_lora(model) if lora else model
    shard(model)
    report = anyrank.load(model, folder)

    plain = kind.from_pretrained(folder)
    if lora:  # lora_B is zero at first, so adapters that were drawn anew change nothing yet
        plain = with_lora(plain)
        anyrank.load(plain, {k: v.full_tensor() for k, v in model.state_dict().items()})
    optimizers = sgd(model), sgd(plain)
    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)
    return report, train(model, optimizers[0], tokens), train(plain, optimizers[1], tokens)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=("llama", "mixtral", "llava"), default="llama")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--tied", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "RANK" not in os.environ:  # plain python: a world of one
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    result, ours, theirs = main(options.model, options.lora, options.tied, box[0])
    if dist.get_rank() == 0:
        print(result)
        print("losses with FSDP2      ", ours)
        print("losses on one process  ", theirs)
    dist.destroy_process_group()
