"""What docs/memory.md takes for granted: a small Llama, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def build() -> Any:
    """A Llama with the same weights each time."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).train()


def gradients(model: Any, **inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return [p.grad for p in model.parameters()]


def equal(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> bool:
    pairs = zip(ours, plain, strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


tokens = torch.randint(96, (2, 40))
plain = gradients(build(), input_ids=tokens, labels=tokens)
