"""Recomputed layers of transformers models, with the cache that these models make by default."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tests.integrations.families import CONFIGS, SMALL, build
from tests.offloads import offload_of_cpu
from torch.autograd.profiler import profile

import anyrank
from anyrank.integrations.transformers import enable_recompute, tile_mlps
from anyrank.memory import caches

TOKENS = torch.arange(48).reshape(3, 16) % 90 + 1
MASK = torch.ones_like(TOKENS)
MASK[0, 10:] = 0  # an ordinary padded batch
BATCH = {"input_ids": TOKENS, "attention_mask": MASK}
BATCH["labels"] = TOKENS.masked_fill(MASK == 0, -100)

SSM = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
BART = {"vocab_size": 96, "d_model": 32, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1}
BART |= {"eos_token_id": 2, "decoder_start_token_id": 1}
for side in ("encoder", "decoder"):
    BART |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 48}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
SHARED = {**SMALL, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 4}
SHARED |= {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 96}
SHARED |= {"hidden_size_per_layer_input": 8}
SHARED |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
HYBRID = {**SMALL, "num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4}
HYBRID |= {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
PARALLEL = {**SMALL, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}
PARALLEL |= {"mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}

OTHERS: dict[str, Any] = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
    "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**SSM)),
    "jamba": lambda: transformers.JambaForCausalLM(transformers.JambaConfig(**HYBRID)),
    "falcon_h1": lambda: transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**PARALLEL)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4)
    ),
    "gemma4": lambda: transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**SHARED)),
}
# Patterns of the layers, and of parts below or around them which get the cache or make it.
PATTERNS = {
    "llama": ("model.layers.*", "**.self_attn"),
    "gpt2": ("transformer.h.*", "**.attn"),
    "mixtral": ("model.layers.*", "**.self_attn"),
    "llava": ("model.language_model.layers.*", "model.language_model"),
    "qwen2_vl": ("model.language_model.layers.*", "**.self_attn"),
    "t5": ("decoder.block.*", "**.SelfAttention"),
    "bart": ("model.decoder.layers.*", "**.self_attn"),
    "mamba": ("backbone.layers.*", "**.mixer"),
    "jamba": ("model.layers.*", "model"),
    "falcon_h1": ("model.layers.*", "**.self_attn"),
    "gemma3": ("model.layers.*", "**.self_attn"),
    "gemma4": ("model.layers.*", "**.self_attn"),
}


@pytest.fixture(autouse=True)
def anew() -> None:
    """Each test is warned anew."""
    caches._warn_once.cache_clear()  # pyright: ignore[reportPrivateUsage]


def make(family: str) -> Any:
    torch.manual_seed(0)
    model = build(family) if family in CONFIGS else OTHERS[family]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.set_experts_implementation("eager")
    return model.train()


def gradients(model: Any, **more: Any) -> list[Any]:
    model.zero_grad()
    batch: dict[str, Any] = {**BATCH, **more}
    if model.config.is_encoder_decoder:  # with labels, some make no cache
        batch["decoder_input_ids"] = batch.pop("labels").clamp(min=0)
    result = model(**batch)
    loss = result.logits.logsumexp(-1).mean() if result.loss is None else result.loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def assert_close(mine: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(mine, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", PATTERNS)
def test_layers_of_a_padded_batch_are_recomputed_without_a_cache(family: str, caplog: Any) -> None:
    model = make(family)
    plain = gradients(model, use_cache=False)
    layers, parts = PATTERNS[family]
    for mode in (True, False):  # transformers itself recomputes in training only
        for pattern in (layers, parts):
            for offload in (None, offload_of_cpu(1 << 26)):
                handle = anyrank.recompute_(model.train(mode), pattern, offload=offload)
                assert_close(gradients(model), plain)
                handle.remove()
    told = [r.getMessage() for r in caplog.records if "recomputed layers get" in r.getMessage()]
    assert len(told) == len(set(told)) <= 3
    assert any("=None" in text for text in told)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_with_tiles_and_adapters(family: str) -> None:
    def adapted() -> Any:
        return get_peft_model(
            make(family),
            LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"]),
        )

    torch.manual_seed(1)
    plain = gradients(adapted(), use_cache=False)
    torch.manual_seed(1)
    model = adapted()
    anyrank.recompute_(model, "base_model.model." + PATTERNS[family][0])
    tile_mlps(model, 5)
    assert_close(gradients(model), plain)


def test_the_function_itself_by_position_and_name() -> None:
    model = make("llama")
    layer: Any = model.model.layers[0]
    hidden = torch.randn(1, 4, 32, requires_grad=True)
    rotary = model.model.rotary_emb(hidden, torch.arange(4)[None])
    args = (None, torch.arange(4)[None])  # mask, positions
    wanted = layer(hidden, *args, position_embeddings=rotary)
    for cached in (False, True):
        cache = transformers.DynamicCache()
        given = (*args, cache) if cached else args
        named = {} if cached else {"past_key_values": cache}
        mine = anyrank.recompute(layer, hidden, *given, **named, position_embeddings=rotary)
        assert torch.equal(mine, wanted)
        mine.sum().backward()
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("family", ["llama", "t5", "mamba"])
def test_without_gradients_the_cache_is_kept(family: str) -> None:
    model = make(family).eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(TOKENS, **options)
    anyrank.recompute_(model, PATTERNS[family][0])
    with torch.no_grad():
        kept = (
            model(input_ids=TOKENS, decoder_input_ids=TOKENS) if family == "t5" else model(TOKENS)
        )
    cache = kept.cache_params if family == "mamba" else kept.past_key_values
    assert cache.has_previous_state(0) if family == "mamba" else cache.get_seq_length() == 16
    assert torch.equal(model.generate(TOKENS, **options), plain)


class Reading(torch.nn.Module):
    """A layer that only reads what it gets."""

    _can_checkpoint_with_cache = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = Part()

    def forward(self, x: torch.Tensor, cache: Any, use_cache: bool = True) -> torch.Tensor:
        return self.inner(x, cache=cache)


class Part(torch.nn.Module):
    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        return x.exp() * cache.layers[0].keys.mean()


@pytest.mark.parametrize("pattern", ["0", "0.inner"])
def test_layers_that_only_read_it_keep_the_cache(pattern: str) -> None:
    cache, keys = transformers.DynamicCache(), torch.rand(1, 2, 3, 4)
    cache.update(keys, keys, 0)
    x = torch.randn(2, requires_grad=True)
    model = torch.nn.ModuleList([Reading()])
    anyrank.recompute_(model, pattern)
    (mine,) = torch.autograd.grad(model[0](x, cache).sum(), x)
    torch.testing.assert_close(mine, x.exp() * keys.mean())


def test_a_cache_that_holds_tokens_is_refused() -> None:
    """As of a prefix that is trained, which the recomputed layers would not see."""
    config = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = get_peft_model(make("llama"), config)
    anyrank.recompute_(model, "base_model.model.layers.*")
    with pytest.raises(anyrank.RecomputeError, match="a non-empty cache"):
        model(**BATCH)


def test_some_layers_alone_beside_others_that_fill_their_cache() -> None:
    model = make("llama")
    plain = gradients(model, use_cache=False)
    anyrank.recompute_(model, "model.layers.1")
    assert_close(gradients(model), plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model() -> None:
    model = make("llama")
    plain = gradients(model, use_cache=False)
    anyrank.recompute_(model, "model.layers.*")
    torch.compiler.reset()
    assert_close(gradients(torch.compile(model, backend="aot_eager")), plain)


# -- memory ---------------------------------------------------------------------------------------


def peak_bytes(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """The most of a step, by the allocator's events."""

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    step()
    with profile(profile_memory=True) as recorded:
        step()
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


LARGE = {
    "llama": {**SMALL, "hidden_size": 64, "num_hidden_layers": 8},
    "gpt2": {"vocab_size": 96, "n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 256},
    "mamba": {**SSM, "hidden_size": 64, "num_hidden_layers": 6},
}
KINDS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "gpt2": transformers.GPT2Config,
    "mamba": transformers.MambaConfig,
}


@pytest.mark.parametrize("family", LARGE)
def test_the_peak_is_that_of_transformers_own_recompute(family: str) -> None:
    torch.manual_seed(0)
    config, length = KINDS[family](**LARGE[family]), 32 if family == "mamba" else 256
    tokens = torch.randint(64, (2, length))
    batch = {"input_ids": tokens, "labels": tokens}
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    peaks: dict[str, int] = {"plain": peak_bytes(model, batch)}
    theirs = copy.deepcopy(model)
    theirs.activation_checkpointing_enable()
    peaks["theirs"] = peak_bytes(theirs, batch)
    handle = anyrank.recompute_(model, PATTERNS[family][0])
    peaks["recompute_"] = peak_bytes(model, batch)
    handle.remove()
    enable_recompute(model)
    peaks["enable_recompute"] = peak_bytes(model, batch)
    assert peaks["theirs"] < peaks["plain"] / 2
    assert max(peaks["recompute_"], peaks["enable_recompute"]) <= 1.05 * peaks["theirs"], peaks
