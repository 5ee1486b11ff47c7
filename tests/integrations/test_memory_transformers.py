"""Tiles and recomputed layers in transformers models: views, routers, caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.integrations.families import build

import anyrank

TOKENS = torch.arange(24).reshape(2, 12)


def make(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = build(family).train()
    for module in model.modules():  # GPT-2 has dropout by default
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name, value in options.items():
        setattr(model.config, name, value)
    return model


def grads(model: Any, **more: Any) -> list[torch.Tensor]:
    loss = model(input_ids=TOKENS, labels=TOKENS, use_cache=False, **more).loss
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "qwen3_moe"])
def test_modules_that_view_their_input_are_tiled(family: str) -> None:
    model = make(family)
    plain = grads(model)
    assert len(anyrank.tile_(model, "**.mlp", chunk_size=5).names) == 2
    for mine, wanted in zip(grads(model), plain, strict=True):
        assert (mine is None) == (wanted is None)
        if mine is not None:
            torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mask", [None, torch.ones_like(TOKENS)])
def test_a_block_whose_router_is_recorded_is_refused(mask: Any) -> None:
    model = make("mixtral", output_router_logits=True)
    anyrank.tile_(model, "**.mlp", chunk_size=5)
    with pytest.raises(ValueError, match="transformers records router_logits inside it"):
        grads(model, attention_mask=mask)


def test_a_cache_in_training_is_refused_by_the_name_of_the_option() -> None:
    model = make("llama")
    anyrank.recompute_(model, "model.layers.*")
    with pytest.raises(anyrank.RecomputeError, match=r"past_key_values.*use_cache=False"):
        model(input_ids=TOKENS, labels=TOKENS)
    with torch.no_grad():
        assert model(input_ids=TOKENS).past_key_values.get_seq_length() == 12
